"""BERT against a plain NumPy forward pass; what padding may not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from model_lib import row_random
from tests.model_lib import plain

MODEL = plain.classifier()
PARAMS = plain.noise(MODEL, *plain.BATCH)


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
  logits, _ = MODEL.apply({'params': PARAMS}, tokens, types, plain.LENGTH)
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
    MODEL.apply({'params': PARAMS}, *plain.BATCH, keys)
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
