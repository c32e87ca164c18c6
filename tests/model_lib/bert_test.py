"""Attention and BERT against plain loops; masks, dropout and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from model_lib import bert, row_random
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


def test_some_tokens_attend_to_keys_and_values_of_all():
  out = run('block', num_queries=0)
  assert out.x.shape == (3, 0, 16)
  got = run('block', X[:, 1:3], MASK, keys_values=out.keys_values).x
  want = run('block', mask=MASK).x[:, 1:3]
  np.testing.assert_allclose(got, want, atol=1e-6)


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


BERT = plain.classifier()
BERT_PARAMS = plain.noise(BERT, *plain.BATCH)


@pytest.mark.parametrize(
  'fields',
  [
    {}, {'type_vocab_size': 0}, {'norm_epsilon': 0.1},
    {'pooler_activation': 'relu'},
  ],
)  # fmt: skip
def test_equals_plain_loop(fields):
  model = plain.classifier(**fields)
  params = plain.noise(model, *plain.BATCH)
  assert ('token_type' in params['embeddings']) != ('type_vocab_size' in fields)
  apply = jax.jit(model.apply)
  logits, out = apply({'params': params}, *plain.BATCH)
  # Pads are never read: an id out of range makes a NaN.
  pads = jnp.arange(5)[None] >= plain.LENGTH[:, None]
  for pad, pad_type in ((6, 1), (99, 0)):
    tokens = jnp.where(pads, pad, plain.TOKENS)
    types = jnp.where(pads, pad_type, plain.TYPES)
    other = apply({'params': params}, tokens, types, plain.LENGTH)
    jax.tree.map(np.testing.assert_array_equal, other, (logits, out))
  pool = np.tanh
  if 'pooler_activation' in fields:
    pool = functools.partial(np.maximum, 0.0)
  epsilon = fields.get('norm_epsilon', 1e-12)
  for row, length in enumerate(plain.LENGTH):
    tokens, types = (
      np.asarray(x[row, :length]) for x in (plain.TOKENS, plain.TYPES)
    )
    want = plain.classifier_by_loop(params, tokens, types, epsilon, pool)
    np.testing.assert_allclose(logits[row], want, atol=1e-5)
  want = plain.dense(params['head'], np.asarray(out['features']))
  np.testing.assert_allclose(logits, want, atol=1e-5)


@pytest.mark.parametrize(
  ('tokens', 'types', 'bad_rows'),
  [
    (plain.TOKENS.at[0, 2].set(11), plain.TYPES, [True, False, False]),
    (plain.TOKENS.at[0, 2].set(-1), plain.TYPES, [True, False, False]),
    (plain.TOKENS, 2 * plain.TYPES, [True, True, False]),
  ],
)
def test_ids_out_of_range_give_nan(tokens, types, bad_rows):
  logits, _ = BERT.apply({'params': BERT_PARAMS}, tokens, types, plain.LENGTH)
  bad = np.array(bad_rows)
  assert np.isnan(logits[bad]).all()
  assert np.isfinite(logits[~bad]).all()


def test_a_sequence_that_is_too_long_names_the_field():
  model = plain.classifier(max_positions=4)
  with pytest.raises(ValueError, match=r'max_positions: expected.*5.*got 4'):
    model.init(jax.random.key(0), *plain.BATCH)


def test_no_use_of_dropout_shares_its_noise(monkeypatch):
  keys_used = []

  def drop(x, rate, row_keys, use):
    if rate and row_keys is not None:
      folded = row_random.fold_rows(row_keys, use)
      keys_used.append(jax.random.key_data(folded).tobytes())
    return x

  monkeypatch.setattr(row_random, 'drop', drop)
  keys = jax.random.split(jax.random.key(2), 3)
  with jax.disable_jit():
    BERT.apply({'params': BERT_PARAMS}, *plain.BATCH, keys)
  # Embeddings; weights and two halves of each of two blocks; classifier.
  assert len(keys_used) == len(set(keys_used)) == 1 + 2 * 3 + 1


def test_initial_values_are_those_of_bert():
  model = plain.classifier(width=64, mlp_dim=128, vocab_size=300)
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *plain.BATCH))
  for path, leaf in jax.tree_util.tree_leaves_with_path(params['params']):
    name = path[-1].key
    if name in ('kernel', 'embedding'):
      # Truncated at two standard deviations of 0.02.
      assert float(jnp.abs(leaf).max()) <= 0.04
      if leaf.size > 3000:
        assert float(leaf.std()) == pytest.approx(0.0176, rel=0.05)
    else:
      assert (np.asarray(leaf) == (name == 'scale')).all()
