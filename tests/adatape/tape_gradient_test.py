"""The gradient of the reading: two passes against one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape import tape
from adatape.reading import Reading

B, C, H, h, T, K = 4, 24, 12, 5, 4, 3
READING = Reading(K, T, 1.6, h)
PROBE = np.random.default_rng(1).normal(size=(B, T, H)).astype('f')


def normalize(tokens, scale):
  """LayerNorm without a shift, of the last axis."""
  centred = tokens - tokens.mean(-1, keepdims=True)
  deviation = (centred**2).mean(-1, keepdims=True) ** 0.5
  return centred / deviation * scale.reshape((1,) * (tokens.ndim - 1) + (-1,))


def case(dim):
  rng = np.random.default_rng(dim)
  bank = rng.normal(size=(C, H) if dim == 2 else (B, C, H)).astype('f')
  scale = (0.8 + rng.random(H)).astype('f')
  return bank, scale, rng.normal(size=(B, h)).astype('f')


def two_passes(bank, scale, query, reading=READING):

  def first(tokens, count):
    return normalize(tokens, scale)[..., :count]

  arrays = jnp.asarray(bank), jnp.asarray(query)
  return tape.read(*arrays, reading, normalize=first)


def one_pass(bank, scale, query):
  """The specification written down naively: tokens and loss."""
  normed = normalize(bank, scale)
  if bank.ndim == 2:
    normed = jnp.tile(normed[None], (B, 1, 1))
  used = jnp.zeros((B, C), bool)
  halting, loss, running = jnp.zeros(B), jnp.zeros(B), jnp.ones(B, bool)
  tokens = []
  for _ in range(T):
    scores = jnp.einsum('bch,bh->bc', normed[..., :h], query)
    _, picks = jax.lax.top_k(
      jax.lax.stop_gradient(jnp.where(used, -jnp.inf, scores)), K
    )
    chosen = jnp.take_along_axis(normed, picks[..., None], axis=1)
    weights = jax.nn.softmax(
      jnp.take_along_axis(scores, picks, axis=1) / h**0.5
    )
    token = (weights[..., None] * chosen).sum(1)
    tokens.append(jnp.where(running[:, None], token, 0.0))
    goes_on = running & (halting + weights.max(-1) <= READING.threshold)
    halting = jnp.where(goes_on, halting + weights.max(-1), halting)
    loss += jnp.where(goes_on, 1 - (weights**2).sum(-1), 0.0)
    hot = jax.nn.one_hot(picks, C).sum(1) > 0
    used |= hot & goes_on[:, None]
    query = jnp.where(goes_on[:, None], (query + token[:, :h]) / 2, query)
    running = goes_on & (halting < READING.threshold)
  return jnp.stack(tokens, axis=1), loss


@pytest.mark.parametrize('dim', [2, 3])
def test_equals_one_pass(dim):
  def gradient(read):
    def objective(*args):
      tokens, loss = read(*args)
      return (tokens * PROBE).sum() + loss.sum()

    return jax.jit(jax.grad(objective, (0, 1, 2)))(*case(dim))

  def read(*args):
    got = two_passes(*args)
    return got.tokens, got.loss

  for x, y in zip(gradient(read), gradient(one_pass), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)
    assert np.abs(y).max() > 1e-2


@pytest.mark.parametrize('k', [1, 2])
def test_query_has_a_gradient_from_two_tokens_per_step_on(k):
  # Invariant 7: with K = 1 the only weight is 1.
  reading = Reading(k, T, 1.6, h)
  bank, scale, query = case(2)

  def objective(query):
    return (two_passes(bank, scale, query, reading).tokens * PROBE).sum()

  got = jax.jit(jax.grad(objective))(query)
  assert (np.abs(got).max() > 1e-4) == (k == 2)
