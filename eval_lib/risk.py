"""Exit thresholds with a guarantee: Learn then Test by fixed sequences.

A threshold chosen because it looked good on some data looks worse on other
data. Learn then Test (Angelopoulos, Bates, Candes, Jordan and Lei, 2021,
"Learn then Test: Calibrating Predictive Algorithms to Achieve Risk Control",
section 2 and fixed-sequence testing) treats the choice as hypothesis tests.

Theorem. Let the thresholds t_1, ..., t_K and their order be fixed, and let the
calibration rows be drawn independently from the distribution of the rows to
come. Let R(t) be the probability that a row's 0/1 loss is 1 at threshold t,
and p_k = P(Binomial(N, epsilon) <= errors at t_k). Test k = 1, 2, ... until
the first p_k > delta, and return the last threshold before it. Then
P(R(returned) > epsilon) <= delta, over the draw of the calibration rows, for
every N, every model and every distribution.

Proof. Let t_j be the first in the order with R(t_j) > epsilon. To return a
threshold whose risk is too high, the test must get past t_j, so p_j <= delta;
the errors at t_j are Binomial(N, R(t_j)), stochastically larger than
Binomial(N, epsilon), so this has at most probability delta. No correction for
the number of tests is needed, and a finer grid costs nothing.

Assumptions, all needed: the calibration rows are independent draws (rows that
share a text are not: MNLI has about three to a premise, and delta is then
larger than it says); rows to come are exchangeable with them
(`serve_lib.drift` watches the confidences of the first head, nothing can prove
it); nothing was fitted to them, neither the model nor its temperatures; the
grid was not chosen by looking at them. The guarantee is on average over rows,
not for a class or source of its own: calibrate each source with its own rows.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.stats
from jaxtyping import Bool, Float, Int

from eval_lib.predictions import confidence_exit


@dataclasses.dataclass(frozen=True)
class Guarantee:
  """A certified threshold.

  Attributes:
    threshold: the riskiest one certified; None means never to exit early,
      because none could be certified.
    epsilon: bound on the risk.
    delta: probability that the bound does not hold.
    rows: calibration rows.
    errors: of them, rows with loss at the threshold; 0 for None.
    bound: Clopper and Pearson's upper confidence bound of the risk at the
      threshold, at level 1 - delta; at most epsilon, 0 for None.
    certified: number of thresholds certified.
  """

  threshold: float | None
  epsilon: float
  delta: float
  rows: int
  errors: int
  bound: float
  certified: int


def p_values(
  errors: Int[np.ndarray, ' K'], rows: int, epsilon: float
) -> Float[np.ndarray, ' K']:
  """Returns `P(Binomial(rows, epsilon) <= errors)`."""
  return scipy.stats.binom.cdf(errors, rows, epsilon)


def upper_bound(errors: int, rows: int, delta: float) -> float:
  """Returns Clopper and Pearson's upper bound, at level 1 - delta.

  It is at most epsilon exactly when the p-value for epsilon is at most delta.
  """
  if errors == rows:
    return 1.0
  return float(scipy.stats.beta.ppf(1.0 - delta, errors + 1, rows - errors))


def guaranteed_threshold(
  losses: Bool[np.ndarray, 'N K'],
  thresholds: Float[np.ndarray, ' K'],
  epsilon: float,
  delta: float,
) -> Guarantee:
  """Returns the riskiest threshold whose risk is <= epsilon, with confidence.

  See the module for the theorem and its assumptions.

  Args:
    losses: whether row n is lost at threshold k, e.g. from `disagreement`.
    thresholds: from the safest to the riskiest; for the confidence rule 1.0
      downward, see `default_thresholds`.
    epsilon: bound on the risk, in (0, 1).
    delta: probability with which the bound may fail, in (0, 1).
  """
  rows = len(losses)
  errors = losses.sum(0)
  passes = p_values(errors, rows, epsilon) <= delta
  certified = len(passes) if passes.all() else int(passes.argmin())
  if not certified:
    return Guarantee(None, epsilon, delta, rows, 0, 0.0, 0)
  last = certified - 1
  lost = int(errors[last])
  return Guarantee(
    threshold=float(thresholds[last]),
    epsilon=epsilon,
    delta=delta,
    rows=rows,
    errors=lost,
    bound=upper_bound(lost, rows, delta),
    certified=certified,
  )


def default_thresholds(
  num_classes: int, count: int = 200
) -> Float[np.ndarray, ' K']:
  """Returns confidences from 1.0 down to 1 / num_classes, dense near 1."""
  doubts = np.geomspace(1e-5, 1.0 - 1.0 / num_classes, count - 1)
  return np.concatenate([[1.0], 1.0 - doubts])


def confidence_exits(
  probabilities: Float[np.ndarray, 'E N C'],
  thresholds: Float[np.ndarray, ' K'],
) -> Int[np.ndarray, 'K N']:
  """Returns the head each row leaves at, for every threshold."""
  return np.stack(
    [confidence_exit(probabilities, float(tau)) for tau in thresholds]
  )


def disagreement(
  logits: Float[np.ndarray, 'E N C'], exits: Int[np.ndarray, 'K N']
) -> Bool[np.ndarray, 'N K']:
  """Returns the loss "the row's answer is not that of the full model".

  Args:
    logits: of all heads.
    exits: the head each row leaves at, for every threshold.
  """
  answers = logits.argmax(-1)
  return (np.take_along_axis(answers, exits, axis=0) != answers[-1]).T


def harm(
  logits: Float[np.ndarray, 'E N C'],
  exits: Int[np.ndarray, 'K N'],
  labels: Int[np.ndarray, ' N'],
) -> Bool[np.ndarray, 'N K']:
  """Returns the loss "the full model is right and the early answer is wrong".

  Its risk bounds the loss of accuracy, which is P(full right, early wrong) -
  P(full wrong, early right).
  """
  full_is_right = logits[-1].argmax(-1) == labels
  return disagreement(logits, exits) & full_is_right[:, None]


def certify_confidence(
  probabilities: Float[np.ndarray, 'E N C'], epsilon: float, delta: float
) -> tuple[Guarantee, float]:
  """Certifies a confidence threshold for disagreement with the full model.

  Args:
    probabilities: of all heads, on rows that nothing was fitted to.
    epsilon: bound on the share of answers that differ.
    delta: probability with which the bound may fail.

  Returns:
    (the guarantee, the share of these rows that leave before the last head).
  """
  thresholds = default_thresholds(probabilities.shape[-1])
  exits = confidence_exits(probabilities, thresholds)
  losses = disagreement(probabilities, exits)
  guarantee = guaranteed_threshold(losses, thresholds, epsilon, delta)
  if guarantee.threshold is None:
    return guarantee, 0.0
  chosen = exits[guarantee.certified - 1]
  return guarantee, float((chosen < len(probabilities) - 1).mean())


def resampled_risk(
  losses: Bool[np.ndarray, 'N K'],
  thresholds: Float[np.ndarray, ' K'],
  epsilon: float,
  delta: float,
  *,
  rows: int,
  draws: int = 200,
  seed: int = 0,
  choose: Callable[..., Guarantee] = guaranteed_threshold,
) -> Float[np.ndarray, ' R']:
  """Returns the risks of resampled thresholds: a share delta may fail.

  The recorded rows are the distribution. Every draw takes calibration rows
  from them, independently, chooses a threshold, and looks up its true risk:
  the mean loss over all of them, the limit of ever larger test samples. The
  risk on a small test sample would add noise that the theorem does not bound.

  Args:
    losses: of the recorded rows.
    thresholds: from the safest to the riskiest.
    epsilon: bound on the risk.
    delta: probability with which it may fail.
    rows: calibration rows of a draw.
    draws: number of resamplings.
    seed: of the draws.
    choose: the method under test.

  Returns:
    The risk at the threshold of each draw; 0 where it is never to exit.
  """
  rng = np.random.default_rng(seed)
  risk = losses.mean(0)
  result = np.zeros(draws)
  for draw in range(draws):
    sample = losses[rng.integers(len(losses), size=rows)]
    chosen = choose(sample, thresholds, epsilon, delta).threshold
    if chosen is not None:
      result[draw] = risk[thresholds == chosen][0]
  return result
