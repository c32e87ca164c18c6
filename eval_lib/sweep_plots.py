"""Pictures of sweeps and searches; see `plots.figure` for their errors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval_lib import plots
from eval_lib.plots import Line, Panel, Path


def plot_ranges(
  path: Path,
  points: Mapping[str, Mapping[int | float, Sequence[float]]],
  x_label: str,
  y_label: str,
) -> None:
  """Draws the mean of repeated measurements over x, and their range.

  `points` are measurements by the name of a line and the place on the x axis,
  which is logarithmic if it spans a factor of 8 or more.
  """
  lines = []
  for number, (name, places) in enumerate(points.items()):
    x = sorted(places)
    y = np.array([np.mean(places[place]) for place in x])
    ends = [np.array([end(places[p]) for p in x]) for end in (min, max)]
    lines.append(Line(name, np.array(x), y, number, (ends[0], ends[1])))
  every = [float(x) for line in lines for x in line.x]
  doubles = 0 < 8 * min(every) <= max(every)
  panel = Panel('Mean and range', y_label, x_label, lines, doubles=doubles)
  plots.draw_panels(path, [panel], (6.4, 4.2))


def plot_trials(
  path: Path,
  columns: Mapping[str, Sequence[Any]],
  mode: str,
  logs: Sequence[str] = (),
) -> None:
  """Draws a metric over trials with the best so far, and over each field.

  Args:
    columns: of the trials, by name: the metric (None without), then fields.
    mode: 'max' or 'min': which is better.
    logs: fields with a logarithmic axis.
  """
  (label, values), *fields = columns.items()
  y, numbers = np.array(values, float), np.arange(1, len(values) + 1)
  best = (np.fmin if mode == 'min' else np.fmax).accumulate(y)
  points, steps = {'linestyle': ''}, {'marker': '', 'drawstyle': 'steps-post'}
  lines = [
    Line('best so far', numbers, best, 1, style=steps),
    Line('a trial', numbers, y, 0, style=points),
  ]
  panels = [Panel('All trials', label, 'trial', lines, ticks=8)]
  for number, (field, x) in enumerate(fields, 2):
    places = [plots.shown(v) if isinstance(v, str) else v for v in x]
    lines = [Line('', np.array(places), y, number, style=points)]
    is_integer = all(isinstance(value, int) for value in x)
    ticks = 6 if is_integer and field not in logs else 0
    panels.append(
      Panel('', label, field, lines, ticks=ticks, log=field in logs)
    )
  size = 4.6 * min(len(panels), 3), 3.5 * math.ceil(len(panels) / 3)
  plots.draw_panels(path, panels, size, min(len(panels), 3))
