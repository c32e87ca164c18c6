"""When the cases of a long test run: one in CI, the others at night."""

import pytest


def first_is_slow(*rows):
  """Returns the parameters of a test; all rows but the first run at night."""
  marks = [pytest.mark.slow, *[pytest.mark.nightly] * (len(rows) - 1)]
  return [
    pytest.param(*row, marks=mark)
    for row, mark in zip(rows, marks, strict=True)
  ]
