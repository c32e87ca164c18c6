"""Pruning in training: gradients, merging, restored tokens, many devices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eat.model import TokenScorer
from model_lib import tokens as pruning
from tests.contexts import rows_on
from tests.model_lib.tokens_test import case, prune, start


@pytest.mark.parametrize('merge', [False, True])
@pytest.mark.parametrize('size', [9, 6])
def test_gradient_equals_finite_differences(merge, size):
  x, scores = case(3, 9, 4, 1000)
  generator = np.random.default_rng(2)
  probe = generator.normal(size=(3, size, 4)).astype(np.float32)

  @jax.jit
  def total(x):
    got = pruning.prune(
      start(x, [9, 4, 1]), jnp.asarray(scores), 0.5, size, merge=merge
    )
    kept = jnp.arange(size)[None] < got.length[:, None]
    return jnp.where(kept[..., None], got.x * probe, 0.0).sum()

  gradient = np.asarray(jax.grad(total)(x))
  for _ in range(5):
    way = generator.normal(size=x.shape).astype(np.float32)
    # Linear in x, so a large step costs nothing.
    want = (total(x + 0.01 * way) - total(x - 0.01 * way)) / 0.02
    np.testing.assert_allclose((gradient * way).sum(), want, atol=2e-3)
  removed = np.abs(gradient).sum(-1) == 0
  # Pads have none; of the removed tokens only the merged ones have one.
  assert removed[1, 4:].all()
  assert removed[2, 1:].all()
  assert removed[0].sum() == (0 if merge else 4)


def test_restore_equals_a_plain_loop():
  x, scores = case(3, 10, 4, 1000)
  lengths = [10, 7, 1]
  states = np.random.default_rng(3).normal(size=(2, 3, 10, 4)).astype('f')
  for sizes in ((10, 10), (6, 4)):
    full, want = jnp.asarray(x), x.copy()
    tokens = start(x, lengths)
    for step, size in enumerate(sizes):
      tokens = prune(tokens, scores, 0.5, size)
      tokens = tokens._replace(x=states[step, :, :size])
      full = jax.jit(pruning.restore)(full, tokens)
      for row in range(3):
        for slot in range(int(tokens.length[row])):
          place = int(tokens.positions[row, slot])
          want[row, place] = states[step, row, slot]
      np.testing.assert_array_equal(full, want)
  assert (want != x).any(-1).sum(1).tolist() == [6, 4, 1]


def test_norm_scores():
  x, _ = case(2, 5, 8, 1)
  got = pruning.norm_scores(jnp.asarray(x))
  np.testing.assert_allclose(got, np.linalg.norm(x, axis=-1), atol=1e-5)
  gradient = jax.grad(lambda x: pruning.norm_scores(x).sum())
  np.testing.assert_array_equal(gradient(jnp.zeros((1, 2, 3))), 0.0)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_learned_scores_train_through_gates_of_one(dtype):
  x = jnp.asarray(case(2, 5, 8, 1)[0], dtype)
  scorer = TokenScorer()
  variables = scorer.init(jax.random.key(0), x)
  gated, scores = scorer.apply(variables, x)
  np.testing.assert_array_equal(gated, x)
  assert gated.dtype == dtype
  assert scores.dtype == jnp.float32
  assert len(np.unique(scores)) == 10
  probe = jnp.asarray(case(2, 5, 8, 1, seed=4)[0], dtype)

  def total(variables):
    return (scorer.apply(variables, x)[0] * probe).sum().astype(jnp.float32)

  gradient = jax.grad(total)(variables)['params']['score']
  gate = 1 / (1 + np.exp(-np.asarray(scores, np.float64)))
  slope = gate * (1 - gate)
  wide, probe = (np.asarray(v, np.float64) for v in (x, probe))
  slope = slope * (wide * probe).sum(-1)
  slope[:, 0] = 0  # [CLS]
  tolerance = 1e-4 if dtype == jnp.float32 else 0.05
  got = nn.unbox(gradient)
  np.testing.assert_allclose(got['bias'], [slope.sum()], atol=tolerance)
  np.testing.assert_allclose(
    got['kernel'][:, 0], np.einsum('bs,bsd->d', slope, wide), atol=tolerance
  )


@pytest.mark.parametrize('merge', [False, True])
def test_rows_on_many_devices_do_not_communicate(merge):
  x, scores = case(16, 12, 8, 1000)

  def total(x, scores, ratio):
    tokens = start(x, np.arange(16) % 12 + 1)
    got = pruning.prune(tokens, scores, ratio, 9, merge=merge)
    return jnp.square(got.x).sum((1, 2)), pruning.restore(x, got)

  gradient = jax.grad(lambda *args: total(*args)[0].sum())
  args = (*rows_on(8)((x, scores)), jnp.float32(0.4))
  for function in (total, gradient):
    text = jax.jit(function).lower(*args).compile().as_text()
    for word in ('all-gather', 'all-to-all', 'collective', 'all-reduce('):
      assert word not in text, word
  want = jax.jit(total)(x, scores, jnp.float32(0.4))
  for one, other in zip(jax.jit(total)(*args), want, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


def merged_by_loop(x, sizes, length, keep):
  """(states, sizes, kept places) of one row, token by token, in float64."""
  x = np.asarray(x, np.float64)
  units = x / np.linalg.norm(x, axis=-1, keepdims=True)
  kept = np.flatnonzero(keep[:length])
  hosts = kept[1:] if len(kept) > 1 else kept
  totals, counts = x * sizes[:, None], np.array(sizes, np.float64)
  for i in np.setdiff1d(np.arange(length), kept):
    host = hosts[np.argmax(units[hosts] @ units[i])]
    totals[host] += sizes[i] * x[i]
    counts[host] += sizes[i]
  return totals / counts[:, None], counts, kept


def test_merge_equals_a_plain_loop():
  lengths = [1, 2, 6, 9, 12]
  x, _ = case(5, 12, 6, 1)
  generator = np.random.default_rng(1)
  keep = generator.random((5, 12)) < 0.5
  keep[:, 0] = True
  keep[2, 1:] = False  # only [CLS] is kept
  sizes = generator.integers(1, 5, size=(5, 12)).astype(np.float32)
  got, got_sizes = jax.tree.map(
    np.asarray,
    jax.jit(pruning.merge_removed)(x, sizes, jnp.asarray(lengths), keep),
  )
  joined = 0
  for row, length in enumerate(lengths):
    want, counts, kept = merged_by_loop(x[row], sizes[row], length, keep[row])
    np.testing.assert_allclose(got[row, kept], want[kept], atol=1e-5)
    np.testing.assert_array_equal(got_sizes[row, kept], counts[kept])
    joined += (counts[kept] > sizes[row, kept]).sum()
    if len(kept) > 1:
      np.testing.assert_array_equal(got[row, 0], x[row, 0])
    for place in set(range(12)) - set(kept):
      np.testing.assert_array_equal(got[row, place], x[row, place])
  assert joined >= 6
  assert float(got_sizes[2, 0]) == sizes[2, :6].sum()


def test_repeated_merging_is_the_mean_of_the_originals():
  x, scores = case(2, 12, 4, 1000)
  tokens, twin = start(x, [12, 9]), start(x, [12, 9])
  for size in (7, 4):
    tokens = prune(tokens, scores, 0.5, size, merge=True)
    twin = prune(twin, scores, 0.5, 12, merge=True)
  assert list(tokens.length) == [4, 3]
  for row, length in enumerate([12, 9]):
    count = int(tokens.length[row])
    sizes = np.asarray(tokens.sizes[row, :count])
    assert sizes[0] == 1
    assert sizes.sum() == length
    total = (np.asarray(tokens.x[row, :count]) * sizes[:, None]).sum(0)
    np.testing.assert_allclose(total, x[row, :length].sum(0), atol=1e-5)
    # The masked form adds in another order.
    np.testing.assert_allclose(
      twin.x[row, :count], tokens.x[row, :count], atol=1e-5
    )
    np.testing.assert_array_equal(twin.sizes[row, :count], sizes)
