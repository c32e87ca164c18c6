"""Figures, each written as PNG and PDF, and the figure of a run's metrics.

Matplotlib is an optional extra and is imported when the first figure is made.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.ndimage
from jaxtyping import Float

Path = str | os.PathLike[str]

# Okabe and Ito's colours can be told apart with every kind of colour vision.
COLOURS = (
  '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000',
)  # fmt: skip
_MARKERS = 'osD^vPX'
GREY = '#5A5A5A'
_STYLE: Any = {
  'axes.axisbelow': True, 'axes.edgecolor': GREY, 'axes.grid': True,
  'axes.grid.axis': 'y', 'axes.labelcolor': GREY, 'axes.labelsize': 10,
  'axes.spines.left': False, 'axes.spines.right': False,
  'axes.spines.top': False, 'axes.titlelocation': 'left', 'axes.titlesize': 12,
  'axes.titleweight': 'bold', 'axes.ymargin': 0.08, 'errorbar.capsize': 2,
  'font.size': 10, 'grid.color': '#E4E4E4', 'legend.borderaxespad': 0.1,
  'legend.borderpad': 0.2, 'legend.columnspacing': 1.4, 'legend.fontsize': 9,
  'legend.frameon': False, 'legend.handlelength': 1.6,
  'pdf.fonttype': 42,  # text stays text
  'xtick.color': GREY, 'ytick.color': GREY, 'ytick.major.size': 0,
}  # fmt: skip
_LEGEND_COLUMNS = 3

# A longer curve is drawn pale, under its moving average.
SMOOTH_ABOVE = 100
SMOOTH_SHARE = 0.03
# Panels of a run: title, unit, scale, and the metrics with their labels.
_PANELS = (
  ('Tape length', 'tape tokens', 1.0, {'tape_length_mean': 'mean'}),
  ('Ponder steps', 'steps', 1.0, {'ponder_steps_mean': 'mean'}),
  ('Masked words, sentence order', '%', 100.0,
   {'mlm_accuracy': 'masked words', 'sop_accuracy': 'sentence order'}),
  # The depth is drawn too: the last token of a row determines its time.
  ('Iterations', 'iterations', 1.0,
   {'iterations': 'mean of the tokens', 'depth': 'depth of the rows'}),
  ('Repetitions', 'repetitions of the cell', 1.0, {'steps': 'mean'}),
)  # fmt: skip
_RATE = 'train/learning_rate'

# Steps `[P]` and values `[P]` of metrics, by name.
Curves = Mapping[str, Sequence[Float[np.ndarray, ' P']]]
# Name of a metric, its label, the number of its colour, and its line style.
_Line = tuple[str, str, int, str]


@contextlib.contextmanager
def figure(
  path: Path, data: Any, size: tuple[float, float], layout: Any = 'constrained'
) -> Iterator[Any]:
  """Yields a matplotlib figure to draw data on; writes it as PNG and PDF.

  The suffix of `path` is replaced by .png and .pdf; `size` is in inches.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    ValueError: the data are empty.
  """
  check_data(path, data)
  try:
    import matplotlib
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError(
      "plots need matplotlib: pip install -e '.[plots]'"
    ) from error
  with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
    # A letter that the font lacks is drawn as a box.
    warnings.filterwarnings('ignore', message='Glyph .* missing from')
    # No pyplot: no window, no global state.
    result = Figure(figsize=size, layout=layout)
    yield result
    path = pathlib.Path(path)
    result.savefig(path.with_suffix('.png'), dpi=160)
    # Without a date the same numbers give the same file.
    result.savefig(path.with_suffix('.pdf'), metadata={'CreationDate': None})


def check_data(path: Path, data: Any) -> None:
  """Raises ValueError if there is nothing to draw."""
  if not len(data):
    raise ValueError(f'{path}: expected something to draw, got nothing')


def look(number: int) -> tuple[str, str]:
  """Returns colour and marker of a curve; the first 49 pairs are distinct."""
  place = number + number // len(COLOURS)
  return COLOURS[number % len(COLOURS)], _MARKERS[place % len(_MARKERS)]


def line(
  axes: Any,
  x: Any,
  y: Any,
  number: int = 0,
  label: str = '',
  *,
  band: tuple[Any, Any] | None = None,
  **style: Any,
) -> None:
  """Draws a line through points `[P]`; NaN is a gap.

  `number` is that of `look`, `band` lower and upper ends `[P]`, an error bar of
  a single point, and `style` replaces options of matplotlib.
  """
  colour, marker = look(number)
  if band is not None and len(x) > 1:
    axes.fill_between(x, *band, color=colour, alpha=0.15, linewidth=0)
  elif band is not None:
    axes.errorbar(x, y, (y - band[0], band[1] - y), fmt='none', ecolor=colour)
  is_dense = len(x) > 40
  options = dict(
    color=colour, label=label or None, linewidth=1.8, marker=marker,
    markersize=3 if is_dense else 5, markevery=len(x) // 20 if is_dense else 1,
    # The last point is on the edge of the panel.
    clip_on=False,
  )  # fmt: skip
  axes.plot(x, y, **(options | style))


def finish(
  axes: Any, y_label: str, x_label: str = '', title: str = '', ticks: int = 0
) -> None:
  """Writes labels, title and legend; `ticks` limits x to as many integers."""
  if ticks:
    axes.locator_params(axis='x', nbins=ticks, integer=True)
    axes.xaxis.set_major_formatter('{x:,.0f}')
  axes.yaxis.set_major_formatter('{x:g}')
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  head(axes, title)


def head(axes: Any, title: str) -> None:
  """Writes the title, and below it the legend, above all data."""
  entries = len(axes.get_legend_handles_labels()[0])
  rows = math.ceil(entries / _LEGEND_COLUMNS) if entries > 1 else 0
  if rows:
    columns = min(entries, _LEGEND_COLUMNS)
    axes.legend(loc='lower left', bbox_to_anchor=(0.0, 1.0), ncols=columns)
  axes.set_title(title, pad=6 + 15 * rows)


def plot_run(workdir: Path) -> pathlib.Path:
  """Draws the `metrics.jsonl` of a directory; returns the path of `run.png`.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    FileNotFoundError: there is no `metrics.jsonl`.
    ValueError: it holds nothing that can be drawn, or is damaged.
  """
  workdir = pathlib.Path(workdir)
  found = read_curves(workdir / 'metrics.jsonl')
  panels = [panel for panel in _run_panels(found) if panel[-1]]
  if not panels:
    raise ValueError(
      f'{workdir / "metrics.jsonl"}: expected train/loss or another metric '
      f'that is drawn, got {sorted(found)}'
    )
  columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
  rows = math.ceil(len(panels) / columns)
  last_step = max(steps[-1] for steps, _ in found.values())
  path = workdir / 'run.png'
  with figure(path, panels, (5.4 * columns, 3.5 * rows + 0.3)) as drawn:
    drawn.get_layout_engine().set(w_pad=0.14, h_pad=0.1)
    name = workdir.resolve().name
    drawn.suptitle(name, x=0.012, ha='left', color=GREY, fontsize=11)
    for place, (title, unit, scale, lines) in enumerate(panels, 1):
      axes = drawn.add_subplot(rows, columns, place)
      for one in lines:
        _draw(axes, found, scale, *one)
      axes.set_xlim(0, max(last_step * 1.02, 1))
      if title == 'Learning rate':
        axes.set_ylim(bottom=0)
      finish(axes, unit, 'step', title, ticks=6)
  return path


def read_curves(path: pathlib.Path) -> dict[str, Sequence[np.ndarray]]:
  """Reads `metrics.jsonl`: one JSON object a line, each with its `step`.

  A torn last line is ignored. Of several values for a step, as a resumed run
  may write them, the last counts.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: another line is damaged; names file and line.
  """
  values: dict[str, dict[int, float]] = {}
  lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
  for number, text in enumerate(lines, 1):
    try:
      row = json.loads(text.strip() or '{"step": 0}')
      step = row.pop('step')
    except (ValueError, AttributeError, KeyError, TypeError):
      # The text after the last newline is a line still being written.
      if number == len(lines):
        break
      raise ValueError(
        f'{path}:{number}: expected a JSON object with a step, got '
        f'{text[:60]!r}; delete the line to draw the rest'
      ) from None
    for name, value in row.items():
      values.setdefault(name, {})[step] = float(value)
  return {
    name: tuple(np.array(sorted(points.items()), float).T)
    for name, points in values.items()
  }


def _window(points: int) -> int:
  """Returns the number of points that are smoothed together, 1 for none."""
  return max(3, int(points * SMOOTH_SHARE)) if points > SMOOTH_ABOVE else 1


def smooth(values: Float[np.ndarray, ' P']) -> Float[np.ndarray, ' P']:
  """Returns a centred moving average; gaps (NaN) stay."""
  kernel = np.ones(_window(len(values)))
  finite = np.isfinite(values)
  total = np.convolve(np.where(finite, values, 0.0), kernel, mode='same')
  # At the ends the window holds fewer points.
  count = np.convolve(finite.astype(float), kernel, mode='same')
  return np.where(finite, total / np.maximum(count, 1.0), np.nan)


def _draw(
  axes: Any,
  found: Curves,
  scale: float,
  name: str,
  label: str,
  number: int,
  style: str,
) -> None:
  """Draws a metric, smoothed if it is one of training (number 0).

  `x_std` gives a band around `x`, `x_min` and `x_max` around `x_mean`.
  """
  steps, values = found[name][0], scale * found[name][1]
  band, window = None, _window(len(values))
  if f'{name}_std' in found:
    std = scale * found[f'{name}_std'][1]
    band = values - std, values + std
  stem = name.removesuffix('_mean')
  if number == 0 and {f'{stem}_min', f'{stem}_max'} <= {*found}:
    least, most = found[f'{stem}_min'], found[f'{stem}_max']
    axes.fill_between(
      least[0], scipy.ndimage.minimum_filter1d(least[1], window),
      scipy.ndimage.maximum_filter1d(most[1], window), step='mid',
      color=COLOURS[0], alpha=0.15, linewidth=0, label='train, min to max',
    )  # fmt: skip
  # A schedule is exact: nothing to smooth.
  if number == 0 and window > 1 and name != _RATE:
    axes.plot(steps, values, color=COLOURS[0], alpha=0.25, linewidth=0.8)
    values = smooth(values)
  # A line through a single point is drawn by its marker.
  plain = {'marker': ''} if number == 0 and len(values) > 1 else {}
  line(axes, steps, values, number, label, band=band, linestyle=style, **plain)


def _run_panels(found: Curves) -> Iterator[tuple[str, str, float, list[_Line]]]:
  """Yields title, unit, scale and lines of each panel."""
  if 'train/loss' in found:
    yield 'Loss', 'nats per example', 1.0, _loss(found)
  yield 'Accuracy', '%', 100.0, _accuracy(found)
  for title, unit, scale, words in _PANELS:
    if f'train/{next(iter(words))}' in found:
      lines = [
        (name, f'{name.rpartition("/")[0]}, {word}', number, style)
        for (metric, word), style in zip(words.items(), '-:', strict=False)
        for number, name in enumerate(_sources(found, metric))
      ]
      yield title, unit, scale, [one for one in lines if one[0] in found]
  if _RATE in found:
    yield 'Learning rate', '', 1.0, [(_RATE, '', 0, '-')]


def _sources(found: Curves, metric: str) -> list[str]:
  """Returns `train/<metric>` and the `<entry>/<metric>` of all evaluations."""
  pattern = re.compile(rf'(?!train/).+/{metric}')
  return [f'train/{metric}', *sorted(filter(pattern.fullmatch, found))]


def _loss(found: Curves) -> list[_Line]:
  lines = [('train/loss', 'train', 0, '-')]
  loss, entropy = found['train/loss'][1], found.get('train/cross_entropy')
  # They differ by the losses of adaptive mechanisms.
  same = (
    entropy is not None
    and len(entropy[1]) == len(loss)
    and np.allclose(loss, entropy[1], rtol=1e-3, equal_nan=True)
  )
  if entropy is not None and not same:
    lines.append(('train/cross_entropy', 'train, cross-entropy', 0, ':'))
  evaluations = _sources(found, '(loss|cross_entropy)')[1:]
  for number, name in enumerate(evaluations, 1):
    entry, _, metric = name.rpartition('/')
    is_part = metric == 'cross_entropy' and not same
    label = f'{entry}, cross-entropy' if is_part else entry
    lines.append((name, label, number, '-'))
  return lines


def _accuracy(found: Curves) -> list[_Line]:
  names = _sources(found, 'accuracy')
  labels = {name: name.removesuffix('/accuracy') for name in names}
  shots = [name.rsplit('/', 1) for name in _sources(found, r'\d+shot')[1:]]
  for entry, shot in sorted(shots, key=lambda x: (x[0], int(x[1][:-4]))):
    labels[f'{entry}/{shot}'] = f'{entry}, {shot[:-4]}-shot'
  return [
    (name, label, number, '-')
    for number, (name, label) in enumerate(labels.items())
    if name in found
  ]
