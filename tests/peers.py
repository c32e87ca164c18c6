"""The published implementations that tests compare with, or a skip."""

import pytest


def torch_and_transformers():
  """(torch on one thread, transformers without messages)."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  torch.set_num_threads(1)
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  return torch, transformers
