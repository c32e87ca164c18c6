"""What all pictures share: a style, no display, a PNG and a PDF of each.

Matplotlib is an optional extra, and imported when the first figure is made.
"""

import math
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

# Okabe and Ito's colours, told apart with every kind of colour vision. Train
# comes first; evaluations follow, and differ by their markers as well.
COLOURS = (
  '#0072B2',
  '#D55E00',
  '#009E73',
  '#CC79A7',
  '#E69F00',
  '#56B4E9',
  '#000000',
)
MARKERS = 'osD^vPX'
GREY = '#5A5A5A'

STYLE = {
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
_ADVANCE = 0.602  # width of a monospaced letter over its size


def load_matplotlib() -> tuple[Any, Any]:
  """(matplotlib, a class that makes figures without a display).

  Raises:
    ImportError: naming the extra to install.
  """
  try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError(
      "plots need matplotlib: pip install -e '.[plots]'"
    ) from error

  def make(**arguments):
    # No pyplot: no window, no global state.
    figure = Figure(**arguments)
    FigureCanvasAgg(figure)
    return figure

  return matplotlib, make


def save(
  path: str | os.PathLike[str],
  draw: Callable[[Any], None],
  size: tuple[float, float],
  layout: str | None = 'constrained',
) -> pathlib.Path:
  """Draws a figure and writes it.

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
  matplotlib, figure_class = load_matplotlib()
  with matplotlib.rc_context(STYLE), warnings.catch_warnings():
    # A letter that the font lacks is drawn as a box.
    warnings.filterwarnings('ignore', message='Glyph .* missing from')
    figure = figure_class(figsize=size, layout=layout)
    draw(figure)
    for axes in figure.axes:
      axes.set_axisbelow(True)
    return write(path, figure)


def save_text(
  path: str | os.PathLike[str],
  draw: Callable[[Any], None],
  columns: int,
  lines: float,
  *,
  letter: float,
  line: float,
) -> pathlib.Path:
  """As `save`, of axes in letters of monospaced text and lines from the top.

  Args:
    path: see `save`.
    draw: is called with the axes.
    columns: letters of a line.
    lines: of the figure.
    letter: size of the letters in points.
    line: height of a line in points.
  """

  def draw_axes(figure):
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, columns)
    axes.set_ylim(lines, 0)
    draw(axes)

  size = columns * _ADVANCE * letter / 72, lines * line / 72
  return save(path, draw_axes, size, layout=None)


def write(path: str | os.PathLike[str], figure: Any) -> pathlib.Path:
  """Writes a figure as PNG and PDF; returns the path of the PNG."""
  path = pathlib.Path(path).with_suffix('.png')
  figure.savefig(path, dpi=160)
  # Without a date the same numbers give the same file.
  figure.savefig(path.with_suffix('.pdf'), metadata={'CreationDate': None})
  return path


def look(number: int) -> tuple[str, str]:
  """Colour and marker of a curve; no two of the first 49 have both alike."""
  place = number + number // len(COLOURS)
  return COLOURS[number % len(COLOURS)], MARKERS[place % len(MARKERS)]


def head(axes: Any, title: str) -> None:
  """Title, and below it the legend, where it never covers data."""
  entries = len(axes.get_legend_handles_labels()[0])
  rows = math.ceil(entries / LEGEND_COLUMNS) if entries > 1 else 0
  if rows:
    axes.legend(
      loc='lower left',
      bbox_to_anchor=(0.0, 1.0),
      ncols=min(entries, LEGEND_COLUMNS),
      borderaxespad=0.1,
      borderpad=0.2,
      columnspacing=1.4,
      handlelength=1.6,
    )
  axes.set_title(title, pad=6 + 15 * rows)
