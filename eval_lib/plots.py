"""Figures of panels of lines, written as PNG and PDF, and that of a run.

Matplotlib is an optional extra, imported when the first figure is made.
"""

import contextlib
import io
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.ndimage
from jaxtyping import Float

from core import files
from eval_lib import report

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
  'figure.constrained_layout.h_pad': 0.1,
  'figure.constrained_layout.w_pad': 0.14, 'font.size': 10,
  'grid.color': '#E4E4E4', 'legend.borderaxespad': 0.1, 'legend.borderpad': 0.2,
  'legend.columnspacing': 1.4, 'legend.fontsize': 9,
  'legend.frameon': False, 'legend.handlelength': 1.6,
  'pdf.fonttype': 42,  # text stays text
  'text.parse_math': False,  # a $ is part of a name
  'xtick.color': GREY, 'ytick.color': GREY, 'ytick.major.size': 0,
}  # fmt: skip
_LEGEND_COLUMNS, _LEGEND_CHARACTERS = 3, 66  # in a row; a line counts as 6
_LINES, _CHARACTERS = 12, 120  # of a text

# Names of points closer than this, in pixels of the figure, are left out.
NAME_DISTANCE = 34.0
# A longer curve is drawn pale, under its moving average.
SMOOTH_ABOVE, SMOOTH_SHARE = 100, 0.03
# Panels of every run; see `train_lib.task.Task.PANELS`.
_PANELS: tuple[Any, ...] = (
  ('Loss', 'nats per example', 1.0,
   {'loss': '', 'cross_entropy': 'cross-entropy'}),
  ('Accuracy', '%', 100.0, {r'accuracy|\d+shot': ''}),
)  # fmt: skip
_RATE = 'Learning rate', '', 1.0, {'learning_rate': ''}

# Steps `[P]` and values `[P]` of metrics, by name.
Curves = Mapping[str, Sequence[Float[np.ndarray, ' P']]]


class Line(NamedTuple):
  """A line through points `[P]`; NaN is a gap."""

  label: str  # '' for none
  x: Any
  y: Any
  number: int = 0  # of colour and marker, see `look`
  # Lower and upper ends `[P]`; the error bar of a single point.
  band: tuple[Any, Any] | None = None
  style: Mapping[str, Any] = {}  # options of matplotlib
  names: Sequence[str] = ()  # of the points; written where there is room


class Panel(NamedTuple):
  """Lines with their labels and axes."""

  title: str
  y_label: str
  x_label: str
  lines: Sequence[Line]
  x_limits: Any = None
  y_limits: Any = None
  ticks: int = 0  # limits x to as many integers
  doubles: bool = False  # x is 4, 8, 16, ...: equal factors, equal distances
  log: bool = False  # the same for powers of 10


@contextlib.contextmanager
def figure(path: Path, data: Any, size: tuple[float, float]) -> Iterator[Any]:
  """Yields a matplotlib figure to draw data on; writes it as PNG and PDF.

  The suffix of `path` is replaced by .png and .pdf; `size` is in inches. Raises
  ImportError without matplotlib, ValueError without data.
  """
  if not len(data):
    raise ValueError(f'{path}: expected something to draw, got nothing')
  try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.text import Text
  except ImportError as error:
    message = "plots need matplotlib: pip install -e '.[plots]'"
    raise ImportError(message) from error

  class Drawn(Figure):
    def draw(self, renderer: Any) -> None:
      for text in self.findobj(Text):
        text.set_text(shown(text.get_text()))
      super().draw(renderer)

  with matplotlib.rc_context(_STYLE):
    # No pyplot: no window, no global state.
    result = Drawn(figsize=size, layout='constrained')
    yield result
    write(result, pathlib.Path(path))


@contextlib.contextmanager
def if_installed() -> Iterator[None]:
  """Prints the ImportError of pictures that are drawn without matplotlib."""
  try:
    yield
  except ImportError as error:
    print(f'no pictures: {error}', file=sys.stderr)


def shown(name: str) -> str:
  """Returns a name that can be drawn: escaped, each line cut to fit."""
  lines = files.printable(name).split('\n')[:_LINES]
  return '\n'.join(line[:_CHARACTERS] for line in lines)


def write(drawn: Any, path: pathlib.Path) -> None:
  """Writes a figure as PNG and PDF."""
  # Without a date the same numbers give the same file.
  pdf: Any = {'metadata': {'CreationDate': None}}
  for kind, options in (('png', {'dpi': 160}), ('pdf', pdf)):
    file = io.BytesIO()
    drawn.savefig(file, format=kind, **options)
    files.write_bytes(path.with_suffix(f'.{kind}'), file.getvalue())


def look(number: int) -> tuple[str, str]:
  """Returns colour and marker of a curve; the first 49 pairs are distinct."""
  place = number + number // len(COLOURS)
  return COLOURS[number % len(COLOURS)], _MARKERS[place % len(_MARKERS)]


def draw_panels(
  path: Path,
  panels: Sequence[Panel],
  size: tuple[float, float],
  columns: int = 1,
  caption: str = '',
  **grid: Any,
) -> None:
  """Draws panels in a grid; see `figure` and `Figure.subplots`."""
  rows = math.ceil(len(panels) / columns)
  with figure(path, [p for p in panels if p.lines], size) as drawn:
    axes = drawn.subplots(rows, columns, squeeze=False, **grid).ravel()
    for empty in axes[len(panels) :]:
      empty.remove()
    for place, panel in zip(axes, panels, strict=False):
      draw_panel(place, panel)
    if caption:
      drawn.suptitle(caption, x=0.012, ha='left', color=GREY, fontsize=11)
    # The places of names are known once the axes have their limits.
    drawn.draw_without_rendering()
    for place, panel in zip(axes, panels, strict=False):
      _write_names(place, panel.lines)


def draw_panel(axes: Any, panel: Panel) -> None:
  """Draws a panel, without the names of its points; see `figure`."""
  for line in panel.lines:
    _draw_line(axes, line)
  if panel.ticks:
    axes.locator_params(axis='x', nbins=panel.ticks, integer=True)
    axes.xaxis.set_major_formatter('{x:,.0f}')
  if panel.doubles:
    axes.set_xscale('log', base=2)
    axes.xaxis.set_major_formatter('{x:g}')
  if panel.log:
    from matplotlib.ticker import LogFormatter

    axes.set_xscale('log')
    # The default writes mathematics.
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter())
  axes.yaxis.set_major_formatter('{x:g}')
  axes.set_xlim(panel.x_limits)
  axes.set_ylim(panel.y_limits)
  axes.set_xlabel(panel.x_label)
  axes.set_ylabel(panel.y_label)
  # The title, and below it the legend, are above all data.
  labels, rows = axes.get_legend_handles_labels()[1], 0
  if len(labels) > 1:
    for columns in range(min(len(labels), _LEGEND_COLUMNS), 0, -1):
      parts = np.array_split(labels, columns)
      if sum(6 + max(map(len, part)) for part in parts) <= _LEGEND_CHARACTERS:
        break
    rows = math.ceil(len(labels) / columns)
    place = dict(loc='lower left', bbox_to_anchor=(0.0, 1.0))
    # The title leaves it room; a wide one must not narrow the panels.
    axes.legend(**place, ncols=columns).set_in_layout(False)
  axes.set_title(panel.title, pad=6 + 15 * rows)


def _draw_line(axes: Any, line: Line) -> None:
  colour, marker = look(line.number)
  x, y = line.x, line.y
  if line.band is not None and len(x) > 1:
    axes.fill_between(x, *line.band, color=colour, alpha=0.15, linewidth=0)
  elif line.band is not None:
    low, high = line.band
    axes.errorbar(x, y, (y - low, high - y), fmt='none', ecolor=colour)
  is_dense = len(x) > 40
  options = dict(
    color=colour, label=line.label or None, linewidth=1.8, marker=marker,
    markersize=3 if is_dense else 5, markevery=len(x) // 20 if is_dense else 1,
    # The last point is on the edge of the panel.
    clip_on=False,
  )  # fmt: skip
  axes.plot(x, y, **(options | dict(line.style)))


def _write_names(axes: Any, lines: Sequence[Line]) -> None:
  taken: list[Any] = []
  for line in lines:
    for x, y, name in zip(line.x, line.y, line.names, strict=False):
      place = axes.transData.transform((x, y))
      if all(np.hypot(*(place - other)) > NAME_DISTANCE for other in taken):
        taken.append(place)
        axes.annotate(
          name, (x, y), (5, -3), textcoords='offset points', ha='left',
          va='top', color=GREY, fontsize=8,
        )  # fmt: skip


def plot_run(workdir: Path, panels: Sequence[Any] = ()) -> pathlib.Path:
  """Draws the `metrics.jsonl` of a directory; returns the path of `run.png`.

  `panels` are the `Task.PANELS` of the run. Raises ValueError if there is
  nothing to draw, or a damaged line; see also `figure`.
  """
  workdir = pathlib.Path(workdir)
  curves = report.read_curves(workdir / 'metrics.jsonl')
  rows = *_PANELS, *panels, _RATE
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
      if not any(_same(line, other) for other in lines):
        lines += _with_spread(curves, name, scale, line, style)
  last_step = max((steps[-1] for steps, _ in curves.values()), default=0)
  limits = 0, max(last_step * 1.02, 1)
  bottom = (0, None) if title == 'Learning rate' else None
  return Panel(title, unit, 'step', lines, limits, bottom, 6)


def _same(line: Line, other: Line) -> bool:
  is_alike = line.number == other.number and len(line.y) == len(other.y)
  return is_alike and np.allclose(line.y, other.y, rtol=1e-3, equal_nan=True)


def _with_spread(
  found: Curves, name: str, scale: float, line: Line, style: str
) -> Iterator[Line]:
  """Yields a metric with its band, smoothed if it is one of training.

  `x_std` gives a band around `x`, `x_min` and `x_max` around `x_mean`.
  """
  window, values = _window(len(line.y)), line.y
  stem = name.removesuffix('_mean')
  is_training = line.number == 0
  if f'{name}_std' in found:
    std = scale * found[f'{name}_std'][1]
    line = line._replace(band=(values - std, values + std))
  elif is_training and {f'{stem}_min', f'{stem}_max'} <= {*found}:
    least, most = (scale * found[f'{stem}_{end}'][1] for end in ('min', 'max'))
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
  yield line._replace(style={'linestyle': style, **plain})
