"""Plots of adaptive computation, each as a PNG and a PDF.

The frontier of quality against cost, the reliability diagram, where rows exit,
how many tokens are kept at which length, and the ablation. All take measured
numbers; none is computed here. Matplotlib is an optional extra.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from eval_lib import figures
from eval_lib.calibration import Reliability
from eval_lib.figures import COLOURS, GREY
from eval_lib.frontier import pareto
from eval_lib.timing import Estimate

# Labels of points closer than this, in pixels of the figure, are left out.
LABEL_DISTANCE = 34.0
# Rows are averaged over so many groups of lengths with equally many rows.
LENGTH_GROUPS = 12


@dataclasses.dataclass(frozen=True)
class Curve:
  """One model's points, e.g. over thresholds.

  Attributes:
    cost: `[P]`, less is better.
    quality: `[P]`, more is better.
    labels: what to write at each point, or ().
  """

  cost: Float[np.ndarray, ' P']
  quality: Float[np.ndarray, ' P']
  labels: Sequence[str] = ()


def plot_frontier(
  path: str | os.PathLike[str],
  curves: Mapping[str, Curve],
  *,
  cost: str,
  quality: str,
  title: str = 'Frontier',
) -> pathlib.Path:
  """Quality against cost: points that nothing dominates are joined.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    curves: points by the name of the model; a single point is a marker.
    cost: label of the axis with its unit, e.g. 'latency (ms)'.
    quality: label of the axis with its unit, e.g. 'accuracy (%)'.
    title: of the picture.

  Returns:
    The path of the PNG.

  Raises:
    ImportError: matplotlib is absent; names the command that installs it.
    ValueError: there is nothing to draw.
  """
  _check(path, curves)

  def draw(figure):
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
      _draw_curve(axes, name, curve, number)
    axes.set_xlabel(cost)
    axes.set_ylabel(quality)
    axes.margins(x=0.08, y=0.1)
    figures.head(axes, title)
    # Where the labels lie is known once the axes have their limits.
    figure.draw_without_rendering()
    taken: list[Any] = []
    for curve in curves.values():
      _label_points(axes, curve, taken)

  return figures.save(path, draw, (6.4, 4.4))


def _draw_curve(axes: Any, name: str, curve: Curve, number: int) -> None:
  colour, marker = figures.look(number)
  best = np.flatnonzero(pareto(curve.cost, curve.quality))
  best = best[np.argsort(curve.cost[best], kind='stable')]
  if len(best) > 1:
    axes.plot(
      curve.cost[best], curve.quality[best], color=colour, linewidth=1.6
    )
  axes.plot(
    curve.cost,
    curve.quality,
    color=colour,
    label=name,
    linestyle='',
    marker=marker,
    markersize=6,
  )


def _label_points(axes: Any, curve: Curve, taken: list[Any]) -> None:
  """Writes labels where a rising curve leaves room, unless they collide."""
  points = zip(curve.cost, curve.quality, curve.labels, strict=False)
  for cost, quality, label in points:
    place = axes.transData.transform((cost, quality))
    if all(np.hypot(*(place - other)) > LABEL_DISTANCE for other in taken):
      taken.append(place)
      axes.annotate(
        label, (cost, quality), (5, -3), textcoords='offset points',
        ha='left', va='top', color=GREY, fontsize=8,
      )  # fmt: skip


def plot_reliability(
  path: str | os.PathLike[str],
  tables: Mapping[str, Reliability],
  *,
  title: str = 'Reliability',
) -> pathlib.Path:
  """Accuracy against confidence, above the share of the rows by confidence.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    tables: by name, e.g. 'layer 4' and 'layer 4, T = 1.8'.
    title: of the picture.

  Returns:
    The path of the PNG; errors as in `plot_frontier`.
  """
  _check(path, tables)

  def draw(figure):
    top, bottom = figure.subplots(
      2, 1, sharex=True, gridspec_kw={'height_ratios': (3, 1)}
    )
    top.plot([0, 100], [0, 100], color=GREY, linestyle=':', linewidth=1.2)
    for number, (name, table) in enumerate(tables.items()):
      full = table.count > 0
      colour, marker = figures.look(number)
      top.plot(
        100 * table.confidence[full],
        100 * table.accuracy[full],
        color=colour,
        label=f'{name}: ECE {100 * table.error:.1f} %',
        linewidth=1.6,
        marker=marker,
        markersize=5,
      )
      shares = 100 * table.count / table.count.sum()
      bottom.stairs(shares, 100 * table.edges, color=colour, linewidth=1.6)
    top.set_ylabel('accuracy (%)')
    bottom.set_ylabel('rows (%)')
    bottom.set_xlabel('confidence max P (%)')
    bottom.set_xlim(0, 101)
    top.set_ylim(0, 101)
    figures.head(top, title)

  return figures.save(path, draw, (5.4, 5.8))


def plot_exits(
  path: str | os.PathLike[str],
  shares: Mapping[str, Sequence[float]],
  layers: Sequence[int],
  *,
  title: str = 'Where rows exit',
) -> pathlib.Path:
  """A bar for each setting, cut by the layer at which rows leave.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    shares: of the rows by head, `[E]` in [0, 1], by setting.
    layers: of the heads, `[E]`.
    title: of the picture.

  Returns:
    The path of the PNG; errors as in `plot_frontier`.
  """
  _check(path, shares)
  widths = 100 * np.array(list(shares.values()), np.float64)
  if widths.shape[1] != len(layers):
    raise ValueError(
      f'layers: expected {widths.shape[1]}, one for each share, got '
      f'{tuple(layers)}'
    )

  def draw(figure):
    axes = figure.add_subplot()
    starts = np.cumsum(widths, axis=1) - widths
    for place, layer in enumerate(layers):
      bars = axes.barh(
        list(shares),
        widths[:, place],
        left=starts[:, place],
        height=0.6,
        color=COLOURS[place % len(COLOURS)],
        label=f'layer {layer}',
      )
      # A number needs room in its part of the bar.
      labels = [f'{w:.0f}' if w >= 6 else '' for w in widths[:, place]]
      axes.bar_label(bars, labels, label_type='center', color='white')
    axes.set_xlim(0, 100)
    axes.set_xlabel('rows (%)')
    _rows(axes)
    figures.head(axes, title)

  return figures.save(path, draw, (6.4, 1.7 + 0.42 * len(shares)))


def plot_retention(
  path: str | os.PathLike[str],
  length: Int[np.ndarray, ' N'],
  kept: Int[np.ndarray, 'N P'],
  layers: Sequence[int],
  *,
  title: str = 'Tokens kept',
) -> pathlib.Path:
  """Share of the tokens left after each pruning, against the length.

  Lines are medians over groups of rows of similar length, bands the quartiles.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    length: tokens of each row.
    kept: of them, those left after each pruning layer.
    layers: the pruning layers, `[P]`.
    title: of the picture.

  Returns:
    The path of the PNG; errors as in `plot_frontier`.
  """
  _check(path, length)
  groups = _length_groups(length)
  middle = [float(np.median(length[rows])) for rows in groups]

  def draw(figure):
    axes = figure.add_subplot()
    for place, layer in enumerate(layers):
      share = 100 * kept[:, place] / length
      low, median, high = np.array(
        [np.quantile(share[rows], (0.25, 0.5, 0.75)) for rows in groups]
      ).T
      colour, marker = figures.look(place)
      axes.fill_between(
        middle, low, high, color=colour, alpha=0.15, linewidth=0
      )
      axes.plot(
        middle,
        median,
        color=colour,
        label=f'after layer {layer}',
        linewidth=1.8,
        marker=marker,
        markersize=5,
      )
    axes.set_ylim(0, 101)
    axes.set_xlabel('length (tokens)')
    axes.set_ylabel('tokens kept (%)')
    figures.head(axes, title)

  return figures.save(path, draw, (6.0, 3.9))


def _length_groups(
  length: Int[np.ndarray, ' N'],
) -> list[Int[np.ndarray, ' M']]:
  """Rows by length, in groups of about as many; equal lengths together."""
  order = np.argsort(length, kind='stable')
  edges = np.linspace(0, len(order), LENGTH_GROUPS + 1)[1:-1].astype(int)
  # A cut moves to where its length begins.
  cuts = np.unique(np.searchsorted(length[order], length[order][edges]))
  return [rows for rows in np.split(order, cuts) if len(rows)]


def plot_ablation(
  path: str | os.PathLike[str],
  variants: Mapping[str, Mapping[str, float | Estimate]],
  *,
  title: str = 'Ablation',
) -> pathlib.Path:
  """A panel for each measure, a bar for each variant.

  Args:
    path: of the picture; its suffix is replaced by .png and .pdf.
    variants: by name, the same measures by label with unit, e.g.
      'accuracy (%)' and 'latency (ms)'; an Estimate also shows its quartiles.
    title: of the picture.

  Returns:
    The path of the PNG; errors as in `plot_frontier`.
  """
  _check(path, variants)
  measures = list(next(iter(variants.values())))
  for name, values in variants.items():
    if list(values) != measures:
      raise ValueError(f'{name}: expected {measures}, got {list(values)}')

  def draw(figure):
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for number, (axes, measure) in enumerate(
      zip(panels, measures, strict=True)
    ):
      _draw_bars(axes, {k: v[measure] for k, v in variants.items()}, number)
      axes.set_xlabel(measure)
    _rows(panels[0])
    figure.suptitle(title, x=0.012, ha='left', weight='bold', fontsize=12)

  size = 1.6 + 3.2 * len(measures), 1.5 + 0.38 * len(variants)
  return figures.save(path, draw, size)


def _draw_bars(
  axes: Any, values: Mapping[str, float | Estimate], number: int
) -> None:
  """Bars from 0, each with its number behind it."""
  estimates = [
    one if isinstance(one, Estimate) else Estimate(one, one, one)
    for one in values.values()
  ]
  medians = np.array([one.median for one in estimates])
  bars = axes.barh(
    list(values), medians, height=0.6, color=COLOURS[number % len(COLOURS)]
  )
  errors = np.array([[m.median - m.low, m.high - m.median] for m in estimates])
  if errors.any():
    axes.errorbar(
      medians, list(values), xerr=errors.T, fmt='none', ecolor=GREY,
      elinewidth=1.2, capsize=2,
    )  # fmt: skip
  # Behind the error bar, where there is one.
  for bar, one in zip(bars, estimates, strict=True):
    axes.annotate(
      f'{one.median:.4g}', (one.high, bar.get_y() + bar.get_height() / 2),
      (4, 0), textcoords='offset points', va='center', color=GREY, fontsize=9,
    )  # fmt: skip
  axes.set_xlim(0, 1.22 * max(max(m.high for m in estimates), 1e-9))
  axes.grid(visible=True, axis='x')
  axes.grid(visible=False, axis='y')


def _rows(axes: Any) -> None:
  """Bars are read from the top, and their grid is vertical."""
  axes.invert_yaxis()
  axes.grid(visible=True, axis='x')
  axes.grid(visible=False, axis='y')


def _check(path: str | os.PathLike[str], data: Any) -> None:
  if not len(data):
    raise ValueError(f'{path}: expected something to draw, got nothing')
