"""Exit thresholds with a guarantee: Learn then Test by fixed sequences.

Angelopoulos, Bates, Candes, Jordan and Lei, 2021, "Learn then Test: Calibrating
Predictive Algorithms to Achieve Risk Control", section 2.
"""

import dataclasses
from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Bool, Float, Int

from eval_lib.predictions import Heads, Labels, confidence_exit

NUM_THRESHOLDS = 200

Losses = Bool[np.ndarray, 'N K']  # whether row n is lost at threshold k
Thresholds = Float[np.ndarray, ' K']  # from the safest to the riskiest
Exits = Int[np.ndarray, 'K N']  # head each row leaves at, for every threshold


@dataclasses.dataclass(frozen=True)
class Guarantee:
  """A certified threshold; None, if none could be, means never to exit early.

  `bound` is Clopper and Pearson's upper confidence bound of the risk at the
  threshold, at level 1 - delta: at most epsilon, 0 for None.
  """

  threshold: float | None
  epsilon: float  # bound on the risk
  delta: float  # probability that the bound does not hold
  rows: int  # of calibration
  errors: int  # rows with loss at the threshold; 0 for None
  bound: float
  certified: int  # number of thresholds


def guaranteed_threshold(
  losses: Losses, thresholds: Thresholds, epsilon: float, delta: float
) -> Guarantee:
  """Returns the last threshold before the first p-value above delta.

  Its risk, the probability of a loss, exceeds epsilon with probability at most
  delta over the draw of the calibration rows, for every N, model and
  distribution. Proof: failure requires rejecting (p <= delta) at the first
  threshold with risk > epsilon, which has probability <= delta.

  The rows must be independent draws (rows that share a text are not) from the
  distribution of the rows to come, and nothing may be fitted to them, the grid
  of thresholds included. The guarantee is on average over rows, not per class.
  """
  rows, errors = len(losses), losses.sum(0)
  # p = P(Binomial(N, epsilon) <= errors)
  passes = scipy.stats.binom.cdf(errors, rows, epsilon) <= delta
  certified = len(passes) if passes.all() else int(passes.argmin())
  if not certified:
    return Guarantee(None, epsilon, delta, rows, 0, 0.0, 0)
  threshold, lost = thresholds[certified - 1], int(errors[certified - 1])
  bound = scipy.stats.beta.ppf(1.0 - delta, lost + 1, rows - lost)
  return Guarantee(
    float(threshold), epsilon, delta, rows, lost, float(bound), certified
  )


def confidence_sweep(probabilities: Heads) -> tuple[Thresholds, Exits]:
  """Returns thresholds from 1.0 down to 1 / C, dense near 1, and the exits."""
  least = 1.0 / probabilities.shape[-1]
  thresholds = 1.0 - np.geomspace(1e-5, 1.0 - least, NUM_THRESHOLDS - 1)
  thresholds = np.array([1.0, *thresholds])
  exits = [confidence_exit(probabilities, float(tau)) for tau in thresholds]
  return thresholds, np.stack(exits)


def disagreement(logits: Heads, exits: Exits) -> Losses:
  """Returns the loss "the row's answer is not that of the full model"."""
  answers = logits.argmax(-1)
  return (np.take_along_axis(answers, exits, axis=0) != answers[-1]).T


def harm(logits: Heads, exits: Exits, labels: Labels) -> Losses:
  """Returns the loss "the full model is right and the early answer is wrong".

  Its risk bounds the loss of accuracy, which is P(full right, early wrong) -
  P(full wrong, early right).
  """
  full_is_right = logits[-1].argmax(-1) == labels
  return disagreement(logits, exits) & full_is_right[:, None]


def certify_confidence(
  probabilities: Heads, epsilon: float, delta: float
) -> tuple[Guarantee, float]:
  """Certifies a confidence threshold for disagreement with the full model.

  Returns (the guarantee, share of these rows that leave before the last head).
  """
  thresholds, exits = confidence_sweep(probabilities)
  losses = disagreement(probabilities, exits)
  guarantee = guaranteed_threshold(losses, thresholds, epsilon, delta)
  return guarantee, _early(exits, guarantee, len(probabilities) - 1)


def _early(exits: Exits, guarantee: Guarantee, last: int) -> float:
  """Returns the share of the rows that leave before the last head."""
  chosen = exits[guarantee.certified - 1]
  return float((chosen < last).mean()) if guarantee.certified else 0.0


def resampled_risk(
  losses: Losses,
  thresholds: Thresholds,
  epsilon: float,
  delta: float,
  *,
  rows: int,
  draws: int = 200,
) -> Float[np.ndarray, ' R']:
  """Returns the risks of `draws` guarantees.

  At most a share delta should exceed epsilon. The recorded rows are the
  distribution: a draw takes `rows` of them independently, chooses a threshold,
  and looks up its risk over all rows, 0 if no threshold is certified.
  """
  rng, result = np.random.default_rng(0), []
  risks = dict(zip(thresholds.tolist(), losses.mean(0), strict=True))
  for _ in range(draws):
    sample = losses[rng.integers(len(losses), size=rows)]
    found = guaranteed_threshold(sample, thresholds, epsilon, delta)
    result.append(0.0 if found.threshold is None else risks[found.threshold])
  return np.array(result)


def resample_confidence(
  probabilities: Heads, labels: Labels, epsilon: float, delta: float, draws: int
) -> list[dict[str, Any]]:
  """Returns how often guaranteed thresholds fail, a row for each loss.

  `exceeded` is the share of the draws with a risk above epsilon; `mean` and
  `worst` are of the risk over the draws; `threshold` and the share `early` are
  of the guarantee on all rows.
  """
  rows, (thresholds, exits) = len(labels), confidence_sweep(probabilities)
  losses = {
    'disagreement': disagreement(probabilities, exits),
    'harm': harm(probabilities, exits, labels),
  }
  result = []
  for name, loss in losses.items():
    limits = loss, thresholds, epsilon, delta
    risks = resampled_risk(*limits, rows=rows, draws=draws)
    found = guaranteed_threshold(*limits)
    row = dict(loss=name, epsilon=epsilon, delta=delta, rows=rows, draws=draws)
    row |= {'exceeded': float((risks > epsilon).mean())}
    row |= {'worst': float(risks.max()), 'mean': float(risks.mean())}
    row |= {'threshold': found.threshold}
    early = _early(exits, found, len(probabilities) - 1)
    result.append(row | {'early': early})
  return result
