"""Pictures of a run, of sweeps and searches; see `plots.figure` for errors."""

import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.ndimage
from jaxtyping import Float

from eval_lib import plots, report
from eval_lib.plots import Line, Panel, Path, draw_panels

# A longer curve is drawn pale, under its moving average.
SMOOTH_ABOVE, SMOOTH_SHARE = 100, 0.03
# Panels of every run; see `train_lib.task.Task.PANELS`.
_LOSS: Any = (
  'Loss', 'nats per example', 1.0,
  {'loss': '', 'cross_entropy': 'cross-entropy'},
)  # fmt: skip
_RATE = 'Learning rate', '', 1.0, {'learning_rate': ''}

# Steps `[P]` and values `[P]` of metrics, by name.
Curves = Mapping[str, Sequence[Float[np.ndarray, ' P']]]


def plot_run(workdir: Path, panels: Sequence[Any] = ()) -> pathlib.Path:
  """Draws the `metrics.jsonl` of a directory; returns the path of `run.png`.

  `panels` are the `Task.PANELS` of the run. Raises ValueError if there is
  nothing to draw, or a damaged line; see also `figure`.
  """
  workdir = pathlib.Path(workdir)
  curves = report.read_curves(workdir / 'metrics.jsonl')
  rows = _LOSS, *_accuracies(curves), *panels, _RATE
  panels = [_panel(curves, *row) for row in rows]
  panels = [panel for panel in panels if panel.lines]
  if not panels:
    raise ValueError(
      f'{workdir / "metrics.jsonl"}: expected train/loss or another metric '
      f'that is drawn, got {sorted(curves)}'
    )
  columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
  size = 5.4 * columns, 3.5 * math.ceil(len(panels) / columns) + 0.3
  path = workdir / 'run.png'
  draw_panels(path, panels, size, columns, workdir.resolve().name)
  return path


def _accuracies(curves: Curves) -> Iterator[Any]:
  """Yields a panel for each target, without their mean, or one panel.

  Of the heads of an EAT the last is drawn, and the first.
  """
  ends = {
    name.rpartition('/accuracy')[2]
    for name in curves
    if name.replace('/accuracy', '/cross_entropy') in {*curves} - {name}
  }
  for end in sorted(ends) or ['']:
    pattern = rf'.+/accuracy_exit_(\d+){re.escape(end)}'
    exits = [int(m[1]) for name in curves if (m := re.fullmatch(pattern, name))]
    labels = {rf'accuracy{re.escape(end)}|\d+shot': ''} | {
      f'accuracy_exit_{layer}{re.escape(end)}': f'exit at layer {layer}'
      for layer in sorted(exits)[:1]
    }
    yield f'Accuracy{end.replace("_", ", ", 1)}', '%', 100.0, labels


def _window(points: int) -> int:
  return max(3, int(points * SMOOTH_SHARE)) if points > SMOOTH_ABOVE else 1


def smooth(values: Float[np.ndarray, ' P']) -> Float[np.ndarray, ' P']:
  """Returns a centred moving average; gaps (NaN) stay."""
  kernel = np.ones(_window(len(values)))
  finite = np.isfinite(values)
  total = np.convolve(np.where(finite, values, 0.0), kernel, mode='same')
  # At the ends the window holds fewer points.
  count = np.convolve(finite.astype(float), kernel, mode='same')
  return np.where(finite, total / np.maximum(count, 1.0), np.nan)


def _panel(
  curves: Curves, title: str, unit: str, scale: float, labels: Mapping[str, str]
) -> Panel:
  """Returns a panel: a colour per source, a line style per metric."""
  lines: list[Line] = []
  numbers = {'train': 0}
  for (metric, word), style in zip(labels.items(), '-:', strict=False):
    names = [name for name in curves if re.fullmatch(f'.+/({metric})', name)]
    # Training before evaluations, and few shots before more.
    names.sort(key=lambda name: (name.rpartition('/')[0], len(name), name))
    names.sort(key=lambda name: not name.startswith('train/'))
    for name in names:
      source, _, last = name.rpartition('/')
      shots = f'{last[:-4]}-shot' if last.endswith('shot') else ''
      label = ', '.join(filter(None, (source, word or shots)))
      number = numbers.setdefault(source if word else label, len(numbers))
      values = scale * curves[name][1]
      line = Line(label, curves[name][0], values, number)
      # A loss may be the cross-entropy, which is drawn already.
      if title != 'Loss' or not any(_same(line, other) for other in lines):
        lines += _with_spread(curves, name, scale, line, style)
  last_step = max((steps[-1] for steps, _ in curves.values()), default=0)
  limits = 0, max(last_step * 1.02, 1)
  bottom = (0, None) if title == 'Learning rate' else None
  return Panel(title, unit, 'step', lines, limits, bottom, 6)


def _same(line: Line, other: Line) -> bool:
  is_alike = line.number == other.number and len(line.y) == len(other.y)
  return is_alike and np.allclose(line.y, other.y, rtol=1e-3, equal_nan=True)


def _with_spread(
  curves: Curves, name: str, scale: float, line: Line, style: str
) -> Iterator[Line]:
  """Yields a metric with its band, smoothed if it is one of training.

  `x_std` gives a band around `x`, `x_min` and `x_max` around `x_mean`.
  """
  window, values = _window(len(line.y)), line.y
  stem = name.removesuffix('_mean')
  is_training = line.number == 0
  if f'{name}_std' in curves:
    std = scale * curves[f'{name}_std'][1]
    line = line._replace(band=(values - std, values + std))
  elif is_training and {f'{stem}_min', f'{stem}_max'} <= {*curves}:
    least, most = (scale * curves[f'{stem}_{end}'][1] for end in ('min', 'max'))
    least = scipy.ndimage.minimum_filter1d(least, window)
    most = scipy.ndimage.maximum_filter1d(most, window)
    line = line._replace(label=f'{line.label}, min to max', band=(least, most))
  # A schedule is exact: nothing to smooth.
  if is_training and window > 1 and not name.endswith('/learning_rate'):
    pale = {'alpha': 0.25, 'linewidth': 0.8, 'marker': ''}
    yield Line('', line.x, values, style=pale)
    line = line._replace(y=smooth(values))
  # A line through a single point is drawn by its marker.
  plain = {'marker': ''} if is_training and len(values) > 1 else {}
  # Two single points of a source differ by their markers only.
  hollow = {'markerfacecolor': 'white'} if style == ':' else {}
  yield line._replace(style={'linestyle': style, **hollow, **plain})


def plot_ranges(
  path: Path,
  points: Mapping[str, Mapping[int | float, Sequence[float]]],
  x_label: str,
  y_label: str,
) -> None:
  """Draws the mean of repeated measurements over x, and their range.

  `points` are measurements by the name of a line and the place on the x axis,
  which is logarithmic if it spans a factor of `plots.WIDE` or more.
  """
  lines = []
  for number, (name, places) in enumerate(points.items()):
    x = sorted(places)
    y = np.array([np.mean(places[place]) for place in x])
    ends = [np.array([end(places[p]) for p in x]) for end in (min, max)]
    band = ends[0], ends[1]
    lines.append(Line(name, np.array(x), y, number, band))
  every = [float(x) for line in lines for x in line.x]
  log = 'x' if 0 < plots.WIDE * min(every) <= max(every) else ''
  title = 'Mean and range of the runs'
  panel = Panel(title, y_label, x_label, lines, log=log, at_points=True)
  draw_panels(path, [panel], (6.4, 4.2))


def plot_trials(
  path: Path,
  columns: Mapping[str, Sequence[Any]],
  mode: str,
  logs: Sequence[str] = (),
) -> None:
  """Draws a metric over trials, and over each field; the best has a star.

  Args:
    columns: of the trials, by name: the metric (None without), then fields.
    mode: 'max' or 'min': which is better.
    logs: fields with a logarithmic axis.
  """
  (label, values), *fields = columns.items()
  y, numbers = np.array(values, float), np.arange(len(values))
  sign = -1 if mode == 'min' else 1
  best = sign * np.fmax.accumulate(sign * y)
  first = [int(n) for n in np.flatnonzero(y == best[-1])[:1]]
  points, steps = {'linestyle': ''}, {'marker': '', 'drawstyle': 'steps-post'}
  star = {'linestyle': '', 'marker': '*', 'markersize': 15}

  def drawn(names: Sequence[str], x: np.ndarray) -> list[Line]:
    trials = Line(names[0], x, y, 0, style=points)
    return [trials, Line(names[1], x[first], y[first], 1, style=star)]

  lines = drawn(('a trial', f'best: {y[first].max(initial=0):.4g}'), numbers)
  lines.insert(0, Line('best so far', numbers, best, 1, style=steps))
  panels = [Panel('All trials', label, 'trial', lines, ticks=8)]
  for field, x in fields:
    places = [plots.shown(v) if isinstance(v, str) else v for v in x]
    is_integer = all(isinstance(value, int) for value in x)
    ticks = 6 if is_integer and field not in logs else 0
    log, lines = 'x' * (field in logs), drawn(('', ''), np.array(places))
    panels.append(Panel('', label, field, lines, ticks=ticks, log=log))
  size = 4.6 * min(len(panels), 3), 3.5 * math.ceil(len(panels) / 3)
  draw_panels(path, panels, size, min(len(panels), 3))
