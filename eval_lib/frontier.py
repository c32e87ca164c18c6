"""Accuracy against cost: exit rules and thresholds over recorded logits.

The logits of all heads are recorded once; a rule decides at which head each
row leaves, so a sweep costs no run of the model. Rules are functions of the
logits, so this room needs to know none but the confidence rule of EAT,
section 4; `eat.exits` hands in the others.
"""

import csv
import dataclasses
import io
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Num

from dataset_lib import atomic_file
from eval_lib import predictions


class Setting(NamedTuple):
  """A rule with its parameter.

  Attributes:
    rule: its name, e.g. 'confidence'.
    value: its parameter, e.g. the threshold; None if it has none.
    exit_of: `(logits [E, N, C]) -> int [N]`, the index of the head at which
      each row leaves; NumPy or JAX.
  """

  rule: str
  value: float | None
  exit_of: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Point:
  """What a setting gives over the rows of a split.

  Attributes:
    rule: as in the setting.
    value: as in the setting.
    quality: accuracy or another measure; more is better.
    depth: mean number of layers executed.
    flops: FLOPs spent over those of the full model on the same rows.
    agreement: share of the rows with the answer of the full model.
    shares: of the rows by the head they leave at, `[E]`.
  """

  rule: str
  value: float | None
  quality: float
  depth: float
  flops: float
  agreement: float
  shares: tuple[float, ...]


def accuracy(
  logits: Float[np.ndarray, 'N C'], labels: Int[np.ndarray, ' N']
) -> float:
  """Share of right answers."""
  return float((logits.argmax(-1) == labels).mean())


def same_class(
  logits: Float[np.ndarray, 'N C'], full: Float[np.ndarray, 'N C']
) -> float:
  """Share of the rows with the same answer.

  Raises:
    ValueError: with one logit a row there are no classes.
  """
  if logits.shape[-1] < 2:
    raise ValueError(
      'agreement: expected at least 2 classes, got 1; for a regression give '
      'sweep a quality and an agreement of its own'
    )
  return float((logits.argmax(-1) == full.argmax(-1)).mean())


def never() -> Setting:
  """The full model: every row leaves at the last head."""
  return Setting(
    'never', None, lambda logits: np.full(logits.shape[1], len(logits) - 1)
  )


def confidence(
  threshold: float, temperatures: Float[np.ndarray, ' E'] | None = None
) -> Setting:
  """Exit where `max_c P >= threshold`, of the logits over temperatures."""

  def exit_of(logits):
    heads = predictions.probabilities(logits, temperatures)
    return predictions.confidence_exit(heads, threshold)

  return Setting('confidence', threshold, exit_of)


def sweep(
  logits: Float[np.ndarray, 'E N C'],
  labels: Num[np.ndarray, ' N'],
  settings: Sequence[Setting],
  *,
  layers: Sequence[int],
  flops: Any = None,
  full_flops: Any = None,
  quality: Callable[[Any, Any], float] = accuracy,
  agreement: Callable[[Any, Any], float] = same_class,
) -> list[Point]:
  """Measures settings on the same rows.

  Args:
    logits: of all heads; the last is the full model.
    labels: classes, or numbers of a regression.
    settings: what to measure.
    layers: layers executed when a row leaves at each head, `[E]`.
    flops: FLOPs of a row that leaves at each head, `[E]`, or `[N, E]` where
      they differ from row to row; None takes `layers` for the cost.
    full_flops: FLOPs of a row in the model compared with, a number or `[N]`;
      None for the last column of `flops`.
    quality: `(logits [N, C], labels [N]) -> float`.
    agreement: `(logits [N, C], logits of the last head [N, C]) -> float`.

  Raises:
    ValueError: a rule gives no head for each row, or tables do not fit.
  """
  heads, rows = logits.shape[:2]
  if len(layers) != heads:
    raise ValueError(f'layers: expected {heads}, got {tuple(layers)}')
  table = np.asarray(layers if flops is None else flops, np.float64)
  cost = np.broadcast_to(table, (rows, heads))
  full = cost[:, -1] if full_flops is None else full_flops
  full = np.broadcast_to(np.asarray(full, np.float64), (rows,))
  points = []
  for setting in settings:
    exits = _exits(setting, logits)
    chosen = logits[exits, np.arange(rows)]
    points.append(
      Point(
        rule=setting.rule,
        value=setting.value,
        quality=float(quality(chosen, labels)),
        depth=float(np.asarray(layers)[exits].mean()),
        flops=float(cost[np.arange(rows), exits].sum() / full.sum()),
        agreement=float(agreement(chosen, logits[-1])),
        shares=tuple((np.bincount(exits, minlength=heads) / rows).tolist()),
      )
    )
  return points


def _exits(
  setting: Setting, logits: Float[np.ndarray, 'E N C']
) -> Int[np.ndarray, ' N']:
  exits = np.asarray(setting.exit_of(logits))
  heads, rows = logits.shape[:2]
  legal = exits.shape == (rows,) and np.issubdtype(exits.dtype, np.integer)
  if not legal or not ((exits >= 0) & (exits < heads)).all():
    raise ValueError(
      f'rule {setting.rule!r}: expected a head in [0, {heads}) for each of '
      f'{rows} rows, got {exits.dtype} {exits.shape}: {exits}'
    )
  return exits


def pareto(
  cost: Float[np.ndarray, ' P'], quality: Float[np.ndarray, ' P']
) -> Bool[np.ndarray, ' P']:
  """Which points are on the frontier: no other is as good in both and better.

  Equal points stay together; a point with a NaN is never on it.
  """
  finite = ~(np.isnan(cost) | np.isnan(quality))
  as_good = (cost[:, None] <= cost) & (quality[:, None] >= quality)
  better = (cost[:, None] < cost) | (quality[:, None] > quality)
  return finite & ~(as_good & better).any(0)


def write_csv(
  path: str | os.PathLike[str],
  points: Sequence[Point],
  layers: Sequence[int],
  metric: str = 'accuracy',
  cost: str = 'flops',
) -> None:
  """A line per point: rule, value, metric, depth, cost, agreement, shares.

  Args:
    path: of the file.
    points: of `sweep`.
    layers: of the heads; the shares of the rows that leave at each are called
      `exit_<layer>`.
    metric: what the quality is.
    cost: what the points' `flops` are.
  """
  file = io.StringIO()
  writer = csv.writer(file, lineterminator='\n')
  exits = [f'exit_{layer}' for layer in layers]
  writer.writerow(['rule', 'value', metric, 'depth', cost, 'agreement', *exits])
  for point in points:
    value = '' if point.value is None else f'{point.value:g}'
    numbers = (
      point.quality, point.depth, point.flops, point.agreement, *point.shares
    )  # fmt: skip
    writer.writerow([point.rule, value, *(f'{one:.6g}' for one in numbers)])
  atomic_file.write_text(pathlib.Path(path), file.getvalue())
