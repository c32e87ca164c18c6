"""Tape reading and its gradient against a plain loop; its invariants."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape import tape
from adatape.reading import Reading

B, C, H, h, T = 7, 24, 12, 5, 4
# K, dimensions of the bank, query update, loss.
CONFIGS = (
  (1, 2, 'average', 'entropy'), (1, 3, 'replace', 'max'),
  (2, 2, 'replace', 'entropy'), (2, 3, 'average', 'max'),
  (3, 2, 'average', 'max'), (3, 3, 'replace', 'entropy'),
  (5, 2, 'replace', 'max'), (5, 3, 'average', 'entropy'),
)  # fmt: skip


def loop(bank, query, reading, dropped):
  """One row in float64: (tokens, indices, halting, loss)."""
  used, running = dropped.copy(), True
  tokens, indices = [], []
  halting = loss = 0.0
  while running and len(tokens) < reading.max_steps:
    scores = bank[:, : reading.query_dim] @ query
    free = [c for c in range(len(bank)) if not used[c]]
    picked = sorted(free, key=lambda c: -scores[c])[: reading.tokens_per_step]
    exps = np.exp((scores[picked] - scores[picked[0]]) / reading.query_dim**0.5)
    w = exps / exps.sum()
    tokens.append(w @ bank[picked])
    indices.append(picked)
    if halting + w.max() > reading.threshold:
      break
    halting += w.max()
    loss += 1 - (w.max() if reading.loss == 'max' else (w**2).sum())
    used[picked] = True
    query = tokens[-1][: reading.query_dim] + (
      query if reading.query_update == 'average' else 0
    )
    if reading.query_update == 'average':
      query = query / 2
    running = halting < reading.threshold
  return np.array(tokens), np.array(indices), halting, loss


def case(dim=2, seed=0, rows=B):
  """A random normalised bank of 2 or 3 dimensions, queries and drops."""
  rng = np.random.default_rng(seed)
  shape = (C, H) if dim == 2 else (rows, C, H)
  bank = rng.normal(size=shape).astype(np.float32)
  # Rows of unlike sharpness, so that their lengths differ.
  sharpness = 3 * rng.random((rows, 1))
  query = (sharpness * rng.normal(size=(rows, h))).astype(np.float32)
  # 4 of 24 tokens: 20 = 5 * 4 are left.
  dropped = np.argsort(rng.random((rows, C))) < 4
  return bank, query, dropped


def run(reading, bank, query, dropped=None, **options):
  # A new function for every call, so that a patched step is traced again.
  def read(bank, query, dropped):
    return tape.read(bank, query, reading, dropped=dropped, **options)

  return jax.tree.map(np.asarray, jax.jit(read)(bank, query, dropped))


def check_loop(reading, bank, query, dropped):
  """Compares `read` with the loop in every row; returns the lengths."""
  got = run(reading, bank, query, dropped)
  for b in range(len(query)):
    rows = bank if bank.ndim == 2 else bank[b]
    tokens, indices, *sums = loop(
      rows.astype(np.float64), query[b], reading, dropped[b]
    )
    n = got.length[b]
    np.testing.assert_array_equal(got.mask[b], np.arange(T) < n)
    np.testing.assert_array_equal(got.indices[b, :n], indices)
    np.testing.assert_allclose(got.tokens[b, :n], tokens, atol=1e-5)
    np.testing.assert_allclose((got.halting[b], got.loss[b]), sums, atol=1e-5)
    assert not got.tokens[b, n:].any()
    assert not got.indices[b, n:].any()
  return got.length


@pytest.mark.parametrize(('k', 'dim', 'update', 'loss'), CONFIGS)
def test_equals_plain_loop(k, dim, update, loss):
  # Invariant 3: 8 settings of 26 rows, 208 random cases, half with drops.
  reading = Reading(k, T, {1: 2.0, 5: 1.2}.get(k, 1.6), h, update, loss)
  bank, query, dropped = case(dim, seed=10 * k + dim, rows=26)
  dropped[::2] = False
  lengths = check_loop(reading, bank, query, dropped)
  assert k == 1 or len(set(lengths)) > 1


@pytest.mark.parametrize(
  ('k', 'threshold'), [(1, 0.7), (1, 2.0), (2, 1.7), (3, 1.0), (3, 2.5)]
)
def test_length_has_its_bounds(k, threshold):
  # Invariant 1.
  reading = Reading(k, T, threshold, h)
  length = check_loop(reading, *case(seed=k, rows=16))
  assert length.min() >= min(T, math.ceil(threshold))
  assert length.max() <= min(T, math.ceil(k * threshold))


def test_picks_are_distinct_when_every_score_is_negative():
  # Invariant 2; setting used scores to 0 would pick a token again.
  bank, query, dropped = case()
  lengths = check_loop(Reading(2, T, 3.0, h), -abs(bank), abs(query), dropped)
  assert lengths.min() > 1


@pytest.mark.parametrize('dim', [2, 3])
def test_scan_and_while_loop_agree_bit_for_bit(dim):
  # Invariant 4, first half; the second is in serving_test.py.
  args = (Reading(2, T, 1.6, h), *case(dim, seed=3))
  masked, dynamic = run(*args), run(*args, stop_early=True)
  jax.tree.map(np.testing.assert_array_equal, masked, dynamic)
  assert 1 < masked.length.min() < masked.length.max()
  # NumPy arrays are read outside jit, too.
  reading, bank, query, dropped = args
  got = tape.read(bank, query, reading, dropped=jnp.asarray(dropped))
  np.testing.assert_array_equal(got.indices, masked.indices)
  np.testing.assert_allclose(got.tokens, masked.tokens, atol=1e-6)


def test_ties_take_the_lowest_index():
  got = run(Reading(2, T, 100.0, h), np.ones((C, H), 'f'), np.ones((B, h), 'f'))
  want = np.arange(2 * T).reshape(T, 2)
  np.testing.assert_array_equal(got.indices, np.tile(want, (B, 1, 1)))


def test_fixed_length_reads_the_best_tokens_at_once():
  bank, query, dropped = case(seed=7)
  reading = Reading(5, T, math.inf, h)
  for options in ({}, {'stop_early': True}):
    got = run(reading, bank, query, dropped, **options)
    scores = np.where(dropped, -np.inf, query @ bank[:, :h].T)
    want = np.argsort(-scores, axis=1)[:, :T]
    np.testing.assert_array_equal(got.indices[..., 0], want)
    np.testing.assert_allclose(got.tokens, bank[want], atol=1e-6)
    assert (got.length == T).all()
    assert not got.loss.any()


@pytest.mark.parametrize('scale', [1e10, 1e16])
@pytest.mark.parametrize('loss', ['entropy', 'max'])
def test_large_finite_scores_give_finite_tapes(scale, loss):
  # A division after the product fuses with the softmax's subtraction: NaN.
  bank, query, _ = case(seed=9)
  got = run(Reading(2, T, 1.6, h, loss=loss), bank, scale * query)
  for name in ('tokens', 'halting', 'loss'):
    assert np.isfinite(getattr(got, name)).all(), name
  assert (got.length == 2).all()  # all weights are 0 or 1


def normalize(tokens, scale):
  """LayerNorm without a shift, of the last axis, in NumPy or JAX."""
  centred = tokens - tokens.mean(-1, keepdims=True)
  deviation = (centred**2).mean(-1, keepdims=True) ** 0.5
  return centred / deviation * scale.reshape((1,) * (tokens.ndim - 1) + (-1,))


@pytest.mark.parametrize('dim', [2, 3])
def test_gradient_equals_finite_differences(dim):
  rng, reading = np.random.default_rng(dim), Reading(3, T, 1.6, h)
  bank, query, _ = case(dim)
  given = bank, (0.8 + rng.random(H)).astype('f'), query
  probe = rng.normal(size=(B, T, H)).astype('f')

  def ours(bank, scale, query):
    got = tape.read(
      bank, query, reading,
      normalize=lambda tokens, count: normalize(tokens, scale)[..., :count],
    )  # fmt: skip
    return (got.tokens * probe).sum() + got.loss.sum()

  def plain(bank, scale, query):
    total, banks = 0.0, np.broadcast_to(normalize(bank, scale), (B, C, H))
    for b in range(B):
      tokens, *_, loss = loop(banks[b], query[b], reading, np.zeros(C, bool))
      total += (tokens * probe[b, : len(tokens)]).sum() + loss
    return total

  exact = [np.float64(x) for x in given]
  for place, gradient in enumerate(jax.jit(jax.grad(ours, (0, 1, 2)))(*given)):
    assert np.abs(gradient).max() > 1e-2
    for _ in range(3):
      way = rng.normal(size=gradient.shape)
      above, below = (
        plain(*exact[:place], exact[place] + step * way, *exact[place + 1 :])
        for step in (1e-6, -1e-6)
      )
      slope = np.vdot(np.float64(gradient), way)
      np.testing.assert_allclose(
        slope, (above - below) / 2e-6, rtol=1e-4, atol=1e-4
      )


@pytest.mark.parametrize('k', [1, 2])
def test_query_has_a_gradient_from_two_tokens_per_step_on(k):
  # Invariant 7: with K = 1 the only weight is 1.
  bank, query, _ = case()

  def objective(query):
    tokens = tape.read(bank, query, Reading(k, T, 1.6, h)).tokens
    return (tokens**2).sum()

  got = jax.jit(jax.grad(objective))(query)
  assert (np.abs(got).max() > 1e-4) == (k == 2)
