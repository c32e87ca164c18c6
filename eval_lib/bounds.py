"""Tests of "the mean loss is above epsilon", and bounds that invert them.

A test maps losses `[N, K]` of K settings to K p-values: P(p <= alpha) <= alpha
for every alpha wherever the mean is at least epsilon, for every N and every
distribution of independent rows. Nothing may have been fitted to the rows.
"""

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
from jaxtyping import Float, Shaped

Losses = Shaped[np.ndarray, 'N K']  # of row n with setting k, at most 1
PValues = Float[np.ndarray, ' K']
Test = Callable[[Losses, float, float], PValues]

MOST = 0.75  # of the capital that one row may cost
MANY_ROWS = 2**20


def _binomial_cdf(successes: Any, rows: int, share: float) -> PValues:
  # `scipy.stats.binom` takes a second to import, at every start of a training.
  count = np.asarray(successes, np.float64).clip(0, rows)
  return scipy.special.bdtr(count, rows, share)


def binomial(losses: Losses, epsilon: float, delta: float) -> PValues:
  """Tests losses that are 0 or 1 exactly: P(Binomial(N, epsilon) <= sum)."""
  return _binomial_cdf(losses.sum(0), len(losses), epsilon)


def hoeffding_bentkus(losses: Losses, epsilon: float, delta: float) -> PValues:
  """Tests losses in [0, 1] by the smaller of two inequalities.

  Bates, Angelopoulos, Lei, Malik and Jordan, 2021, "Distribution-Free,
  Risk-Controlling Prediction Sets", section 3.1.
  """
  rows, xlogy = len(losses), scipy.special.xlogy
  mean = np.minimum(losses.mean(0), epsilon)
  relative = xlogy(mean, mean / epsilon)
  relative += xlogy(1 - mean, (1 - mean) / (1 - epsilon))
  # Rounding may not lift a whole sum to the next number.
  total = np.ceil(losses.sum(0) - 1e-9)
  bentkus = np.e * _binomial_cdf(total, rows, epsilon)
  return np.minimum(np.exp(-rows * relative), bentkus).clip(max=1.0)


def betting(
  losses: Losses,
  epsilon: float,
  delta: float,
  prior: float | None = None,
  most: float | None = None,
) -> PValues:
  """Tests losses of at most 1, also negative ones, by betting against them.

  Waudby-Smith and Ramdas, 2020, "Estimating means of bounded random variables
  by betting", section 4. Proof: a capital that row n multiplies by `1 - b_n
  (loss_n - epsilon)`, with a bet b_n >= 0 that the rows before n determine, is
  expected not to grow if the mean is at least epsilon, so it ever reaches
  1 / alpha with probability at most alpha (Ville). The bets are made for
  alpha = delta (`sqrt(2 log(1 / delta) / (N variance))`), are at most `most`,
  and count `prior`, by default epsilon, as a loss before the first.
  """
  rows = len(losses)
  count = np.arange(2, rows + 2, dtype=np.float64)[:, None]
  start = epsilon if prior is None else prior
  mean = (losses.cumsum(0, dtype=np.float64) + start) / count
  spread = (np.square(losses - mean).cumsum(0) + 0.25) / count
  # A bet may not know its own row.
  spread = np.concatenate([np.full_like(spread[:1], 0.25), spread[:-1]])
  bets = np.sqrt(2 * np.log(1 / delta) / (rows * spread))
  bets = bets.clip(max=MOST / (1 - epsilon) if most is None else most)
  capital = np.log1p(-bets * (losses - epsilon)).cumsum(0).max(0)
  return np.exp(-capital.clip(min=0.0))


def least_rows(test: Test, epsilon: float, delta: float) -> int:
  """Returns the rows from which on a test without any loss can reject.

  At most `MANY_ROWS`; of `binomial` it is `log(delta) / log(1 - epsilon)`.
  """
  return bisect.bisect_left(
    range(MANY_ROWS), True, 1,
    key=lambda n: bool(test(np.zeros((n, 1)), epsilon, delta)[0] <= delta),
  )  # fmt: skip


def upper(
  test: Test, losses: Callable[[float], Shaped[np.ndarray, ' N']], delta: float
) -> float:
  """Returns the upper confidence bound of the mean, at level 1 - delta.

  It is the largest epsilon that the test does not reject of `losses(epsilon)`,
  of `binomial` the bound of Clopper and Pearson.
  """
  from scipy import optimize  # slow to import

  def excess(epsilon: float) -> float:
    return float(test(losses(epsilon)[:, None], epsilon, delta)[0]) - delta

  low, high = float(min(losses(0.0).min(), 0)), 1.0 - 1e-9
  if excess(high) > 0:
    return 1.0
  return float(optimize.brentq(excess, low, high))
