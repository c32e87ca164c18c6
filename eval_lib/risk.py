"""Risk control: a grid of exit thresholds and cheaper models, tested together.

Learn then Test (Angelopoulos, Bates, Candes, Jordan and Lei, 2021), section 2:
every setting of a grid is tested for "its risk is above epsilon", in an order
that keeps the probability of any false certificate below delta. Risks compare
the answers of a setting with those at full depth.

The rows must be independent draws from the distribution of the rows to come,
and nothing may be fitted to them, the grid included. Rows that share a text are
not independent: the evaluator keeps one, so the risk is that of distinct
inputs. A certificate is on average over rows, not per class.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from eval_lib import bounds
from eval_lib.bounds import Losses
from eval_lib.predictions import Heads, Labels
from halting.row_rules import Confidence, softmax

NUM_THRESHOLDS = 200

Risk = Literal['accuracy', 'harm', 'disagreement', 'brier', 'f1']
Method = Literal['sequence', 'pareto', 'conformal']
Thresholds = Float[np.ndarray, ' K']  # from the safest to the riskiest
# A bound of one of these is at least as strict as the same of the risk: who is
# wrong where full depth is right also disagrees with it.
IMPLIED_BY: dict[str, tuple[str, ...]] = {
  'accuracy': ('harm', 'disagreement'), 'harm': ('disagreement',),
  'disagreement': (), 'brier': (), 'f1': (),
}  # fmt: skip


class Variant(NamedTuple):
  """A model on the rows of a split; the first of several is as trained."""

  changes: Mapping[str, Any]  # of the fields of the model
  logits: Heads  # calibrated
  cost: Float[np.ndarray, 'N E']  # of a row that leaves at each head


class Grid(NamedTuple):
  """K settings on N rows, each group of them from the safest on."""

  variants: Int[np.ndarray, ' K']
  thresholds: Thresholds
  groups: Int[np.ndarray, ' K']
  losses: Losses
  cost: Float[np.ndarray, 'N K']  # over the mean cost of full depth
  early: Float[np.ndarray, ' K']  # share of the rows that leave early

  def take(self, rows: Any) -> 'Grid':
    """Returns the grid on some rows."""
    return self._replace(losses=self.losses[rows], cost=self.cost[rows])


def sweep(logits: Heads) -> tuple[Thresholds, Int[np.ndarray, 'K N']]:
  """Returns thresholds from 1.0 down to 1 / C, dense near 1, and the exits.

  An exit is the head at which a row leaves. One head has one threshold.
  """
  heads, _, classes = logits.shape
  steps = np.geomspace(1e-5, 1 - 1 / classes, NUM_THRESHOLDS - 1)
  thresholds = 1.0 - np.append(0.0, steps if heads > 1 else [])
  exits = Confidence(thresholds[:, None]).first(logits)
  return thresholds, np.broadcast_to(exits, (len(thresholds), exits.shape[-1]))


def losses(
  risk: str,
  chosen: Float[np.ndarray, 'K N C'],
  full: Float[np.ndarray, 'N C'],
  labels: Labels,
  epsilon: float,
) -> Losses:
  """Returns losses whose mean is the risk of K settings; at most 1.

  `chosen` and `full` are probabilities. The risks of the answers:

  - 'accuracy': accuracy at full depth - accuracy; the loss is -1, 0 or 1.
  - 'harm': P(full depth is right, the answer is wrong) >= 'accuracy'.
  - 'disagreement': P(another answer than at full depth) >= 'harm'.
  - 'brier': the Brier score / 2 above that at full depth, for calibration.
  - 'f1': at most epsilon if and only if F1, with the answers at full depth as
    labels and class 1 as positive, is at least 1 - epsilon: `E[(1 - epsilon)
    (FP + FN) - 2 epsilon TP] <= 0`. (No mean of losses is a difference of F1.)
  """
  answers, final = chosen.argmax(-1), full.argmax(-1)
  differs, is_right = answers != final, final == labels
  truth, both = np.eye(full.shape[-1])[labels], (answers == 1) & (final == 1)
  result: dict[str, Callable[[], Any]] = {
    'accuracy': lambda: is_right.astype(np.int8) - (answers == labels),
    'harm': lambda: differs & is_right,
    'disagreement': lambda: differs,
    'brier': lambda: (
      np.square(chosen - truth).sum(-1) - np.square(full - truth).sum(-1)
    ) / 2,
    'f1': lambda: np.where(differs, 1.0, epsilon) - 2 * epsilon * both,
  }  # fmt: skip
  return result[risk]().T


def test_of(risk: str) -> bounds.Test:
  """Returns the exact test for losses of 0 and 1, betting for the others."""
  is_binary = risk in ('harm', 'disagreement')
  return bounds.binomial if is_binary else bounds.betting


def build_grid(
  variants: Sequence[Variant], labels: Labels, risk: str, epsilon: float
) -> Grid:
  """Sweeps thresholds over all variants.

  The thresholds of a variant are a group; all variants with one head are one.
  """
  rows, parts = np.arange(len(labels)), []
  heads = [softmax(variant.logits) for variant in variants]
  for number, variant in enumerate(variants):
    thresholds, exits = sweep(variant.logits)
    chosen, last = heads[number][exits, rows], len(variant.logits) - 1
    parts.append(
      Grid(
        np.full(len(thresholds), number),
        thresholds,
        np.full(len(thresholds), number if last else 0),
        losses(risk, chosen, heads[0][-1], labels, epsilon),
        variant.cost[rows, exits].T / variants[0].cost[:, -1].mean(),
        (exits < last).mean(1),
      )
    )
  columns = zip(*parts, strict=True)
  return Grid(*(np.concatenate(column, axis=-1) for column in columns))


def mean_risk(risk: str, losses: Shaped[np.ndarray, ' N']) -> float:
  """Returns the risk on the rows; of f1 that is 1 - F1."""
  if risk != 'f1':
    return float(losses.mean())
  # A row is wrong, a true positive, or counts for nothing.
  wrong, positive = (losses == 1).sum(), (losses < 0).sum()
  return float(wrong / max(wrong + 2 * positive, 1))


def least_rows(
  risk: str, method: str, epsilon: float, delta: float, groups: int
) -> int:
  """Returns the fewest rows for a certificate if no row has a loss."""
  if method == 'conformal':
    return math.ceil(1 / epsilon - 1)
  if method == 'pareto':  # half of the rows are tested, in one group
    return 2 * bounds.least_rows(test_of(risk), epsilon, delta) - 1
  return bounds.least_rows(test_of(risk), epsilon, delta / groups)


def choose(
  grid: Grid, risk: str, method: str, epsilon: float, delta: float
) -> tuple[int | None, float]:
  """Returns the cheapest certified setting, or None, and the bound of its risk.

  With probability 1 - delta over the rows, the risk of no certified setting is
  above epsilon, so that any may be chosen:

  - 'sequence': the settings of each of G groups are tested in their order at
    delta / G, up to the first that fails (a false certificate needs a rejection
    at the first setting of a group with risk > epsilon).
  - 'pareto': Laufer-Goldshtein, Fisch, Barzilay and Jaakkola, 2023,
    "Efficiently Controlling Multiple Risks with Pareto Testing". One half of
    the rows finds the settings on the frontier of p-value and cost, and orders
    them by p-value; the other half tests them in this order at delta.
  - 'conformal': Angelopoulos, Bates, Fisch, Lei and Schuster, 2022, "Conformal
    Risk Control": of the first group the last setting before (N mean + 1) /
    (N + 1) > epsilon. Only the expectation of the risk over the draw of the
    rows is at most epsilon, and only if losses grow along the group.
  """
  test, rows, level = test_of(risk), len(grid.losses), delta
  # Bets are made row by row, so the order may not tell losses: a file may be
  # sorted by class.
  tested = grid = grid.take(np.random.default_rng(0).permutation(rows))
  orders = [np.flatnonzero(grid.groups == n) for n in np.unique(grid.groups)]
  if method == 'pareto':
    if rows < 2:
      return None, 0.0  # there is no half
    from eval_lib import frontier  # loads scikit-learn

    half = rows // 2
    first, tested = grid.take(slice(half)), grid.take(slice(half, None))
    p_values = test(first.losses, epsilon, delta)
    order = np.argsort(p_values, kind='stable')
    on_front = frontier.pareto(first.cost.mean(0), -p_values)
    orders = [order[on_front[order]]]
  level = delta / len(orders)
  if method == 'conformal':
    passes = (rows * grid.losses.mean(0) + 1) / (rows + 1) <= epsilon
    orders = orders[:1]
  else:
    passes, tried = np.zeros(len(grid.groups), bool), np.concatenate(orders)
    passes[tried] = test(tested.losses[:, tried], epsilon, level) <= level
  passing = np.concatenate(
    [order[np.logical_and.accumulate(passes[order])] for order in orders]
  )
  if not len(passing):
    return None, 0.0
  best = int(passing[grid.cost[:, passing].mean(0).argmin()])
  if method == 'conformal':
    return best, epsilon
  chosen = tested.losses[:, best]

  def at(other):  # only the losses of f1 depend on epsilon
    is_scaled = (risk == 'f1') & (chosen < 1)
    return np.where(is_scaled, chosen / epsilon * other, chosen)

  return best, bounds.upper(test, at, level)
