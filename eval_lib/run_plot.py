"""A run as one picture: `run.png` and `run.pdf` from `metrics.jsonl`.

Panels appear for what the run has logged: loss, accuracy, tape length, ponder
steps, iterations, learning rate.
"""

import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.ndimage
from jaxtyping import Float

from eval_lib import plots

# A longer curve is drawn pale, under its moving average.
SMOOTH_ABOVE = 100
SMOOTH_SHARE = 0.03

RATE = 'Learning rate'
# A mean between smallest and largest value: metric, title, unit.
SPREADS = (
  ('tape_length', 'Tape length', 'tape tokens'),
  ('ponder_steps', 'Ponder steps', 'steps'),
)
# Metrics of one panel: title, unit, scale, their names.
LINES = (
  ('Masked words, sentence order', '%', 100.0,
   {'mlm_accuracy': 'masked words', 'sop_accuracy': 'sentence order'}),
  # The depth is drawn too: the last token of a row determines its time.
  ('Iterations', 'iterations', 1.0,
   {'iterations': 'mean of the tokens', 'depth': 'depth of the rows'}),
  ('Repetitions', 'repetitions of the cell', 1.0, {'steps': 'mean'}),
)  # fmt: skip

# Steps `[P]` and values `[P]` of one metric.
Curve = tuple[Float[np.ndarray, ' P'], Float[np.ndarray, ' P']]
Curves = Mapping[str, Curve]
# Draws a line on the axes given.
Line = Callable[[Any], None]


def plot_run(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Draws `run.png` and `run.pdf` into a run's directory.

  Args:
    workdir: holds `metrics.jsonl`.

  Returns:
    The path of `run.png`.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    FileNotFoundError: there is no `metrics.jsonl`.
    ValueError: it holds nothing that can be drawn, or is damaged.
  """
  workdir = pathlib.Path(workdir)
  found = read_curves(workdir / 'metrics.jsonl')
  panels = run_panels(found)
  if not panels:
    raise ValueError(
      f'{workdir / "metrics.jsonl"}: expected train/loss or another metric '
      f'that is drawn, got {sorted(found)}'
    )
  columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
  rows = math.ceil(len(panels) / columns)
  last_step = max(steps[-1] for steps, _ in found.values())

  def draw(figure):
    figure.get_layout_engine().set(w_pad=0.14, h_pad=0.1)
    name = workdir.resolve().name
    figure.suptitle(name, x=0.012, ha='left', color=plots.GREY, fontsize=11)
    for place, ((title, unit), lines) in enumerate(panels.items(), 1):
      axes = figure.add_subplot(rows, columns, place)
      for line in lines:
        line(axes)
      axes.set_xlim(0, max(last_step * 1.02, 1))
      if title == RATE:
        axes.set_ylim(bottom=0)
      plots.finish(axes, unit, 'step', title, ticks=6)

  size = 5.4 * columns, 3.5 * rows + 0.3
  return plots.save(workdir / 'run', draw, size)


def read_curves(path: pathlib.Path) -> dict[str, Curve]:
  """Reads `metrics.jsonl`: one JSON object a line, each with its `step`.

  A torn last line is ignored. Of several values for a step, as a resumed run
  may write them, the last counts.

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
      # The text after the last newline is a line still being written.
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


def _window(values: Float[np.ndarray, ' P']) -> int:
  """Returns the number of points that are smoothed together, 1 for none."""
  points = len(values)
  return max(3, int(points * SMOOTH_SHARE)) if points > SMOOTH_ABOVE else 1


def smooth(values: Float[np.ndarray, ' P']) -> Float[np.ndarray, ' P']:
  """Returns a centred moving average; gaps (NaN) stay."""
  kernel = np.ones(_window(values))
  finite = np.isfinite(values)
  total = np.convolve(np.where(finite, values, 0.0), kernel, mode='same')
  # At the ends the window holds fewer points.
  count = np.convolve(finite.astype(float), kernel, mode='same')
  return np.where(finite, total / np.maximum(count, 1.0), np.nan)


def run_panels(found: Curves) -> dict[tuple[str, str], list[Line]]:
  """Returns the lines of each panel by its title and unit."""
  panels: dict[tuple[str, str], list[Line]] = {}
  if 'train/loss' in found:
    panels['Loss', 'nats per example'] = _loss(found)
  panels['Accuracy', '%'] = _accuracy(found)
  for metric, title, unit in SPREADS:
    if f'train/{metric}_mean' in found:
      panels[title, unit] = _spread(found, metric)
  for title, unit, scale, words in LINES:
    if f'train/{next(iter(words))}' in found:
      panels[title, unit] = _lines(found, words, scale)
  if 'train/learning_rate' in found:
    # A schedule is exact: nothing to smooth.
    steps, rate = found['train/learning_rate']
    line = functools.partial(plots.line, x=steps, y=rate, marked=False)
    panels[RATE, ''] = [line]
  return {key: lines for key, lines in panels.items() if lines}


def _evaluations(found: Curves, metric: str) -> list[str]:
  """Returns the names `<entry>/<metric>` of all evaluations, sorted."""
  pattern = re.compile(rf'(?!train/).+/{metric}')
  return sorted(filter(pattern.fullmatch, found))


def _line(
  found: Curves,
  name: str,
  label: str,
  number: int,
  scale: float = 1.0,
  style: str = '-',
) -> Line:
  """Returns a metric's line; that of training (number 0) is smoothed."""
  steps, values = found[name][0], scale * found[name][1]
  options: dict[str, Any] = dict(style=style, marked=number > 0)
  if f'{name}_std' in found:
    std = scale * found[f'{name}_std'][1]
    options['band'] = values - std, values + std
  if number == 0 and _window(values) > 1:
    options['raw'], values = values, smooth(values)
  return functools.partial(
    plots.line, x=steps, y=values, number=number, label=label, **options
  )


def _lines(
  found: Curves, words: Mapping[str, str], scale: float = 1.0
) -> list[Line]:
  """Returns a colour for each source, a kind of line for each metric."""
  result = []
  for (metric, word), style in zip(words.items(), '-:', strict=False):
    names = (f'train/{metric}', *_evaluations(found, metric))
    result += [
      _line(
        found, name, f'{name.rpartition("/")[0]}, {word}', number, scale, style
      )
      for number, name in enumerate(names)
      if name in found
    ]
  return result


def _loss(found: Curves) -> list[Line]:
  result = [_line(found, 'train/loss', 'train', 0)]
  loss, entropy = found['train/loss'][1], found.get('train/cross_entropy')
  # They differ by the losses of adaptive mechanisms.
  same = (
    entropy is not None
    and len(entropy[1]) == len(loss)
    and np.allclose(loss, entropy[1], rtol=1e-3, equal_nan=True)
  )
  if entropy is not None and not same:
    label = 'train, cross-entropy'
    result.append(_line(found, 'train/cross_entropy', label, 0, style=':'))
  for number, name in enumerate(_evaluations(found, '(loss|cross_entropy)'), 1):
    entry, _, metric = name.rpartition('/')
    is_part = metric == 'cross_entropy' and not same
    label = f'{entry}, cross-entropy' if is_part else entry
    result.append(_line(found, name, label, number))
  return result


def _accuracy(found: Curves) -> list[Line]:
  names = ['train/accuracy', *_evaluations(found, 'accuracy')]
  shots = [
    (entry, int(metric.removesuffix('shot')), name)
    for name in _evaluations(found, r'\d+shot')
    for entry, metric in [name.rsplit('/', 1)]
  ]
  labels = {name: name.removesuffix('/accuracy') for name in names}
  labels |= {name: f'{entry}, {k}-shot' for entry, k, name in sorted(shots)}
  return [
    _line(found, name, label, number, 100.0)
    for number, (name, label) in enumerate(labels.items())
    if name in found
  ]


def _spread(found: Curves, metric: str) -> list[Line]:
  """Returns the mean over the examples, between smallest and largest."""
  low, high = (found.get(f'train/{metric}_{end}') for end in ('min', 'max'))
  result: list[Line] = []
  if low is not None and high is not None:
    width = _window(low[1])
    least = scipy.ndimage.minimum_filter1d(low[1], width)
    most = scipy.ndimage.maximum_filter1d(high[1], width)
    result.append(
      lambda axes: axes.fill_between(
        low[0], least, most, step='mid', color=plots.COLOURS[0], alpha=0.15,
        linewidth=0, label='train, min to max',
      )
    )  # fmt: skip
  return result + _lines(found, {f'{metric}_mean': 'mean'})
