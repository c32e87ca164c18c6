"""Figures from data tables, each written as a PNG and a PDF.

The style, and the functions that the run's picture and the figures of adaptive
computation share. Matplotlib is an optional extra and is imported when the
first figure is made.
"""

import math
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

# Okabe and Ito's colours can be told apart with every kind of colour vision.
COLOURS = (
  '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000',
)  # fmt: skip
MARKERS = 'osD^vPX'
GREY = '#5A5A5A'
STYLE: Any = {
  'axes.edgecolor': GREY,
  'axes.grid': True,
  'axes.grid.axis': 'y',
  'axes.labelcolor': GREY,
  'axes.labelsize': 10,
  'axes.spines.left': False,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'axes.titlelocation': 'left',
  'axes.titlesize': 12,
  'axes.titleweight': 'bold',
  'font.size': 10,
  'grid.color': '#E4E4E4',
  'axes.ymargin': 0.08,
  'legend.fontsize': 9,
  'legend.frameon': False,
  'pdf.fonttype': 42,  # text stays text
  'xtick.color': GREY,
  'ytick.color': GREY,
  'ytick.major.size': 0,
}
LEGEND_COLUMNS = 3


def save(
  path: str | os.PathLike[str],
  draw: Callable[[Any], None],
  size: tuple[float, float],
  layout: Any = 'constrained',
) -> pathlib.Path:
  """Draws a figure and writes it as PNG and PDF.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    draw: is called with the figure.
    size: in inches.
    layout: of the figure, as matplotlib names them.

  Returns:
    The path of the PNG.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
  """
  try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError(
      "plots need matplotlib: pip install -e '.[plots]'"
    ) from error
  path = pathlib.Path(path).with_suffix('.png')
  with matplotlib.rc_context(STYLE), warnings.catch_warnings():
    # A letter that the font lacks is drawn as a box.
    warnings.filterwarnings('ignore', message='Glyph .* missing from')
    # No pyplot: no window, no global state.
    figure = Figure(figsize=size, layout=layout)
    FigureCanvasAgg(figure)
    draw(figure)
    for axes in figure.axes:
      axes.set_axisbelow(True)
    figure.savefig(path, dpi=160)
    # Without a date the same numbers give the same file.
    figure.savefig(path.with_suffix('.pdf'), metadata={'CreationDate': None})
  return path


def look(number: int) -> tuple[str, str]:
  """Returns colour and marker of a curve; the first 49 pairs are distinct."""
  place = number + number // len(COLOURS)
  return COLOURS[number % len(COLOURS)], MARKERS[place % len(MARKERS)]


def head(axes: Any, title: str) -> None:
  """Writes the title, and below it the legend, above all data."""
  entries = len(axes.get_legend_handles_labels()[0])
  rows = math.ceil(entries / LEGEND_COLUMNS) if entries > 1 else 0
  if rows:
    axes.legend(
      loc='lower left', bbox_to_anchor=(0.0, 1.0), borderaxespad=0.1,
      ncols=min(entries, LEGEND_COLUMNS), borderpad=0.2, columnspacing=1.4,
      handlelength=1.6,
    )  # fmt: skip
  axes.set_title(title, pad=6 + 15 * rows)


def line(
  axes: Any,
  x: Any,
  y: Any,
  number: int = 0,
  label: str = '',
  *,
  style: str = '-',
  marked: bool = True,
  raw: Any = None,
  band: tuple[Any, Any] | None = None,
) -> None:
  """Draws a line through points `[P]`; NaN is a gap.

  Args:
    axes: of matplotlib.
    x: `[P]`.
    y: `[P]`.
    number: selects colour and marker, see `look`.
    label: in the legend; '' for none.
    style: of the line, '-' or ':'.
    marked: draws the marker of each point; a single point always has one.
    raw: `[P]`, drawn pale under the line.
    band: lower and upper ends `[P]` of a filled band; error bars where the
      points are few and single.
  """
  colour, marker = look(number)
  points = len(x)
  if raw is not None:
    axes.plot(x, raw, color=colour, alpha=0.25, linewidth=0.8)
  if band is not None and points > 1:
    axes.fill_between(x, *band, color=colour, alpha=0.15, linewidth=0)
  elif band is not None:
    axes.errorbar(x, y, (y - band[0], band[1] - y), fmt='none', ecolor=colour)
  axes.plot(
    x, y, color=colour, label=label or None, linewidth=1.8,
    linestyle=style if points > 1 else '',
    marker=marker if marked or points < 2 else '',
    markersize=5 if points <= 40 else 3,
    markevery=1 if points <= 40 else points // 20,
    # The last point is on the edge of the panel.
    clip_on=False,
  )  # fmt: skip


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


def check_data(path: str | os.PathLike[str], data: Any) -> None:
  """Raises ValueError if there is nothing to draw."""
  if not len(data):
    raise ValueError(f'{path}: expected something to draw, got nothing')
