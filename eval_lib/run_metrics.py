"""The curves of a run: read from `metrics.jsonl`, and smoothed for drawing."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

# A curve with more points is drawn pale, under its moving average.
SMOOTH_ABOVE = 100
SMOOTH_SHARE = 0.03

# Steps `[P]` and values `[P]` of one metric.
Series = tuple[Float[np.ndarray, ' P'], Float[np.ndarray, ' P']]


def read_series(path: pathlib.Path) -> dict[str, Series]:
  """Reads `metrics.jsonl`: one JSON object a line, each with its `step`.

  A torn last line, as a kill leaves it, is ignored. Of several values for a
  step, as a resumed run may write them, the last counts. Values that are not
  finite leave a gap.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: another line is damaged; names file and line.
  """
  values: dict[str, dict[int, float]] = {}
  lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line) if line.strip() else {'step': 0}
      step = row.pop('step')
    except (ValueError, AttributeError, KeyError, TypeError):
      # What follows the last newline is a line still being written.
      if number == len(lines):
        break
      raise ValueError(
        f'{path}:{number}: expected a JSON object with a step, got '
        f'{line[:60]!r}; delete the line to draw the rest'
      ) from None
    for name, value in row.items():
      values.setdefault(name, {})[step] = float(value)
  return {
    name: tuple(np.array(sorted(points.items()), float).T)
    for name, points in values.items()
  }


def smooth(
  values: Float[np.ndarray, ' P'],
) -> Float[np.ndarray, ' P'] | None:
  """A centred moving average, or None for a curve too short to need it."""
  if len(values) <= SMOOTH_ABOVE:
    return None
  width = max(3, int(len(values) * SMOOTH_SHARE))
  kernel = np.ones(width)
  finite = np.isfinite(values)
  total = np.convolve(np.where(finite, values, 0.0), kernel, mode='same')
  count = np.convolve(finite.astype(float), kernel, mode='same')
  # At the ends the window holds fewer points, and divides by as many.
  return np.where(finite, total / np.maximum(count, 1.0), np.nan)


def envelope(
  values: Float[np.ndarray, ' P'], pick: Callable[..., Any]
) -> Float[np.ndarray, ' P']:
  """Minimum or maximum over the window of `smooth`; short curves as given.

  Args:
    values: a curve.
    pick: numpy.min or numpy.max.
  """
  if len(values) <= SMOOTH_ABOVE:
    return values
  half = max(3, int(len(values) * SMOOTH_SHARE)) // 2
  return np.array(
    [pick(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
  )
