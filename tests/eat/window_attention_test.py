"""Window attention: blocks against the masked matrix and a plain loop."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eat import window_attention
from eat.window_attention import window_attend
from model_lib import row_random
from tests.model_lib.plain import attend_by_loop, float64


def case(length, batch=3, heads=2, width=4, dtype=jnp.float32):
  generator = np.random.default_rng(length)
  shape = (3, batch, heads, length, width)
  query, key, value = generator.normal(size=shape).astype(np.float32)
  lengths = np.array([length, max(1, length // 3), 0])[:batch]
  valid = np.arange(length)[None] < lengths[:, None]
  arrays = (jnp.asarray(x, dtype) for x in (query, key, value))
  return (*arrays, jnp.asarray(valid))


def both(*args, window, **options):
  @jax.jit
  def run(*args):
    return [
      window_attend(*args, window=window, implementation=name, **options)
      for name in ('block', 'dense')
    ]

  return run(*args)


# Shorter than a window, than a block, a multiple of one, one more, and wider
# windows than blocks.
@pytest.mark.parametrize(
  ('length', 'window'),
  [
    (1, 2), (5, 32), (32, 4), (33, 32), (65, 2), (150, 100), (70, 128), (2, 2),
    (40, 2),
  ],
)  # fmt: skip
def test_both_equal_a_plain_loop(length, window):
  *arrays, valid = args = case(length)
  rows = zip(*float64(arrays), np.asarray(valid), strict=True)
  place = np.arange(length)
  near = abs(place[:, None] - place) <= window // 2
  near[0] = near[:, 0] = True  # [CLS] attends to all, and all to [CLS]
  loops = [attend_by_loop(*row, near) for row in rows]
  want, received = map(np.stack, zip(*loops, strict=True))
  for got in both(*args, window=window, received=True):
    np.testing.assert_allclose(got[0], want, atol=1e-5)
    np.testing.assert_allclose(got[1], received, atol=1e-5)
    assert got[1].dtype == jnp.float32
    # A row without valid tokens gives zeros.
    assert not np.asarray(got[0][2]).any()
    assert not np.asarray(got[1][2]).any()
  np.testing.assert_allclose(received.sum(1), [1, 1, 0], atol=1e-12)


def test_without_a_mask_all_keys_are_valid():
  query, key, value, valid = case(40)
  want = both(query, key, value, jnp.ones_like(valid), window=8)
  for got, other in zip(both(query, key, value, window=8), want, strict=True):
    np.testing.assert_array_equal(got[0], other[0])
    assert got[1] is None


@pytest.mark.parametrize('contents', [np.inf, np.nan])
def test_contents_of_masked_tokens_do_not_matter(contents):
  *args, valid = case(70)
  real = valid[:, None, :, None]
  spoilt = [jnp.where(real, x, contents) for x in args]
  want = both(*args, valid, window=8, received=True)
  got = both(*spoilt, valid, window=8, received=True)
  for one, other in zip(got, want, strict=True):
    np.testing.assert_array_equal(one[1], other[1])
    np.testing.assert_array_equal(
      *(jnp.where(real, x[0], 0) for x in (one, other))
    )


@pytest.mark.parametrize(('length', 'window'), [(5, 2), (70, 32), (130, 6)])
def test_gradients_are_equal(length, window):
  query, key, value, valid = case(length)
  probes = np.random.default_rng(1).normal(size=(2, *query.shape))

  def total(implementation, query, key, value):
    attended, received = window_attend(
      query, key, value, valid, window=window, received=True,
      implementation=implementation,
    )  # fmt: skip
    probe = jnp.asarray(probes, jnp.float32)
    return (attended * probe[0]).sum() + (received * probe[1, :, 0, :, 0]).sum()

  block, dense = (
    jax.jit(jax.grad(functools.partial(total, name), (0, 1, 2)))(
      query, key, value
    )
    for name in ('block', 'dense')
  )
  for one, other in zip(block, dense, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.abs(other[0]).max() > 1e-2
    assert np.isfinite(other).all()


def test_blocks_need_no_square_array():
  length = 512
  args = case(length, batch=1, heads=1)

  def largest(implementation):
    def total(query, key, value, valid):
      attended, received = window_attend(
        query, key, value, valid, window=32, received=True,
        implementation=implementation, drop=lambda weights: 0.5 * weights,
      )  # fmt: skip
      return jnp.square(attended).sum() + jnp.square(received).sum()

    text = str(jax.make_jaxpr(jax.value_and_grad(total, (0, 1, 2)))(*args))
    shapes = re.findall(r':[a-z]+\d*\[([\d,]+)\]', text)
    return max(math.prod(map(int, shape.split(','))) for shape in shapes)

  assert largest('block') < 0.25 * length**2 < length**2 <= largest('dense')


def test_dropout_draws_once_for_all_weights():
  query, key, value, valid = case(70, batch=2)
  args = (query, key, jnp.ones_like(value), valid)
  keys = jax.random.split(jax.random.key(1), 2)
  calls = []

  @functools.partial(jax.jit, static_argnums=2)
  def run(args, keys, rate):
    def drop(weights):
      calls.append(weights.shape)
      return row_random.drop(weights, rate, keys, 'weights')

    return window_attend(
      *args, window=16, received=True, implementation='block', drop=drop
    )

  plain, mean = run(args, keys, 0.0)
  np.testing.assert_allclose(plain, 1.0, atol=1e-5)
  got, mean_dropped = run(args, keys, 0.3)
  assert len(calls) == 2
  np.testing.assert_allclose(mean, mean_dropped, atol=1e-6)
  # Sums of dropped and rescaled weights: 1 in the mean, also of [CLS].
  got = np.asarray(got)[:, :, :, 0]
  assert abs(got.mean() - 1) < 0.05
  assert 0.05 < got[:, :, 1:].std() < 0.5
  assert (np.abs(got[:, :, 0] - 1) > 1e-3).all()
  # A row's dropout does not depend on its batch.
  alone, _ = run([array[1:] for array in args], keys[1:], 0.3)
  np.testing.assert_allclose(alone[0, :, :, 0], got[1], atol=1e-6)


def test_auto_is_one_of_the_two(monkeypatch):
  args = case(40)

  def program(name):
    run = functools.partial(window_attend, window=8, implementation=name)
    return str(jax.make_jaxpr(run)(*args))

  assert program('auto') == program('dense') != program('block')
  monkeypatch.setattr(window_attention, 'BLOCK_FROM', 40)
  assert program('auto') == program('block')


def test_softmax_is_float32_under_bfloat16():
  args = case(70, dtype=jnp.bfloat16)
  want, received = both(*case(70), window=8, received=True)[1]
  for got in both(*args, window=8, received=True):
    assert got[0].dtype == jnp.bfloat16
    assert got[1].dtype == jnp.float32
    np.testing.assert_allclose(got[0].astype(jnp.float32), want, atol=0.03)
    np.testing.assert_allclose(got[1], received, atol=1e-3)
