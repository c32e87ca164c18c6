"""PonderNet's distribution, loss and drawing against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from adatape import pondernet
from model_lib import pondering


def plain(lambdas):
  """`p_n` by the definition, the last lambda being 1."""
  left, result = 1.0, []
  for n, chance in enumerate(lambdas):
    chance = 1.0 if n == len(lambdas) - 1 else chance
    result.append(left * chance)
    left *= 1.0 - chance
  return result


def test_distribution_equals_a_plain_loop():
  lambdas = np.random.default_rng(0).uniform(size=(7, 5, 3)).astype(np.float32)
  lambdas[0, 0, 0], lambdas[1, 1, 1] = 1.0, 0.0
  got = np.asarray(pondernet.halting_distribution(jnp.asarray(lambdas)))
  for i in np.ndindex(5, 3):
    where = (slice(None), *i)
    np.testing.assert_allclose(got[where], plain(lambdas[where]), atol=1e-6)


def test_divergence_equals_scipy_and_has_a_gradient_at_zero():
  prior = pondernet.geometric_log_prior(0.3, 4)
  lambdas = jnp.array([[0.2, 1.0], [0.5, 0.3], [0.0, 0.9], [0.4, 0.4]])
  p = pondernet.halting_distribution(lambdas)
  want = scipy.special.rel_entr(p, np.exp(prior)[:, None]).sum(0)
  np.testing.assert_allclose(pondernet.divergence(p, prior), want, atol=1e-6)

  def total(lambdas):
    p = pondernet.halting_distribution(lambdas)
    return pondernet.divergence(p, prior).sum()

  assert np.isfinite(jax.grad(total)(lambdas)).all()


def test_a_prior_too_small_for_float32_has_a_finite_divergence():
  prior = pondernet.geometric_log_prior(0.99, 24)
  p = pondernet.halting_distribution(jnp.full((24,), 0.1))
  # ln prior_n = ln 0.99 + (n - 1) ln 0.01, but for what is cut off: 1e-48.
  want = sum(
    chance * (np.log(chance) - np.log(0.99) - n * np.log(0.01))
    for n, chance in enumerate(plain([0.1] * 24))
  )
  np.testing.assert_allclose(pondernet.divergence(p, prior), want, rtol=1e-5)


def test_loss_and_mean_by_hand():
  p = jnp.array([0.5, 0.25, 0.25])
  prior = pondernet.geometric_log_prior(0.5, 3)
  kl = 0.5 * np.log(0.5 * 7 / 4) + 0.25 * np.log(0.25 * 7 / 2)
  kl += 0.25 * np.log(0.25 * 7)
  loss = pondernet.ponder_loss(p, jnp.array([1.0, 2.0, 4.0]), prior, 0.1)
  np.testing.assert_allclose(loss, 2.0 + 0.1 * kl, atol=1e-6)
  np.testing.assert_allclose(pondernet.expected_steps(p), 1.75, atol=1e-6)


@pytest.mark.parametrize('dynamic', [False, True])
def test_the_median_step_halts(dynamic):
  # Halted with a probability of (0.5), (0.2, 0.44, 0.72) and (0, 0, then 1).
  lambdas = jnp.array([[0.5, 0.2, 0.0], [0.1, 0.3, 0.0], [0.9, 0.5, 0.0]])

  def step(state, n):
    return state + 1.0, lambdas[n]

  result = pondering.ponder(
    step, jnp.zeros((3, 1)), jnp.ones(3, bool), max_steps=3,
    rule=pondernet.advance_median, dynamic=dynamic, freeze=False,
  )  # fmt: skip
  np.testing.assert_array_equal(result.halting.steps, [1, 3, 3])
  np.testing.assert_array_equal(result.output[:, 0], [1.0, 3.0, 3.0])
  np.testing.assert_allclose(result.halting.total, [0.5, 0.72, 0.0], atol=1e-6)


def test_the_prior_is_geometric_and_cut_off():
  prior = np.exp(pondernet.geometric_log_prior(0.2, 5))
  np.testing.assert_allclose(prior.sum(), 1.0, atol=1e-6)
  np.testing.assert_allclose(prior[1:] / prior[:-1], 0.8, atol=1e-6)
