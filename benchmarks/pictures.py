"""Pictures of adaptive computation, each as a PNG and a PDF.

Functions take measured numbers and a path; see `plots.figure` for their errors.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num

from eval_lib import plots
from eval_lib.frontier import pareto
from eval_lib.plots import Line, Panel, Path
from eval_lib.report import Rows

# Rows are averaged over this many groups of equally many rows, by length.
LENGTH_GROUPS = 12
# A difficulty that spans this factor, as entropies do, is logarithmic.
VERY_WIDE = 20
FEW_POINTS = 6
# Brighter is more, also in grey and for every kind of colour vision.
COLOUR_MAP = 'inferno'
DASHED = {'linestyle': '--', 'marker': ''}
# The colour of a model in every picture. Models of one colour are compared with
# the others, not with each other.
MODELS: Mapping[str, int] = {
  'AdaTape': 0, 'EAT': 0, 'ALBERT': 0,
  'dense': 1, 'ViT': 1, 'PlainViT': 1, 'BERT': 1, 'Transformer': 1,
  'student': 2, 'DistilBERT': 2, 'DeiT': 2,
  'UT': 3, 'U2T': 3, 'Universal Transformer': 3,
  'UViT': 4, 'PonderViT': 5, 'A-ViT': 6,
}  # fmt: skip
Columns = Mapping[str, Num[np.ndarray, ' N']]


def model_of(name: str) -> int | None:
  """Returns the value in `MODELS` of the model that a name has, or None."""
  matches = [m for m in MODELS if re.search(rf'(?<![\w-]){m}(?!\w)', name)]
  return MODELS[max(matches, key=len)] if matches else None


def numbers(names: Iterable[str]) -> dict[str, int]:
  """Returns a number for `look` of each name, by `MODELS` if it has one.

  Further forms of a model have its colour and another marker. Names of no model
  get the first numbers that are left.
  """
  result: dict[str, int] = {}
  for name in sorted(dict.fromkeys(names), key=lambda n: model_of(n) is None):
    model, step = model_of(name), len(plots.COLOURS)
    every = itertools.count() if model is None else itertools.count(model, step)
    result[name] = next(n for n in every if n not in result.values())
  return result


def lines(rows: Rows, x: str, y: str, scale: float = 1.0) -> list[Line]:
  """Returns columns of each candidate, y times `scale` with its quartiles."""
  result = []
  for name, number in numbers(row['candidate'] for row in rows).items():
    group = [row for row in rows if row['candidate'] == name]
    low, middle, high = scale * np.array([*_parts([row[y] for row in group])])
    places = np.array([row[x] for row in group])
    result.append(Line(name, places, middle, number, (low, high)))
  return result


def plot_frontier(
  path: Path,
  curves: Mapping[str, Mapping[str, tuple[Any, Any]]],
  cost: str,
  quality: str,
  is_rate: bool = False,
  title: str = 'Frontier',
) -> None:
  """Draws quality against cost; lines join the points of each Pareto set.

  `curves` are (cost, quality), numbers or `Estimate`s, by the name of the model
  and of the point. Of a rate, as images/s, more is less cost.
  """
  lines, numbered = [], numbers(curves)
  for name, points in curves.items():
    parts = map(_parts, zip(*points.values(), strict=True))
    number, ((left, x, right), (low, y, high)) = numbered[name], parts
    best = np.flatnonzero(pareto(-x if is_rate else x, y))
    best = best[np.argsort(x[best], kind='stable')]
    lines.append(Line('', x[best], y[best], number, style={'marker': ''}))
    names = [*points] if len(points) > 1 else ()
    marks = {'linestyle': '', 'markersize': 6}
    band, x_band = (low, high), (left, right)
    lines.append(Line(name, x, y, number, band, x_band, marks, names))
  every = [x for line in lines for x in line.x] or [0.0]
  log = 'x' if max(every) >= plots.WIDE * min(every) > 0 else ''
  # Among few points a small difference must not fill the picture.
  few = sum(map(len, curves.values())) < FEW_POINTS
  panel = Panel(title, quality, cost, lines, log=log)
  panel = panel._replace(y_margin=0.3) if few else panel
  plots.draw_panels(path, [panel], (6.4, 4.0 + 0.15 * len(curves)))


def _parts(values: Sequence[Any]) -> Iterator[Float[np.ndarray, ' P']]:
  """Yields low ends, medians and high ends of numbers or `Estimate`s."""
  for end in ('low', 'median', 'high'):
    yield np.array([getattr(value, end, value) for value in values], float)


def plot_retention(
  path: Path,
  length: Int[np.ndarray, ' N'],
  kept: Int[np.ndarray, 'N P'],
  layers: Sequence[int],
  by_layer: Sequence[Mapping[str, Any]],
) -> None:
  """Draws the share of tokens left, by layer and length (EAT, Figures 2, 5)."""
  names = 'layer', 'scheduled', 'observed', 'p25', 'p75'
  x, *columns = (np.array([row[name] for row in by_layer]) for name in names)
  scheduled, observed, *ends = (100 * column for column in columns)
  first = [
    Line('observed', x, observed, 0, (ends[0], ends[1])),
    Line('scheduled', x, scheduled, 1, style=DASHED),
  ]
  second = [
    grouped(f'after layer {layer}', number, length, 100 * share / length)
    for number, (layer, share) in enumerate(zip(layers, kept.T, strict=True))
  ]
  y_label, limits = 'tokens kept (%)', (0, 101)
  panels = [
    Panel('Tokens kept', y_label, 'layer', first, y_limits=limits, ticks=12),
    Panel('', y_label, 'length (tokens)', second, y_limits=limits),
  ]
  plots.draw_panels(path, panels, (10.0, 3.9), 2)


def grouped(
  label: str, number: int, x: Num[np.ndarray, ' N'], y: Num[np.ndarray, ' N']
) -> Line:
  """Returns medians of y over groups of rows of similar x, and quartiles."""
  shares = np.linspace(0, 1, LENGTH_GROUPS + 1)[1:-1]
  # By x, so that no value is in two groups.
  group = np.digitize(x, np.quantile(x, shares))
  points = [
    (np.median(x[rows]), *np.quantile(y[rows], (0.25, 0.5, 0.75)))
    for rows in (group == number for number in np.unique(group))
  ]
  middle, low, median, high = np.array(points).T
  return Line(label, middle, median, number, (low, high))


def plot_against(path: Path, costs: Columns, hard: Columns, title: str) -> None:
  """Draws each cost of rows against each of their difficulties, `grouped`."""
  columns, panels = len(hard), list[Panel]()
  for row, (name, cost) in enumerate(costs.items()):
    for label, difficulty in hard.items():
      line = grouped('', row, difficulty, cost)
      log = 'x' if 0 < VERY_WIDE * min(line.x) <= max(line.x) else ''
      panels.append(Panel('', name, label, [line], log=log))
      name = ''  # the panels of a row share an axis
  panels[0] = panels[0]._replace(title=title)
  # The panels of a column share one too.
  panels[:-columns] = [p._replace(x_label='') for p in panels[:-columns]]
  size = 0.6 + 3.9 * columns, 0.4 + 2.9 * len(costs)
  plots.draw_panels(path, panels, size, columns, sharex='col', sharey='row')


def plot_iterations(path: Path, curves: Mapping[str, Any], title: str) -> None:
  """Draws curves, by axis and kind of token; NaN is a gap."""
  panels: list[Panel] = []
  for name, kinds in curves.items():
    # One title and legend serve all panels.
    lines = [
      Line('' if panels else kind, np.arange(1, len(y) + 1), y, number)
      for number, (kind, y) in enumerate(kinds.items())
    ]
    panels.append(Panel('' if panels else title, name, '', lines, ticks=9))
  panels[-1] = panels[-1]._replace(x_label='iteration')
  size = 6.4, 1.6 + 2.4 * len(curves)
  plots.draw_panels(path, panels, size, sharex=True)


def plot_bars(path: Path, table: Mapping[str, Any], title: str) -> None:
  """Draws horizontal bars for the rows of a table, a panel for each column.

  An `Estimate` has an error bar; `MODELS` has the colours.
  """
  columns = list(next(iter(table.values()), ()))
  colours = [plots.COLOURS[model_of(name) or 0] for name in table]
  size = 1.6 + 3.2 * len(columns), 1.7 + 0.4 * len(table)
  with plots.figure(path, table, size) as drawn:
    panels = drawn.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, column in zip(panels, columns, strict=True):
      low, middle, high = _parts([row[column] for row in table.values()])
      errors = (middle - low, high - middle) if (high > low).any() else None
      bars = axes.barh(
        [*map(plots.shown, table)], middle, height=0.6, xerr=errors,
        error_kw=dict(ecolor='black', elinewidth=1.2),
        color=colours,
      )  # fmt: skip
      # The number comes after the error bar.
      axes.bar_label(
        bars, fmt='{:.3g}', padding=4, color=plots.GREY, fontsize=9
      )
      ends = min(low.min(), 0), max(high.max(), 1e-9)
      axes.set_xlim(*(1.22 * end for end in ends))
      if '%' in column and ends[1] <= 100:  # its number needs room, no tick
        axes.set_xticks([x for x in axes.get_xticks() if x <= 100])
      axes.set_xlabel(column)
      axes.grid(visible=True, axis='x')
      axes.grid(visible=False, axis='y')
    panels[0].set_ylim(len(table) - 0.5, -0.5)
    drawn.suptitle(title, x=0.012, ha='left', weight='bold', fontsize=12)


def plot_exits(path: Path, shares: Mapping[str, Any], title: str) -> None:
  """Draws shares of rows (%) by rule and by head, a bar for each rule."""
  size = 6.4, 1.9 + 0.3 * len(shares)
  with plots.figure(path, shares, size) as drawn:
    from matplotlib import colormaps

    axes, left = drawn.subplots(), np.zeros(len(shares))
    heads = list(next(iter(shares.values())))
    for head, place in zip(heads, np.linspace(0, 1, len(heads)), strict=True):
      share = np.array([row[head] for row in shares.values()])
      look: Any = dict(height=0.75, color=colormaps['cividis'](place))
      bars = axes.barh([*shares], share, left=left, label=head, **look)
      texts = [f'{x:.0f}' if x >= 7 else '' for x in share]  # where it fits
      ink = 'black' if place > 0.5 else 'white'
      axes.bar_label(bars, texts, label_type='center', color=ink, fontsize=8)
      left += share
    axes.set(xlim=(0, 100), ylim=(len(shares) - 0.5, -0.5), xlabel='rows (%)')
    axes.grid(visible=False)
    axes.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=6)
    axes.set_title(title, pad=8 + 15 * math.ceil(len(heads) / 6))


def plot_heatmap(
  path: Path, values: Float[np.ndarray, 'Y X'], label: str, title: str
) -> None:
  """Draws a value for each cell of a grid; `label` is that of the colours."""
  rows, columns = values.shape
  # Cells are squares, beside a bar of colours of the same height.
  size = 3.9, 1.0 + 2.5 * max(0.4, rows / columns)
  with plots.figure(path, values, size) as drawn:
    axes = drawn.subplots()
    # Cells instead of an image, which viewers of PDF files would blur.
    edges = (np.arange(count + 1) - 0.5 for count in (columns, rows))
    mesh = axes.pcolormesh(
      *edges, values, vmin=0, cmap=COLOUR_MAP, edgecolors='face', linewidth=0.1
    )
    axes.set_aspect('equal' if rows > 1 else 'auto')
    axes.invert_yaxis()
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
      axis.get_major_locator().set_params(integer=True, nbins=6, min_n_ticks=1)
    axes.set(xlabel='column', ylabel='row', title=title)
    if rows == 1:
      axes.set(ylabel='', yticks=[])
    bar = drawn.colorbar(mesh, ax=axes, label=label)
    bar.outline.set_visible(False)


def plot_tapes(path: Path, tapes: Sequence[Any], grid: tuple[int, int]) -> None:
  """Draws (image `[Y, X, E]`, patches `[T, K]`, title) of some tapes.

  Patches, places in the grid of (rows, columns) or -1, have the number of their
  step; the others are pale.
  """
  place: Any = dict(extent=(0, grid[1], grid[0], 0), interpolation='nearest')
  with plots.figure(path, tapes, (4.0 * len(tapes), 4.4)) as drawn:
    panels = drawn.subplots(1, len(tapes), squeeze=False)[0]
    for axes, (image, patches, title) in zip(panels, tapes, strict=True):
      veil = np.ones((*grid, 4)) * (1, 1, 1, 0.8)
      axes.imshow(image, **place)
      for step, patch in np.argwhere(patches >= 0):
        y, x = divmod(patches[step, patch], grid[1])
        veil[y, x, 3] = 0
        look: Any = dict(boxstyle='circle,pad=0.15', color='black', alpha=0.7)
        centred: Any = dict(ha='center', va='center', color='white', fontsize=8)
        axes.text(x + 0.5, y + 0.5, step + 1, bbox=look, **centred)
      axes.imshow(veil, **place)
      axes.set_axis_off()
      axes.set_title(title, fontsize=10, weight='normal')


def plot_examples(path: Path, groups: Mapping[str, Any]) -> None:
  """Draws a line of (image `[Y, X, 3]` or text, title) for each group."""
  columns = max(map(len, groups.values()), default=0)
  size = 1.25 * columns + 0.2, 2.0 * len(groups)  # in inches
  with plots.figure(path, groups, size) as drawn:
    parts = drawn.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for part, (name, examples) in zip(parts, groups.items(), strict=True):
      part.suptitle(name, x=0.02, ha='left', weight='bold', fontsize=11)
      places = part.subplots(1, columns, squeeze=False)[0]
      for place in places:
        place.set_axis_off()
      for place, (shown, title) in zip(places, examples, strict=False):
        place.set_title(title, fontsize=9, weight='normal', loc='center')
        if isinstance(shown, str):
          look: Any = dict(fontsize=7.5, family='monospace')
          place.text(0.5, 0.5, shown, ha='center', va='center', **look)
        else:
          place.imshow(shown, interpolation='nearest')
