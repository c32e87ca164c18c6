"""Window attention: blocks against the masked matrix and a plain loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eat import window_attention
from eat.window_attention import window_attend
from model_lib import row_random
from model_lib.attention import attend

# Shorter than a window, than a block, a multiple of one, one more, and wider
# windows than blocks.
SIZES = [
  (1, 2), (5, 32), (32, 4), (33, 32), (65, 2), (150, 100), (70, 128),
]  # fmt: skip


def case(length, batch=3, heads=2, width=4, dtype=jnp.float32):
  generator = np.random.default_rng(length)
  shape = (3, batch, heads, length, width)
  query, key, value = generator.normal(size=shape).astype(np.float32)
  lengths = np.array([length, max(1, length // 3), 0])[:batch]
  valid = np.arange(length)[None] < lengths[:, None]
  arrays = (jnp.asarray(x, dtype) for x in (query, key, value))
  return (*arrays, jnp.asarray(valid))


def both(*args, window, **options):
  """What the two implementations give."""

  @jax.jit
  def run(*args):
    return [
      window_attend(*args, window=window, implementation=name, **options)
      for name in ('block', 'dense')
    ]

  return run(*args)


def reference(query, key, value, valid, window):
  """One query at a time, in float64; also the attention received."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  valid = np.asarray(valid)
  batch, heads, length, width = query.shape
  out, received = np.zeros(query.shape), np.zeros((batch, length))
  for b in range(batch):
    for n in range(heads):
      for i in range(length):
        keys = [
          j
          for j in range(length)
          if valid[b, j] and (i == 0 or j == 0 or abs(i - j) <= window // 2)
        ]
        if not keys:
          continue
        scores = key[b, n, keys] @ query[b, n, i] / width**0.5
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, n, i] = weights @ value[b, n, keys]
        if valid[b, i]:
          received[b, keys] += weights / heads / np.sum(valid[b])
  return out, received


@pytest.mark.parametrize(('length', 'window'), [*SIZES, (2, 2), (40, 2)])
def test_both_equal_a_plain_loop(length, window):
  args = case(length)
  want, received = reference(*args, window)
  for got in both(*args, window=window, received=True):
    np.testing.assert_allclose(got[0], want, atol=1e-5)
    np.testing.assert_allclose(got[1], received, atol=1e-5)
    assert got[1].dtype == jnp.float32
    # A row without valid tokens gives zeros.
    assert not np.asarray(got[0][2]).any()
    assert not np.asarray(got[1][2]).any()
  np.testing.assert_allclose(received.sum(1), [1, 1, 0], atol=1e-12)


@pytest.mark.parametrize('length', [1, 17])
def test_a_window_over_everything_is_full_attention(length):
  query, key, value, valid = case(length)
  run = jax.jit(functools.partial(attend, received=True))
  want, mean = run(query, key, value, valid)
  for got in both(query, key, value, valid, window=32, received=True):
    np.testing.assert_allclose(got[0], want, atol=1e-5)
    np.testing.assert_allclose(got[1], mean, atol=1e-5)


def test_without_a_mask_all_keys_are_valid():
  query, key, value, valid = case(40)
  want = both(query, key, value, jnp.ones_like(valid), window=8)
  for got, other in zip(both(query, key, value, window=8), want, strict=True):
    np.testing.assert_array_equal(got[0], other[0])
    assert got[1] is None


@pytest.mark.parametrize('implementation', ['block', 'dense'])
@pytest.mark.parametrize('contents', [np.inf, np.nan])
def test_contents_of_masked_tokens_do_not_matter(implementation, contents):
  args = case(70)
  run = jax.jit(
    functools.partial(
      window_attend, window=8, implementation=implementation, received=True
    )
  )
  valid = np.asarray(args[3])
  spoilt = [jnp.where(args[3][:, None, :, None], x, contents) for x in args[:3]]
  want, got = run(*args), run(*spoilt, args[3])
  np.testing.assert_array_equal(got[1], want[1])
  rows = np.broadcast_to(valid[:, None], got[0].shape[:3])
  np.testing.assert_array_equal(
    np.asarray(got[0])[rows], np.asarray(want[0])[rows]
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


def shapes(jaxpr):
  """Shapes of all intermediate results, also within inner functions."""
  for equation in jaxpr.eqns:
    for variable in equation.outvars:
      yield variable.aval.shape
    for inner in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda leaf: hasattr(leaf, 'eqns') or hasattr(leaf, 'jaxpr'),
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from shapes(inner)


@pytest.mark.parametrize('implementation', ['block', 'dense'])
def test_blocks_need_no_square_array(implementation):
  length = 512
  args = case(length, batch=1, heads=1)

  def total(query, key, value, valid):
    attended, received = window_attend(
      query, key, value, valid, window=32, received=True,
      implementation=implementation,
      drop=lambda weights: 0.5 * weights,
    )  # fmt: skip
    return jnp.square(attended).sum() + jnp.square(received).sum()

  jaxpr = jax.make_jaxpr(jax.value_and_grad(total, (0, 1, 2)))(*args).jaxpr
  found = list(shapes(jaxpr))
  assert len(found) > 50
  largest = max(np.prod(shape) for shape in found)
  square = [s for s in found if sum(size >= length for size in s) > 1]
  if implementation == 'block':
    assert largest < 0.25 * length**2
    assert not square
  else:  # Shows that the test could fail.
    assert largest >= length**2
    assert square


def test_dropout_draws_once_for_all_weights():
  query, key, value, valid = case(70, batch=2)
  value = jnp.ones_like(value)
  keys = jax.random.split(jax.random.key(0), 2)
  calls = []

  def drop(weights):
    calls.append(weights.shape)
    return row_random.dropout(weights, 0.3, keys)

  run = functools.partial(
    window_attend, window=16, received=True, implementation='block'
  )
  plain, mean = jax.jit(run)(query, key, value, valid)
  np.testing.assert_allclose(plain, 1.0, atol=1e-5)
  got, mean_dropped = jax.jit(functools.partial(run, drop=drop))(
    query, key, value, valid
  )
  assert len(calls) == 1
  np.testing.assert_allclose(mean, mean_dropped, atol=1e-6)
  # Sums of dropped and rescaled weights: 1 in the mean, also of [CLS].
  got = np.asarray(got)[:, :, :, 0]
  assert abs(got.mean() - 1) < 0.05
  assert 0.05 < got[:, :, 1:].std() < 0.5
  assert (np.abs(got[:, :, 0] - 1) > 1e-3).all()
  # A row's dropout does not depend on its batch.
  keys = keys[1:]
  alone, _ = jax.jit(functools.partial(run, drop=drop))(
    query[1:], key[1:], value[1:], valid[1:]
  )
  np.testing.assert_allclose(alone[0, :, :, 0], got[1], atol=1e-6)


def test_auto_is_one_of_the_two(monkeypatch):
  args = case(40)
  jaxprs = {
    name: str(
      jax.make_jaxpr(
        functools.partial(window_attend, window=8, implementation=name)
      )(*args)
    )
    for name in ('auto', 'block', 'dense')
  }
  assert jaxprs['auto'] == jaxprs['dense'] != jaxprs['block']
  monkeypatch.setattr(window_attention, 'BLOCK_FROM', 40)
  auto = jax.make_jaxpr(functools.partial(window_attend, window=8))(*args)
  assert str(auto) == jaxprs['block']


def test_softmax_is_float32_under_bfloat16():
  args = case(70, dtype=jnp.bfloat16)
  want, received = both(*case(70), window=8, received=True)[1]
  for got in both(*args, window=8, received=True):
    assert got[0].dtype == jnp.bfloat16
    assert got[1].dtype == jnp.float32
    np.testing.assert_allclose(got[0].astype(jnp.float32), want, atol=0.03)
    np.testing.assert_allclose(got[1], received, atol=1e-3)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'window': 0}, 'window: expected an even number >= 2, got 0'),
    ({'window': 7}, 'window: expected an even number >= 2, got 7'),
    (
      {'window': 8, 'implementation': 'sparse'},
      "implementation: expected one of .*, got 'sparse'",
    ),
  ],
)
def test_illegal_options(options, message):
  with pytest.raises(ValueError, match=message):
    window_attend(*case(5), **options)
