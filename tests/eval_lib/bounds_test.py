"""Tests of a mean against loops, textbooks and simulations."""

import math

import numpy as np
import pytest
import scipy.stats

from eval_lib import bounds

DELTA = 0.1


def signed(rows, mean, differ=0.1):
  """Losses -1, 0 and 1 of a known mean; a share `differ` is not 0."""
  shares = (differ - mean) / 2, 1 - differ, (differ + mean) / 2
  return np.random.default_rng(0).choice([-1, 0, 1], (rows, 1), p=shares)


def by_loop(losses, epsilon, delta):
  """The largest capital of one column, row by row."""
  capital = most = 1.0
  total, squares, spread = 0.0, 0.0, 0.25
  for number, loss in enumerate(losses.tolist(), 1):
    bet = math.sqrt(2 * math.log(1 / delta) / (len(losses) * spread))
    capital *= 1 - min(bet, 0.75 / (1 - epsilon)) * (loss - epsilon)
    most = max(most, capital)
    total += loss
    mean = (total + epsilon) / (number + 1)
    squares += (loss - mean) ** 2
    spread = (squares + 0.25) / (number + 1)
  return 1 / most


@pytest.mark.parametrize('epsilon', [0.02, 0.3])
def test_betting_equals_a_loop(epsilon):
  losses = np.concatenate([signed(80, m, 0.4) for m in (-0.3, 0.0, 0.2)], 1)
  expected = [by_loop(column, epsilon, DELTA) for column in losses.T]
  assert bounds.betting(losses, epsilon, DELTA) == pytest.approx(expected)


@pytest.mark.parametrize(('epsilon', 'delta'), [(0.02, 0.1), (0.5, 0.5)])
def test_the_fewest_rows_that_can_reject(epsilon, delta):
  expected = math.ceil(math.log(delta) / math.log(1 - epsilon))
  assert bounds.least_rows(bounds.binomial, epsilon, delta) == expected
  rows = bounds.least_rows(bounds.betting, epsilon, delta)
  before, least = (
    by_loop(np.zeros(n), epsilon, delta) for n in (rows - 1, rows)
  )
  assert least <= delta < before
  assert bounds.least_rows(bounds.binomial, 1e-9, 0.1) == bounds.MANY_ROWS


@pytest.mark.parametrize('rows', [1, 7, 40])
@pytest.mark.parametrize('delta', [0.05, 0.3])
def test_the_binomial_test_and_bound_are_those_of_the_textbook(rows, delta):
  for errors in range(rows + 1):
    losses = np.arange(rows) < errors
    for epsilon in (0.01, 0.1, 0.5, 0.9):
      less = scipy.stats.binomtest(errors, rows, epsilon, 'less').pvalue
      [p_value] = bounds.binomial(losses[:, None], epsilon, delta)
      assert p_value == pytest.approx(less)
    interval = scipy.stats.binomtest(errors, rows).proportion_ci(1 - 2 * delta)
    bound = bounds.upper(bounds.binomial, lambda _, rows=losses: rows, delta)
    assert bound == pytest.approx(interval.high)


def test_hoeffding_and_bentkus_by_hand():
  losses = np.array([[0.0, 0.5], [0.0, 0.5], [0.0, 0.0]])
  # (1 - epsilon)^3 for no loss; for a mean of 1/3 the smaller is 1, of
  # min(exp(-3 KL(1/3, 0.4)), e P(Binomial(3, 0.4) <= 1)).
  divergence = math.log(1 / 1.2) / 3 + 2 / 3 * math.log(2 / 1.8)
  expected = [0.6**3, math.exp(-3 * divergence)]
  p_values = bounds.hoeffding_bentkus(losses, 0.4, DELTA)
  assert p_values == pytest.approx(expected)
  assert expected[1] < math.e * scipy.stats.binom.cdf(1, 3, 0.4)


@pytest.mark.parametrize('mean', [-0.1, 0.0, 0.1])
def test_the_upper_bound_inverts_the_test(mean):
  losses = signed(400, mean)
  bound = bounds.upper(bounds.betting, lambda _: losses[:, 0], DELTA)
  for epsilon, rejected in ((bound - 1e-3, False), (bound + 1e-3, True)):
    [p_value] = bounds.betting(losses, epsilon, DELTA)
    assert (p_value <= DELTA) == rejected
  assert mean < bound < mean + 0.15
  assert bounds.upper(bounds.betting, lambda _: np.ones(3), DELTA) == 1.0
