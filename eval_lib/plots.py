"""Figures of panels of lines, written as PNG and PDF.

Matplotlib is an optional extra, imported when the first figure is made.
"""

import contextlib
import io
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core import files
from core.files import Path

# Okabe and Ito's colours can be told apart with every kind of colour vision.
COLOURS = (
  '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000',
)  # fmt: skip
_MARKERS, _DASHES = 'osD^vPX', ('-', '--', ':', '-.')
GREY = '#5A5A5A'
_STYLE: Any = {
  'axes.axisbelow': True, 'axes.edgecolor': GREY, 'axes.grid': True,
  'axes.grid.axis': 'y', 'axes.labelcolor': GREY, 'axes.labelsize': 10,
  'axes.spines.left': False, 'axes.spines.right': False,
  'axes.spines.top': False, 'axes.titlelocation': 'left', 'axes.titlesize': 12,
  'axes.titleweight': 'bold', 'axes.ymargin': 0.08, 'errorbar.capsize': 2,
  'figure.constrained_layout.h_pad': 0.1,
  'figure.constrained_layout.w_pad': 0.14, 'font.size': 10,
  'grid.color': '#E4E4E4', 'legend.borderaxespad': 0.5, 'legend.borderpad': 0.2,
  'legend.columnspacing': 1.4, 'legend.fontsize': 9,
  'legend.frameon': False, 'legend.handlelength': 1.6,
  'pdf.fonttype': 42,  # text stays text
  'text.parse_math': False,  # a $ is part of a name
  'xtick.color': GREY, 'ytick.color': GREY, 'ytick.major.size': 0,
}  # fmt: skip
_LEGEND_COLUMNS, _LEGEND_CHARACTERS = 3, 66  # in a row; a line counts as 6
_LINES, _CHARACTERS = 12, 120  # of a text
NAME_MARGIN = 4.0  # of names of points, in pixels
# A panel whose x spans this factor is logarithmic, if it may be.
WIDE = 4.0
# Places of a point's name, in points of the page; the first free one is taken.
_PLACES = (5, -3), (5, 3), (-5, 3), (-5, -3)


class Line(NamedTuple):
  """A line through points `[P]`; NaN is a gap."""

  label: str  # '' for none
  x: Any
  y: Any
  number: int = 0  # of colour and marker, see `look`
  # Lower and upper ends `[P]`; the error bars of points without a line.
  band: tuple[Any, Any] | None = None
  x_band: tuple[Any, Any] | None = None  # the same of x, always error bars
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
  log: str = ''  # 'x', 'y' or 'xy': equal factors are equal distances
  at_points: bool = False  # ticks of x are at the points
  y_margin: float = _STYLE['axes.ymargin']  # of the range


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
        text.set_text(shown(text.get_text(), text.get_fontproperties()))
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


def shown(name: str, font: Any = None) -> str:
  """Returns a name that can be drawn: escaped, each line cut to fit.

  Characters without a glyph in `font`, by default that of all texts, become �.
  """
  lines = [
    line if len(line) <= _CHARACTERS else line[: _CHARACTERS - 1] + '…'
    for line in files.printable(name).split('\n')[:_LINES]
  ]
  if (text := '\n'.join(lines)).isascii():
    return text
  from matplotlib.font_manager import FontProperties, findfont, get_font

  wanted, fonts = font or FontProperties(), []
  for family in wanted.get_family():  # matplotlib takes glyphs of all
    (one := wanted.copy()).set_family(family)
    fonts.append(get_font(findfont(one)))
  return ''.join(
    c if c == '\n' or any(f.get_char_index(ord(c)) for f in fonts) else '�'
    for c in text
  )


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
      _thin(place)


def draw_panel(axes: Any, panel: Panel) -> None:
  """Draws a panel, without the names of its points; see `figure`."""
  axes.set_ymargin(panel.y_margin)
  for line in panel.lines:
    _draw_line(axes, line)
  if panel.ticks:
    axes.locator_params(axis='x', nbins=panel.ticks, integer=True)
  for name in panel.log:
    _set_log(axes, name)
  if panel.at_points:
    axes.set_xticks(sorted({x for line in panel.lines for x in line.x}))
  if all(np.asarray(line.x).dtype.kind in 'iuf' for line in panel.lines):
    axes.xaxis.set_major_formatter('{x:,.0f}' if panel.ticks else _tick)
  axes.yaxis.set_major_formatter(_tick)
  _set_limits(axes, panel)
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
  axes.set_title(panel.title, pad=8 + 15 * rows)


def _tick(x: Any, _: Any = None) -> str:
  """Formats a tick; `g` alone would have 0.0001 and 8e-05 on one axis."""
  text = f'{x:g}'
  if 1e-6 <= abs(x) < 1e7:
    text = f'{float(text):,.12f}'.rstrip('0').rstrip('.')
  return text.replace('-', '\N{MINUS SIGN}')


def _set_log(axes: Any, name: str) -> None:
  from matplotlib.ticker import LogLocator, NullLocator

  axes.set(**{f'{name}scale': 'log'})
  axis = getattr(axes, f'{name}axis')
  low, high = axis.get_view_interval()
  few = (1.0,) if high > 1e3 * low else (1.0, 2.0, 5.0)
  steps = few if high > 20 * low else (1.0, 2.0, 3.0, 5.0, 7.0)
  axis.set_major_locator(LogLocator(subs=steps))
  axis.set_minor_locator(NullLocator())


def _set_limits(axes: Any, panel: Panel) -> None:
  """Sets the limits that are given; shares end at 100 %, if all are below."""
  for name, label in (('x', panel.x_label), ('y', panel.y_label)):
    if (limits := getattr(panel, f'{name}_limits')) is not None:
      axes.set(**{f'{name}lim': limits})
    elif '%' in label:
      values = [np.ravel(getattr(line, name)) for line in panel.lines]
      low, high = getattr(axes, f'get_{name}lim')()
      if high > 100 >= np.nanmax(np.concatenate(values), initial=0.0):
        axes.set(**{f'{name}lim': (low, 100)})


def _draw_line(axes: Any, line: Line) -> None:
  colour, marker = look(line.number)
  x, y = line.x, line.y
  dash = _DASHES[line.number // len(COLOURS) % len(_DASHES)]
  is_dense = len(x) > 40
  options = dict(
    color=colour, label=line.label or None, linewidth=1.8, marker=marker,
    linestyle=dash, markersize=3 if is_dense else 5,
    markevery=len(x) // 20 if is_dense else 1,
    # The last point is on the edge of the panel.
    clip_on=False,
  ) | dict(line.style)  # fmt: skip
  is_filled = len(x) > 1 and options['linestyle']
  if line.band is not None and is_filled:
    axes.fill_between(x, *line.band, color=colour, alpha=0.15, linewidth=0)
  bars = {'xerr': (x, line.x_band), 'yerr': (y, not is_filled and line.band)}
  for name, (middle, ends) in bars.items():
    if ends and np.any(ends[1] > ends[0]):
      sizes = {name: (middle - ends[0], ends[1] - middle)}
      axes.errorbar(x, y, **sizes, fmt='none', ecolor=colour)
  axes.plot(x, y, **options)


def _write_names(axes: Any, lines: Sequence[Line]) -> None:
  """Writes names of points where they cover nothing; others are left out."""
  named = [line for line in lines if line.names]
  points = [
    axes.transData.transform(point)
    for line in (lines if named else ())
    for point in zip(line.x, line.y, strict=True)
  ]
  taken: list[Any] = []
  for line in named:
    for x, y, name in zip(line.x, line.y, line.names, strict=True):
      for place in _PLACES:
        text = axes.annotate(
          shown(name), (x, y), place, textcoords='offset points', color=GREY,
          ha='left' if place[0] > 0 else 'right',
          va='bottom' if place[1] > 0 else 'top', fontsize=8,
        )  # fmt: skip
        box = text.get_window_extent().padded(NAME_MARGIN)
        covered = box.count_contains(points) + box.count_overlaps(taken)
        if not covered and axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1:
          taken.append(box)
          break
        text.remove()


def _thin(axes: Any) -> None:
  """Hides labels of x that would touch the one before."""
  end = -math.inf
  for label in axes.get_xticklabels():
    box = label.get_window_extent()
    if box.x0 < end + 3:
      label.set_visible(False)
    elif label.get_visible():
      end = box.x1
