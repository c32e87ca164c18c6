"""Attention against a plain loop, and what masked keys may not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from model_lib.attention import MultiHeadAttention, attend


def reference(params, x, mask, num_heads):
  """Multi-head attention, one query at a time, in float64."""
  dense = {
    name: np.asarray(value['kernel'], np.float64)
    for name, value in params.items()
  }
  bias = {
    name: np.asarray(value['bias'], np.float64)
    for name, value in params.items()
  }
  head = x.shape[-1] // num_heads
  out = np.zeros(x.shape)
  for b, row in enumerate(np.asarray(x, np.float64)):
    q, k, v = (row @ dense[n] + bias[n] for n in ('query', 'key', 'value'))
    merged = np.zeros(row.shape)
    for h in range(num_heads):
      part = slice(h * head, (h + 1) * head)
      for i in range(len(row)):
        keys = [j for j in range(len(row)) if mask[b, j]]
        if not keys:
          continue
        scores = np.array([q[i, part] @ k[j, part] for j in keys]) / head**0.5
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        merged[i, part] = sum(
          w * v[j, part] for w, j in zip(weights, keys, strict=True)
        )
    out[b] = merged @ dense['out'] + bias['out']
  return out


@pytest.fixture(scope='module')
def case():
  """The jitted model, random parameters (biases too), tokens and a mask."""
  model = MultiHeadAttention(num_heads=3)
  generator = np.random.default_rng(0)
  x = jnp.asarray(generator.normal(size=(3, 5, 12)), jnp.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(1), x)['params']
  params = jax.tree.map(
    lambda leaf: 0.3 * generator.normal(size=leaf.shape).astype(np.float32),
    nn.unbox(shapes),
  )
  mask = jnp.array([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
  apply = jax.jit(lambda p, x, mask=None: model.apply({'params': p}, x, mask).x)
  return apply, params, x, mask


def test_equals_plain_loop(case):
  apply, params, x, mask = case
  got = apply(params, x, mask)
  want = reference(params, x, np.asarray(mask), 3)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_no_mask_is_full_mask(case):
  apply, params, x, _ = case
  got = apply(params, x)
  want = reference(params, x, np.ones((3, 5)), 3)
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize('dtype', [bool, jnp.int32, jnp.float32])
def test_mask_of_any_dtype(case, dtype):
  apply, params, x, mask = case
  got = apply(params, x, mask.astype(dtype))
  np.testing.assert_array_equal(got, apply(params, x, mask))


@pytest.mark.parametrize('contents', [1e4, np.inf, np.nan])
def test_contents_of_masked_keys_do_not_matter(case, contents):
  apply, params, x, mask = case
  changed = jnp.where(mask[:, :, None] == 0, contents, x)
  got = apply(params, changed, mask)
  want = apply(params, x, mask)
  valid = np.asarray(mask) == 1
  np.testing.assert_array_equal(np.asarray(got)[valid], np.asarray(want)[valid])


def test_row_without_valid_key_is_the_output_bias(case):
  apply, params, x, mask = case
  got = apply(params, x, mask)[2]
  want = np.broadcast_to(params['out']['bias'], got.shape)
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_gradient_is_finite_and_zero_without_valid_key(case):
  apply, params, x, mask = case

  def total(params, x):
    return jnp.square(apply(params, x, mask)).sum()

  by_params, by_x = jax.grad(total, argnums=(0, 1))(params, x)
  assert all(
    bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(by_params)
  )
  assert bool(jnp.isfinite(by_x).all())
  np.testing.assert_array_equal(by_x[2], 0.0)
  assert float(jnp.abs(by_x[0]).sum()) > 0


def test_permuting_the_tokens_permutes_the_result(case):
  apply, params, x, mask = case
  order = jnp.array([3, 0, 4, 1, 2])
  got = apply(params, x[:, order], mask[:, order])
  want = apply(params, x, mask)[:, order]
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_softmax_is_float32_under_bfloat16():
  # 256 equal keys: 1/256 summed in bfloat16 would lose most of the mass.
  ones = jnp.ones((1, 1, 256, 4), jnp.bfloat16)
  text = str(jax.make_jaxpr(attend)(ones, ones, ones))
  assert 'f32[1,1,256,256] = exp' in text
  attended, received = attend(ones, ones, ones)
  assert attended.dtype == jnp.bfloat16
  assert received is None


def test_bfloat16_is_close_and_keeps_float32_parameters():
  x = jax.random.normal(jax.random.key(0), (2, 6, 16))
  model = MultiHeadAttention(num_heads=4, dtype=jnp.bfloat16)
  params = model.init(jax.random.key(1), x)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
    jnp.dtype('float32')
  }
  got = model.apply(params, x).x
  assert got.dtype == jnp.bfloat16
  want = MultiHeadAttention(num_heads=4).apply(params, x).x
  np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)


def test_heads_must_divide_the_width():
  with pytest.raises(ValueError, match=r'num_heads.*196.*got 3'):
    MultiHeadAttention(num_heads=3).init(
      jax.random.key(0), jnp.ones((1, 2, 196))
    )


def received_by_loop(params, x, mask, num_heads):
  """What each token receives, one query at a time, in float64."""
  kernel = {
    name: np.asarray(params[name]['kernel'], np.float64)
    for name in ('query', 'key')
  }
  head = x.shape[-1] // num_heads
  total = np.zeros(x.shape[:2])
  for b, row in enumerate(np.asarray(x, np.float64)):
    q = row @ kernel['query'] + params['query']['bias']
    k = row @ kernel['key'] + params['key']['bias']
    valid = np.flatnonzero(mask[b])
    for h in range(num_heads):
      part = slice(h * head, (h + 1) * head)
      for i in valid:
        weights = np.exp(k[valid, part] @ q[i, part] / head**0.5)
        share = weights / weights.sum() / (len(valid) * num_heads)
        total[b, valid] += share
  return total


@pytest.mark.parametrize('masked', [True, False])
def test_received_equals_plain_loop(case, masked):
  apply, params, x, mask = case
  mask = mask if masked else None
  model = MultiHeadAttention(num_heads=3)
  out, received, _ = model.apply({'params': params}, x, mask, received=True)
  np.testing.assert_allclose(out, apply(params, x, mask), atol=1e-6)
  every = np.ones((3, 5)) if mask is None else np.asarray(mask)
  want = received_by_loop(params, x, every, 3)
  np.testing.assert_allclose(received, want, atol=1e-6)
  shares = every.any(1).astype(float)
  np.testing.assert_allclose(received.sum(1), shares, atol=1e-6)
  assert received.dtype == jnp.float32


@pytest.mark.parametrize('contents', [1e4, np.inf, np.nan])
def test_received_does_not_read_masked_tokens(case, contents):
  _, params, x, mask = case
  model = MultiHeadAttention(num_heads=3)
  changed = jnp.where(mask[:, :, None] == 0, contents, x)
  got, want = (
    model.apply({'params': params}, tokens, mask, received=True).received
    for tokens in (changed, x)
  )
  np.testing.assert_array_equal(got, want)


def test_received_needs_all_queries(case):
  _, params, x, _ = case
  model = MultiHeadAttention(num_heads=3)
  with pytest.raises(ValueError, match='received: expected as many queries'):
    model.apply({'params': params}, x, received=True, num_queries=1)


def test_leading_queries_alone_are_those_of_all(case):
  apply, params, x, mask = case
  model = MultiHeadAttention(num_heads=3)
  got = model.apply({'params': params}, x, mask, num_queries=2).x
  want = apply(params, x, mask)[:, :2]
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_attention_is_what_the_field_says(case):
  _, params, x, mask = case
  calls = []

  def first_key(query, key, value, valid=None, *, drop=None, received=False):
    calls.append((valid is not None, drop is not None, received))
    first = jnp.broadcast_to(value[:, :, :1], query.shape)
    return first, jnp.zeros(key.shape[:1] + key.shape[2:3])

  model = MultiHeadAttention(num_heads=3, attend=first_key, dropout=0.5)
  keys = jax.random.split(jax.random.key(0), 3)
  got, received, _ = model.apply({'params': params}, x, mask, keys, True)
  first = np.asarray(x[:, 0])
  value = first @ params['value']['kernel'] + params['value']['bias']
  want = value @ params['out']['kernel'] + params['out']['bias']
  want = np.broadcast_to(want[:, None], got.shape)
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert received.shape == (3, 5)
  model.apply({'params': params}, x)
  assert calls == [(True, True, True), (False, False, False)]


def test_dropout_of_the_weights_by_hand():
  # Values are one-hot, so that the attended values are the weights.
  query = key = jnp.zeros((1, 1, 4, 4))
  value = jnp.eye(4)[None, None]
  kept = jnp.asarray([1.0, 0.0, 1.0, 1.0])
  attended, received = attend(
    query,
    key,
    value,
    drop=lambda weights: weights * 2.0 * kept[None, None, None],
    received=True,
  )
  np.testing.assert_allclose(
    attended[0, 0], np.tile([0.5, 0.0, 0.5, 0.5], (4, 1)), atol=1e-6
  )
  np.testing.assert_allclose(received[0], [0.25] * 4, atol=1e-6)


def test_dropout_belongs_to_the_row():
  model = MultiHeadAttention(num_heads=2, dropout=0.4)
  x = jax.random.normal(jax.random.key(0), (4, 6, 8))
  params = jax.jit(model.init)(jax.random.key(1), x)
  keys = jax.random.split(jax.random.key(2), 4)
  noisy = jax.jit(lambda x, keys: model.apply(params, x, None, keys).x)
  whole = noisy(x, keys)
  np.testing.assert_allclose(noisy(x[2:3], keys[2:3]), whole[2:3], atol=1e-6)
  clean = jax.jit(model.apply)(params, x).x
  assert float(jnp.abs(whole - clean).max()) > 0.05
