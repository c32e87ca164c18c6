"""Other authors' choices of an exit threshold, and how often each one fails.

Written from their papers. All of them sweep one threshold of the confidence of
the model as trained; a choice is the index of a setting of a `risk.Grid`, None
for full depth, and losses are in [0, 1]. RC-EENN: Jazbec, Timans, Veljkovic,
Sakmann, Zhang, Naesseth and Nalisnick, 2024, "Fast yet Safe: Early-Exiting with
Risk Control", section 4.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from eval_lib import bounds, risk
from eval_lib.bounds import Losses
from eval_lib.predictions import Labels
from eval_lib.risk import Grid, Variant
from halting.row_rules import softmax

Choose = Callable[[Any], int | None]  # from the numbers of rows


def uncorrected(losses: Losses, epsilon: float) -> int | None:
  """Chooses the riskiest setting whose mean loss is at most epsilon."""
  return _last(losses.mean(0) <= epsilon)


def rc_eenn_expectation(losses: Losses, epsilon: float) -> int | None:
  """Chooses as conformal risk control, which bounds the expected risk only.

  The smallest threshold with `mean <= (N + 1) / N epsilon - 1 / N`.
  """
  rows = len(losses)
  return uncorrected(losses, (rows + 1) / rows * epsilon - 1 / rows)


def rc_eenn_bound(losses: Losses, epsilon: float, delta: float) -> int | None:
  """Chooses the last setting before an upper bound that is above epsilon.

  The bound of Waudby-Smith and Ramdas with its bets as published for losses in
  [0, 1] (prior mean 1/2, bets of at most 1).
  """
  p_values = bounds.betting(losses, epsilon, delta, prior=0.5, most=1.0)
  return _last(np.logical_and.accumulate(p_values < delta))


def calm(losses: Losses, epsilon: float, delta: float) -> int | None:
  """Chooses by fixed-sequence testing with Hoeffding's and Bentkus' p-values.

  Schuster, Fisch, Gupta, Dehghani, Bahri, Tran, Tay and Metzler, 2022,
  "Confident Adaptive Language Modeling", section 4.
  """
  p_values = bounds.hoeffding_bentkus(losses, epsilon, delta)
  return _last(np.logical_and.accumulate(p_values <= delta))


def cats(
  confidence: Float[np.ndarray, 'E N'],
  differs: Bool[np.ndarray, 'E N'],
  thresholds: risk.Thresholds,
  epsilon: float,
) -> int | None:
  """Chooses a threshold that each head's wrong confidences stay below.

  Schuster, Fisch, Jaakkola and Barzilay, 2021, "Consistent Accelerated
  Inference via Confident Adaptive Transformers", section 4, shared calibration:
  of the rows with an early head that `differs` from full depth, the 1 - epsilon
  quantile of their largest confidence at such a head. A row leaves above it.
  The score is the confidence instead of a meta-classifier. It bounds the
  expected disagreement only.
  """
  worst = np.where(differs, confidence, -np.inf).max(0)[differs.any(0)]
  quantile = np.quantile([*worst, np.inf], 1 - epsilon, method='higher')
  return _last(thresholds > quantile)


def _last(passes: Bool[np.ndarray, ' K']) -> int | None:
  return int(np.flatnonzero(passes)[-1]) if passes.any() else None


def choices(
  variants: Sequence[Variant], labels: Labels, epsilon: float, delta: float
) -> dict[tuple[str, str], tuple[Grid, Choose]]:
  """Returns (grid on all rows, choice from numbers of rows) by risk and method.

  The first variant is as trained; ours with '+ models' choose among all.
  """
  accuracy, disagreement = 'accuracy', 'disagreement'
  grids = {
    kind: risk.build_grid(variants[:1], labels, kind, epsilon)
    for kind in (accuracy, 'harm', disagreement, 'brier')
  }

  def ours(kind: str, method: str, grid: Grid) -> tuple[Grid, Choose]:
    return grid, lambda n: risk.choose(
      grid.take(n), kind, method, epsilon, delta
    )[0]

  def peer(kind: str, choose: Any, *args: float) -> tuple[Grid, Choose]:
    return grids[kind], lambda n: choose(grids[kind].losses[n], *args)

  table = {(k, 'sequence'): ours(k, 'sequence', g) for k, g in grids.items()}
  table[accuracy, 'pareto'] = ours(accuracy, 'pareto', grids[accuracy])
  if len(variants) > 1:
    both = risk.build_grid(variants, labels, accuracy, epsilon)
    for method in ('sequence', 'pareto'):
      table[accuracy, f'{method} + models'] = ours(accuracy, method, both)
  for kind in (accuracy, disagreement):
    table[kind, 'no correction'] = peer(kind, uncorrected, epsilon)
    expectation = peer(kind, rc_eenn_expectation, epsilon)
    table[kind, 'RC-EENN, expectation'] = expectation
    table[kind, 'RC-EENN, bound'] = peer(kind, rc_eenn_bound, epsilon, delta)
  table[disagreement, 'CALM'] = peer(disagreement, calm, epsilon, delta)
  heads, grid = softmax(variants[0].logits), grids[disagreement]
  differs = heads[:-1].argmax(-1) != heads[-1].argmax(-1)
  sure = heads[:-1].max(-1).astype(np.float64)

  def choose_cats(n: Any) -> int | None:
    return cats(sure[:, n], differs[:, n], grid.thresholds, epsilon)

  return table | {(disagreement, 'CATs'): (grid, choose_cats)}


def resample(variants: Sequence[Variant], labels: Labels, flags: Any) -> Any:
  """Returns how often the choices fail, a row for each.

  The recorded rows are the distribution: a draw takes as many of them
  independently, chooses a setting and looks up its risk over all rows.
  `exceeded` is the share of the draws with a risk above epsilon; the other
  columns are means over the draws of the risk, the share of FLOPs `saved` and
  the share of rows that leave `early`, and the `worst` risk.
  """
  rng, rows, epsilon = np.random.default_rng(0), len(labels), flags.epsilon
  samples, table = rng.integers(rows, size=(flags.draws, rows)), []
  limits = {'epsilon': epsilon, 'delta': flags.delta, 'rows': rows}
  every = choices(variants, labels, epsilon, flags.delta)
  for (kind, method), (grid, choose) in every.items():
    settings = [grid.losses.mean(0), 1 - grid.cost.mean(0), grid.early]
    # Full depth has risk 0 and saves nothing.
    values = np.append(np.stack(settings, 1), [[0.0, 0.0, 0.0]], axis=0)
    chosen = [choose(sample) for sample in samples]
    risks, saved, early = values[[-1 if k is None else k for k in chosen]].T
    table.append({
      'risk': kind, 'method': method, **limits, 'draws': flags.draws,
      'exceeded': float((risks > epsilon).mean()),
      'mean': float(risks.mean()), 'worst': float(risks.max()),
      'saved': float(saved.mean()), 'early': float(early.mean()),
    })  # fmt: skip
  return table
