"""Figures from data tables, each written as a PNG and a PDF.

`plot_panels` draws lines with bands; the run's picture and the figures of
adaptive computation are built on it. Matplotlib is an optional extra and is
imported when the first figure is made.
"""

import dataclasses
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

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


@dataclasses.dataclass(frozen=True)
class Series:
  """A line of a panel, with a band or error bars.

  Attributes:
    label: in the legend; '' for none.
    x: `[P]`.
    y: `[P]`, NaN for a gap; None draws the band alone.
    low: lower end of the band, `[P]`.
    high: upper end of the band, `[P]`.
    number: decides the colour and the marker, see `look`; -1 is grey.
    line: '-' or ':'; 'steps' for a histogram whose edges are `x`.
    marked: draws a marker at the points; one point always has its marker.
    raw: `[P]`, drawn pale under the line.
    bars: draws the band as error bars.
  """

  label: str
  x: Float[np.ndarray, ' P']
  y: Float[np.ndarray, ' P'] | None
  low: Float[np.ndarray, ' P'] | None = None
  high: Any = None
  number: int = 0
  line: str = '-'
  marked: bool = True
  raw: Float[np.ndarray, ' P'] | None = None
  bars: bool = False

  def draw(self, axes: Any) -> None:
    """Draws the band, the raw values and the line."""
    colour, marker = look(self.number) if self.number >= 0 else (GREY, '')
    if self.raw is not None:
      axes.plot(self.x, self.raw, color=colour, alpha=0.25, linewidth=0.8)
    if self.y is not None and self.low is not None and self.bars:
      below, above = self.y - self.low, self.high - self.y
      axes.errorbar(
        self.x, self.y, (below, above), fmt='none', ecolor=colour
      )  # fmt: skip
    elif self.low is not None:
      axes.fill_between(
        self.x, self.low, self.high, color=colour, alpha=0.15, linewidth=0,
        label=self.label if self.y is None else None,
      )  # fmt: skip
    if self.y is None:
      return
    few, points = len(self.x) <= 40, len(self.x)
    is_steps = self.line == 'steps'
    axes.plot(
      self.x, self.y, color=colour, label=self.label or None, linewidth=1.8,
      linestyle='' if points < 2 else '-' if is_steps else self.line,
      drawstyle='steps-post' if is_steps else 'default',
      marker=marker if self.marked or points < 2 else '',
      markersize=5 if few else 3, markevery=1 if few else points // 20,
      # The last point is on the edge of the panel.
      clip_on=False,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Panel:
  """One pair of axes of `plot_panels`.

  Attributes:
    series: the lines.
    y_label: with the unit.
    x_label: with the unit; '' for none.
    title: above the legend.
    x_range: limits of the axis; None where matplotlib chooses.
    y_range: as x_range.
    whole: at most this number of ticks at integers; 0 for any ticks.
  """

  series: Sequence[Series]
  y_label: str
  x_label: str = ''
  title: str = ''
  x_range: tuple[Any, Any] = (None, None)
  y_range: tuple[Any, Any] = (None, None)
  whole: int = 0

  def draw(self, axes: Any) -> None:
    """Draws the lines, the axes and the legend."""
    for series in self.series:
      series.draw(axes)
    axes.set_xlim(*self.x_range)
    axes.set_ylim(*self.y_range)
    if self.whole:
      axes.locator_params(axis='x', nbins=self.whole, integer=True)
      axes.xaxis.set_major_formatter('{x:,.0f}')
    axes.yaxis.set_major_formatter('{x:g}')
    axes.set_xlabel(self.x_label)
    axes.set_ylabel(self.y_label)
    head(axes, self.title)


def plot_panels(
  path: str | os.PathLike[str],
  panels: Sequence[Panel],
  size: tuple[float, float],
  *,
  columns: int = 1,
  heights: Sequence[float] | None = None,
  title: str = '',
) -> pathlib.Path:
  """Draws panels row by row; those of a single column share the x axis.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    panels: at least one with a series.
    size: of the figure in inches.
    columns: of panels.
    heights: of the rows, relative to each other.
    title: of the whole figure.

  Returns:
    The path of the PNG.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    ValueError: there is nothing to draw.
  """
  check_data(path, [panel for panel in panels if panel.series])

  def draw(figure):
    rows = math.ceil(len(panels) / columns)
    grid = figure.subplots(
      rows, columns, sharex=columns == 1, squeeze=False, height_ratios=heights
    ).ravel()  # fmt: skip
    for axes, panel in zip(grid, panels, strict=False):
      panel.draw(axes)
    for axes in grid[len(panels) :]:
      axes.remove()
    if title:
      figure.get_layout_engine().set(w_pad=0.14, h_pad=0.1)
      figure.suptitle(title, x=0.012, ha='left', color=GREY, fontsize=11)

  return save(path, draw, size)


def check_data(path: str | os.PathLike[str], data: Any) -> None:
  """Raises ValueError if there is nothing to draw."""
  if not len(data):
    raise ValueError(f'{path}: expected something to draw, got nothing')
