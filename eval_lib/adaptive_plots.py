"""Plots of adaptive computation, each as a PNG and a PDF.

Functions take measured numbers and a path; see `plots.figure` for their errors.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from eval_lib import plots
from eval_lib.calibration import Reliability
from eval_lib.frontier import pareto
from eval_lib.plots import COLOURS, GREY, Path

# Labels of points closer than this, in pixels of the figure, are left out.
LABEL_DISTANCE = 34.0
# Rows are averaged over this many groups of lengths with equally many rows.
LENGTH_GROUPS = 12


class Curve(NamedTuple):
  """One model's points, e.g. over thresholds, and a label at each or ()."""

  cost: Float[np.ndarray, ' P']
  quality: Float[np.ndarray, ' P']
  labels: Sequence[str] = ()


def plot_frontier(
  path: Path, curves: Mapping[str, Curve], *, cost: str, quality: str
) -> None:
  """Draws quality against cost; lines join the points of each Pareto set.

  Args:
    curves: points by the name of the model; a single point is a marker.
    cost: label of the axis with its unit, e.g. 'latency (ms)'.
    quality: label of the axis with its unit, e.g. 'accuracy (%)'.
  """
  with plots.figure(path, curves, (6.4, 4.4)) as drawn:
    axes = drawn.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
      colour, marker = plots.look(number)
      best = np.flatnonzero(pareto(curve.cost, curve.quality))
      best = best[np.argsort(curve.cost[best], kind='stable')]
      if len(best) > 1:
        axes.plot(curve.cost[best], curve.quality[best], color=colour)
      axes.plot(
        curve.cost, curve.quality, color=colour, label=name, linestyle='',
        marker=marker, markersize=6,
      )  # fmt: skip
    axes.set_xlabel(cost)
    axes.set_ylabel(quality)
    axes.margins(x=0.08, y=0.1)
    plots.head(axes, 'Frontier')
    # The places of the labels are known once the axes have their limits.
    drawn.draw_without_rendering()
    taken: list[Any] = []
    for curve in curves.values():
      for x, y, label in zip(*curve, strict=False):
        place = axes.transData.transform((x, y))
        if all(np.hypot(*(place - other)) > LABEL_DISTANCE for other in taken):
          taken.append(place)
          axes.annotate(
            label, (x, y), (5, -3), textcoords='offset points',
            ha='left', va='top', color=GREY, fontsize=8,
          )  # fmt: skip


def plot_reliability(
  path: Path, tables: Mapping[str, Reliability], title: str = 'Reliability'
) -> None:
  """Draws accuracy against confidence, above the share of the rows.

  Args:
    tables: by name, e.g. 'layer 4' and 'layer 4, T = 1.8'.
  """
  with plots.figure(path, tables, (5.4, 5.8)) as drawn:
    top, bottom = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot([0, 100], [0, 100], color=GREY, linestyle=':', linewidth=1.2)
    for number, (name, table) in enumerate(tables.items()):
      full = table.count > 0
      x, y = 100 * table.confidence[full], 100 * table.accuracy[full]
      label = f'{name}: ECE {100 * table.error:.1f} %'
      plots.line(top, x, y, number, label)
      shares = 100 * table.count / table.count.sum()
      colour, _ = plots.look(number)
      bottom.stairs(shares, 100 * table.edges, color=colour, linewidth=1.6)
    top.set_ylim(0, 101)
    bottom.set_xlim(0, 101)
    plots.finish(top, 'accuracy (%)', title=title)
    plots.finish(bottom, 'rows (%)', 'confidence max P (%)')


def plot_retention(
  path: Path,
  length: Int[np.ndarray, ' N'],
  kept: Int[np.ndarray, 'N P'],
  layers: Sequence[int],
) -> None:
  """Draws the share of the tokens left after each pruning, by length.

  Lines are medians over groups of rows of similar length, bands the quartiles.

  Args:
    length: tokens of each row.
    kept: of them, those left after each pruning layer.
    layers: the pruning layers, `[P]`.
  """
  with plots.figure(path, length, (6.0, 3.9)) as drawn:
    axes = drawn.add_subplot()
    groups = length_groups(length)
    middle = np.array([np.median(length[rows]) for rows in groups])
    for number, layer in enumerate(layers):
      share = 100 * kept[:, number] / length
      low, median, high = np.array(
        [np.quantile(share[rows], (0.25, 0.5, 0.75)) for rows in groups]
      ).T
      label = f'after layer {layer}'
      plots.line(axes, middle, median, number, label, band=(low, high))
    axes.set_ylim(0, 101)
    plots.finish(axes, 'tokens kept (%)', 'length (tokens)', 'Tokens kept')


def length_groups(length: Int[np.ndarray, ' N']) -> list[Int[np.ndarray, ' M']]:
  """Returns rows by length, in groups of similar size; no length is split."""
  order = np.argsort(length, kind='stable')
  edges = np.linspace(0, len(order), LENGTH_GROUPS + 1)[1:-1].astype(int)
  # A cut moves to where its length begins.
  cuts = np.unique(np.searchsorted(length[order], length[order][edges]))
  return [rows for rows in np.split(order, cuts) if len(rows)]


def plot_iterations(
  path: Path,
  curves: Mapping[str, Mapping[str, Float[np.ndarray, ' N']]],
  title: str,
) -> None:
  """Draws curves over the iterations, in panels one above the other.

  Args:
    curves: by the name of a panel, which labels its axis, and the name of a
      kind of token; the same kinds in each. NaN is a gap.
  """
  size = 6.4, 1.6 + 2.4 * len(curves)
  with plots.figure(
    path, [kinds for kinds in curves.values() if kinds], size
  ) as drawn:
    panels = drawn.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
    for axes, (name, kinds) in zip(panels, curves.items(), strict=True):
      # One title and legend serve all panels.
      is_first = axes is panels[0]
      for number, (kind, values) in enumerate(kinds.items()):
        places = np.arange(1, len(values) + 1)
        plots.line(axes, places, values, number, kind if is_first else '')
      plots.finish(axes, name, title=title if is_first else '', ticks=9)
    panels[-1].set_xlabel('iteration')


def plot_exits(
  path: Path, shares: Mapping[str, Sequence[float]], layers: Sequence[int]
) -> None:
  """Draws a bar for each setting, divided by the layers at which rows exit.

  Args:
    shares: of the rows by head, `[E]` in [0, 1], by setting.
    layers: of the heads, `[E]`.
  """
  with plots.figure(path, shares, (6.4, 1.7 + 0.42 * len(shares))) as drawn:
    axes = drawn.add_subplot()
    widths = 100 * np.array(list(shares.values()), np.float64)
    starts = np.cumsum(widths, axis=1) - widths
    for place, layer in enumerate(layers):
      bars = axes.barh(
        list(shares), widths[:, place], left=starts[:, place], height=0.6,
        color=COLOURS[place % len(COLOURS)], label=f'layer {layer}',
      )  # fmt: skip
      # A number needs room in its part of the bar.
      labels = [f'{w:.0f}' if w >= 6 else '' for w in widths[:, place]]
      axes.bar_label(bars, labels, label_type='center', color='white')
    axes.set_xlim(0, 100)
    _finish_bars(axes, 'rows (%)')
    plots.head(axes, 'Where rows exit')


def plot_ablation(
  path: Path, variants: Mapping[str, Mapping[str, Any]], title: str = 'Ablation'
) -> None:
  """Draws a panel for each measure, a bar for each variant.

  Args:
    variants: by name, the same measures by label with unit, e.g.
      'accuracy (%)' and 'latency (ms)'; numbers, or estimates with `median`,
      `low` and `high`, drawn as error bars.
  """
  measures = list(next(iter(variants.values()), ()))
  size = 1.6 + 3.2 * len(measures), 1.5 + 0.38 * len(variants)
  with plots.figure(path, variants, size) as drawn:
    panels = drawn.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for number, (axes, measure) in enumerate(
      zip(panels, measures, strict=True)
    ):
      values = {name: row[measure] for name, row in variants.items()}
      _draw_bars(axes, values, COLOURS[number % len(COLOURS)])
      _finish_bars(axes, measure, invert=number == 0)
    drawn.suptitle(title, x=0.012, ha='left', weight='bold', fontsize=12)


def _draw_bars(axes: Any, values: Mapping[str, Any], colour: str) -> None:
  """Draws bars from 0, each with its number after it."""
  low, median, high = np.array(
    [
      [getattr(one, end, one) for end in ('low', 'median', 'high')]
      for one in values.values()
    ]
  ).T
  errors = (median - low, high - median) if (high > low).any() else None
  bars = axes.barh(
    list(values), median, height=0.6, color=colour, xerr=errors,
    error_kw=dict(ecolor=GREY, elinewidth=1.2),
  )  # fmt: skip
  # The number comes after the error bar.
  axes.bar_label(bars, fmt='{:.4g}', padding=4, color=GREY, fontsize=9)
  axes.set_xlim(0, 1.22 * max(high.max(), 1e-9))


def _finish_bars(axes: Any, label: str, invert: bool = True) -> None:
  """Orders bars from the top and draws their grid vertically."""
  if invert:
    axes.invert_yaxis()
  axes.grid(visible=True, axis='x')
  axes.grid(visible=False, axis='y')
  axes.set_xlabel(label)
