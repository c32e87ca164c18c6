"""Attention and BERT's block against a plain loop; masks and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import bert
from model_lib.attention import MultiHeadAttention, attend
from tests.model_lib import plain

X = plain.normal(3, 5, 16)
# Masks of attention and of a block, whose rows have a valid token.
EMPTY = jnp.array([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
MASK = jnp.array([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [1, 0, 0, 0, 0]])
LAYERS = {
  'attention': MultiHeadAttention(num_heads=4),
  'block': bert.BertBlock(num_heads=4, mlp_dim=24),
}
PARAMS = {name: plain.noise(layer, X) for name, layer in LAYERS.items()}


def run(name, x=X, mask=None, layer=None, **options):
  layer = layer or LAYERS[name]
  return layer.apply({'params': PARAMS[name]}, x, mask, **options)


@pytest.mark.parametrize('mask', [None, EMPTY, EMPTY.astype(bool)])
def test_attention_equals_a_plain_loop(mask):
  out, received, _ = run('attention', mask=mask, received=True)
  valid = np.ones((3, 5), bool) if mask is None else np.asarray(mask) > 0
  for row in range(3):
    want, shares = plain.attention_by_loop(
      plain.float64(PARAMS['attention']), np.float64(X[row]), 4, valid[row]
    )
    np.testing.assert_allclose(out[row], want, atol=1e-5)
    np.testing.assert_allclose(received[row], shares, atol=1e-6)
  np.testing.assert_allclose(received.sum(1), valid.any(1), atol=1e-6)
  assert received.dtype == jnp.float32
  other = run('attention', mask=mask)
  np.testing.assert_allclose(out, other.x, atol=1e-6)
  assert other.received is None
  if mask is not None:
    floats = run('attention', mask=mask.astype(jnp.float32))
    np.testing.assert_array_equal(floats.x, other.x)


def test_a_block_equals_a_plain_loop():
  out, received, _ = run('block', mask=MASK, received=True)
  for row in range(3):
    valid = np.flatnonzero(MASK[row])
    rows = np.asarray(X[row], np.float64)[valid]
    want, shares = plain.block_by_loop(PARAMS['block'], rows, 4, 1e-12)
    np.testing.assert_allclose(out[row, valid], want, atol=1e-5)
    np.testing.assert_allclose(received[row, valid], shares, atol=1e-6)
    others = np.flatnonzero(MASK[row] == 0)
    np.testing.assert_array_equal(received[row, others], 0.0)


@pytest.mark.parametrize('contents', [1e4, np.inf, np.nan])
@pytest.mark.parametrize(
  ('name', 'mask', 'options'),
  [
    ('attention', EMPTY, {'received': True}),
    ('block', MASK, {}),
    ('block', MASK, {'num_queries': 1}),
  ],
)
def test_masked_tokens_are_never_read(name, mask, options, contents):
  changed = jnp.where(mask[:, :, None] == 0, contents, X)
  got, want = (run(name, x, mask, **options) for x in (changed, X))
  valid = np.asarray(mask)[:, : got.x.shape[1]] == 1
  np.testing.assert_array_equal(got.x[valid], want.x[valid])
  if got.received is not None:
    np.testing.assert_array_equal(got.received, want.received)


def test_gradient_is_finite_and_zero_without_valid_key():
  def total(params, x):
    out = LAYERS['attention'].apply({'params': params}, x, EMPTY).x
    return jnp.square(out).sum()

  gradients = jax.grad(total, argnums=(0, 1))(PARAMS['attention'], X)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
  np.testing.assert_array_equal(gradients[1][2], 0.0)
  assert float(jnp.abs(gradients[1][0]).sum()) > 0


def test_softmax_is_float32_under_bfloat16():
  # 256 equal keys: 1/256 summed in bfloat16 would lose most of the mass.
  ones = jnp.ones((1, 1, 256, 4), jnp.bfloat16)
  text = str(jax.make_jaxpr(attend)(ones, ones, ones))
  assert 'f32[1,1,256,256] = exp' in text
  model = MultiHeadAttention(num_heads=4, dtype=jnp.bfloat16)
  params = model.init(jax.random.key(1), X)
  got = model.apply(params, X).x
  assert got.dtype == jnp.bfloat16
  want = LAYERS['attention'].apply(params, X).x
  np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('mask', [None, MASK])
def test_leading_queries_alone_are_those_of_all(name, mask):
  want = run(name, mask=mask).x
  for count in (1, 2):
    got = run(name, mask=mask, num_queries=count).x
    np.testing.assert_allclose(got, want[:, :count], atol=1e-6)
  with pytest.raises(ValueError, match='received: expected as many queries'):
    run(name, received=True, num_queries=1)


def test_some_tokens_attend_to_keys_and_values_of_all():
  out = run('block', num_queries=0)
  assert out.x.shape == (3, 0, 16)
  got = run('block', X[:, 1:3], MASK, keys_values=out.keys_values).x
  want = run('block', mask=MASK).x[:, 1:3]
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_attention_is_that_of_the_field():
  calls = []

  def first_key(query, key, value, valid=None, *, drop=None, received=False):
    calls.append((valid is not None, drop is not None, received))
    first = jnp.broadcast_to(value[:, :, :1], query.shape)
    return first, jnp.zeros(key.shape[:1] + key.shape[2:3])

  layer = MultiHeadAttention(num_heads=4, attend=first_key, dropout=0.5)
  keys = jax.random.split(jax.random.key(0), 3)
  out = run('attention', X, EMPTY, layer, row_keys=keys, received=True)
  params = PARAMS['attention']
  value = np.asarray(X[:, 0]) @ params['value']['kernel']
  value = value + params['value']['bias']
  want = value @ params['out']['kernel'] + params['out']['bias']
  want = np.broadcast_to(want[:, None], out.x.shape)
  np.testing.assert_allclose(out.x, want, atol=1e-5)
  assert out.received.shape == (3, 5)
  run('attention', layer=layer)
  assert calls == [(True, True, True), (False, False, False)]


def test_dropout_of_the_weights_by_hand():
  # Values are one-hot, so that the attended values are the weights.
  query = key = jnp.zeros((1, 1, 4, 4))
  kept = jnp.asarray([1.0, 0.0, 1.0, 1.0])
  attended, received = attend(
    query, key, jnp.eye(4)[None, None], received=True,
    drop=lambda weights: weights * 2.0 * kept[None, None, None],
  )  # fmt: skip
  want = np.tile([0.5, 0.0, 0.5, 0.5], (4, 1))
  np.testing.assert_allclose(attended[0, 0], want, atol=1e-6)
  np.testing.assert_allclose(received[0], [0.25] * 4, atol=1e-6)
