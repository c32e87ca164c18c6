"""The published implementations that tests compare with, or a skip."""

import importlib
import importlib.util
import sys
from unittest import mock

import pytest

TORCHVISION = (
  'torchvision torchvision.datasets torchvision.models '
  'torchvision.models.feature_extraction torchvision.ops torchvision.ops.misc '
  'torchvision.transforms torchvision.transforms.functional'
)


def torch_and_transformers():
  """(torch on one thread, transformers without messages)."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  torch.set_num_threads(1)
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  return torch, transformers


def timm():
  """timm.models.vision_transformer, with a stub if there is no torchvision.

  `pip install --no-deps timm`: torchvision, which the extra [peers] lacks, is
  imported by timm but not used by its ViT.
  """
  if importlib.util.find_spec('timm') is None:
    pytest.skip("no timm: pip install --no-deps 'timm>=1,<2'")
  with pytest.MonkeyPatch.context() as patch:
    if importlib.util.find_spec('torchvision') is None:
      for name in TORCHVISION.split():
        stub = mock.MagicMock(
          FrozenBatchNorm2d=type('FrozenBatchNorm2d', (), {})
        )
        patch.setitem(sys.modules, name, stub)
        parent, _, leaf = name.rpartition('.')
        if parent:
          setattr(sys.modules[parent], leaf, stub)
    return importlib.import_module('timm.models.vision_transformer')
