"""A run as one picture: `run.png` and `run.pdf` from `metrics.jsonl`.

Panels appear for what the run has logged: loss, accuracy, tape length (or
ponder steps) and learning rate. Matplotlib is an optional extra.
"""

import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eval_lib import figures
from eval_lib.figures import COLOURS, GREY, MARKERS
from eval_lib.run_metrics import Series, envelope, read_series, smooth


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
  series = read_series(workdir / 'metrics.jsonl')
  panels = [
    (title, draw)
    for title, draw, has_data in PANELS
    if any(has_data(name) for name in series)
  ]
  if not panels:
    raise ValueError(
      f'{workdir / "metrics.jsonl"}: expected train/loss or another metric '
      f'that is drawn, got {sorted(series)}'
    )
  matplotlib, figure_class = figures.load_matplotlib()
  with matplotlib.rc_context(figures.STYLE):
    figure = _figure(figure_class, panels, series, workdir.resolve().name)
    return figures.write(workdir / 'run.png', figure)


def _figure(
  figure_class: Callable[..., Any],
  panels: Sequence[tuple[str, Callable[..., None]]],
  series: Mapping[str, Series],
  title: str,
) -> Any:
  columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
  rows = math.ceil(len(panels) / columns)
  figure = figure_class(
    figsize=(5.4 * columns, 3.5 * rows + 0.3), layout='constrained'
  )
  figure.get_layout_engine().set(w_pad=0.14, h_pad=0.1)
  figure.suptitle(title, x=0.012, ha='left', color=GREY, fontsize=11)
  last_step = max(steps[-1] for steps, _ in series.values())
  for place, (panel_title, draw) in enumerate(panels, 1):
    axes = figure.add_subplot(rows, columns, place)
    draw(axes, series)
    axes.set_xlim(0, max(last_step * 1.02, 1))
    axes.set_axisbelow(True)
    axes.locator_params(axis='x', nbins=6, integer=True)
    axes.xaxis.set_major_formatter(_thousands)
    axes.set_xlabel('step')
    figures.head(axes, panel_title)
  return figure


def _thousands(value: float, position: int | None = None) -> str:
  return f'{value:,.0f}'


def _draw_curve(
  axes: Any, series: Series, label: str, number: int, line: str = '-'
) -> None:
  """Train (number 0) is a line; evaluations are lines with markers."""
  steps, values = series
  colour = COLOURS[number % len(COLOURS)]
  smoothed = smooth(values)
  if number == 0 and smoothed is not None:
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    values = smoothed
  few = len(steps) <= 40
  marker = MARKERS[number % len(MARKERS)] if number or len(steps) < 2 else ''
  axes.plot(
    steps,
    values,
    color=colour,
    label=label,
    linestyle=line if len(steps) > 1 else '',
    linewidth=1.8,
    marker=marker,
    markersize=5 if few else 3,
    markevery=1 if few else max(1, len(steps) // 20),
    # The last point lies on the edge of the panel.
    clip_on=False,
  )


def _evaluations(series: Mapping[str, Series], metric: str) -> list[str]:
  """Names `<entry>/<metric>` of all evaluations, sorted."""
  pattern = re.compile(rf'(?!train/).+/{metric}')
  return sorted(filter(pattern.fullmatch, series))


def _draw_loss(axes: Any, series: Mapping[str, Series]) -> None:
  loss, entropy = (series.get(f'train/{n}') for n in ('loss', 'cross_entropy'))
  if loss is not None:
    _draw_curve(axes, loss, 'train', 0)
  # They differ by the losses of adaptive mechanisms.
  same = (
    loss is not None
    and entropy is not None
    and len(loss[1]) == len(entropy[1])
    and np.allclose(loss[1], entropy[1], rtol=1e-3, equal_nan=True)
  )
  if entropy is not None and not same:
    _draw_curve(axes, entropy, 'train, cross-entropy', 0, ':')
  evaluations = _evaluations(series, '(loss|cross_entropy)')
  for number, name in enumerate(evaluations, 1):
    label = name.replace('/loss', '').replace('/cross_entropy', '')
    if not same and name.endswith('/cross_entropy'):
      label += ', cross-entropy'
    _draw_curve(axes, series[name], label, number)
  axes.set_ylabel('nats per example')


def _draw_accuracy(axes: Any, series: Mapping[str, Series]) -> None:
  if 'train/accuracy' in series:
    _draw_curve(axes, _percent(series['train/accuracy']), 'train', 0)
  names = _evaluations(series, 'accuracy') + sorted(
    _evaluations(series, r'\d+shot'), key=_shots
  )
  for number, name in enumerate(names, 1):
    label = re.sub(r'/(\d+)shot$', r', \1-shot', name)
    label = label.removesuffix('/accuracy')
    _draw_curve(axes, _percent(series[name]), label, number)
    if f'{name}_std' in series:
      steps, values = _percent(series[name])
      deviations = _percent(series[f'{name}_std'])[1]
      colour = COLOURS[number % len(COLOURS)]
      axes.errorbar(steps, values, deviations, fmt='none', ecolor=colour)
  axes.set_ylabel('%')


def _shots(name: str) -> tuple[str, int]:
  entry, _, shots = name.rpartition('/')
  return entry, int(shots.removesuffix('shot'))


def _percent(series: Series) -> Series:
  return series[0], 100 * series[1]


def _draw_spread(axes: Any, series: Mapping[str, Series], name: str) -> None:
  """Mean of a length over the examples, between smallest and largest."""
  low, high = (series.get(f'train/{name}_{end}') for end in ('min', 'max'))
  mean = series[f'train/{name}_mean']
  if low is not None and high is not None:
    axes.fill_between(
      low[0],
      envelope(low[1], np.min),
      envelope(high[1], np.max),
      step='mid',
      color=COLOURS[0],
      alpha=0.15,
      linewidth=0,
      label='train, min to max',
    )
  _draw_curve(axes, mean, 'train, mean', 0)
  for number, other in enumerate(_evaluations(series, f'{name}_mean'), 1):
    label = other.removesuffix(f'/{name}_mean') + ', mean'
    _draw_curve(axes, series[other], label, number)


def _draw_tape(axes: Any, series: Mapping[str, Series]) -> None:
  _draw_spread(axes, series, 'tape_length')
  axes.set_ylabel('tape tokens')


def _draw_ponder(axes: Any, series: Mapping[str, Series]) -> None:
  _draw_spread(axes, series, 'ponder_steps')
  axes.set_ylabel('steps')


def _draw_metrics(
  axes: Any,
  series: Mapping[str, Series],
  words: Mapping[str, str],
  unit: str,
  scale: float = 1.0,
) -> None:
  """Metrics of one unit: a colour for each source, a line for each metric."""
  for (metric, word), line in zip(words.items(), ('-', ':'), strict=False):
    sources = {f'train/{metric}': 0} | {
      name: number
      for number, name in enumerate(_evaluations(series, metric), 1)
    }
    for name, number in sources.items():
      if name in series:
        steps, values = series[name]
        label = f'{name.rpartition("/")[0]}, {word}'
        _draw_curve(axes, (steps, scale * values), label, number, line)
  axes.set_ylabel(unit)


_draw_pretraining = functools.partial(
  _draw_metrics,
  words={'mlm_accuracy': 'masked words', 'sop_accuracy': 'sentence order'},
  unit='%',
  scale=100.0,
)
# The depth stands beside the mean: who waits for the last token saves nothing.
_draw_iterations = functools.partial(
  _draw_metrics,
  words={'iterations': 'mean of the tokens', 'depth': 'depth of the rows'},
  unit='iterations',
)
_draw_repetitions = functools.partial(
  _draw_metrics, words={'steps': 'mean'}, unit='repetitions of the cell'
)


def _draw_learning_rate(axes: Any, series: Mapping[str, Series]) -> None:
  # A schedule is exact: nothing to smooth.
  steps, values = series['train/learning_rate']
  marker = MARKERS[0] if len(steps) < 2 else ''
  axes.plot(steps, values, color=COLOURS[0], linewidth=1.8, marker=marker)
  axes.yaxis.set_major_formatter('{x:g}')
  axes.set_ylim(bottom=0)


# Title, how to draw it, and which metric calls for it.
PANELS: tuple[tuple[str, Callable[..., None], Callable[[str], bool]], ...] = (
  ('Loss', _draw_loss, lambda name: name == 'train/loss'),
  (
    'Accuracy',
    _draw_accuracy,
    lambda name: bool(re.search(r'/(accuracy|\d+shot)$', name)),
  ),
  ('Tape length', _draw_tape, lambda name: name == 'train/tape_length_mean'),
  (
    'Ponder steps',
    _draw_ponder,
    lambda name: name == 'train/ponder_steps_mean',
  ),
  (
    'Masked words, sentence order',
    _draw_pretraining,
    lambda name: name == 'train/mlm_accuracy',
  ),
  ('Iterations', _draw_iterations, lambda name: name == 'train/iterations'),
  ('Repetitions', _draw_repetitions, lambda name: name == 'train/steps'),
  (
    'Learning rate',
    _draw_learning_rate,
    lambda name: name == 'train/learning_rate',
  ),
)
