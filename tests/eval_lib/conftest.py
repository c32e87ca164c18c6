"""The figures that a test makes, to be looked at after they were saved."""

import pytest

from eval_lib import figures


@pytest.fixture
def made(monkeypatch):
  """A list that every figure is added to."""
  found = []
  real = figures.load_matplotlib

  def spy():
    matplotlib, make = real()

    def keep(**arguments):
      found.append(make(**arguments))
      return found[-1]

    return matplotlib, keep

  monkeypatch.setattr(figures, 'load_matplotlib', spy)
  return found
