"""BERT against a plain NumPy forward pass; what padding may not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from model_lib import bert, flops, row_random, sizes
from tests.model_lib.plain_bert import (
  BATCH,
  LENGTH,
  TOKENS,
  TYPES,
  classifier,
  classifier_by_loop,
  dense,
  noise,
)


@pytest.mark.parametrize(
  'fields', [{}, {'type_vocab_size': 0}, {'norm_epsilon': 0.1}]
)
@pytest.mark.parametrize('cls_only', [False, True])
def test_equals_plain_loop(fields, cls_only):
  model = classifier(cls_only=cls_only, **fields)
  params = noise(model, *BATCH)
  logits, _ = jax.jit(model.apply)({'params': params}, *BATCH)
  for row, length in enumerate(LENGTH):
    want = classifier_by_loop(
      params,
      np.asarray(TOKENS[row, :length]),
      np.asarray(TYPES[row, :length]),
      fields.get('norm_epsilon', 1e-12),
    )
    np.testing.assert_allclose(logits[row], want, atol=1e-5)


def test_names_and_shapes_of_the_parameters():
  params = noise(classifier(depth=1), *BATCH)
  shapes = {
    '/'.join(key.key for key in path): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  square, vector = {'kernel': (16, 16), 'bias': (16,)}, (16,)
  expected = {
    'embeddings/word/embedding': (11, 16),
    'embeddings/position/embedding': (6, 16),
    'embeddings/token_type/embedding': (2, 16),
    'block_0/mlp/hidden/kernel': (16, 24),
    'block_0/mlp/hidden/bias': (24,),
    'block_0/mlp/out/kernel': (24, 16),
    'block_0/mlp/out/bias': vector,
    'head/kernel': (16, 3),
    'head/bias': (3,),
  }
  for norm in ('embeddings/norm', 'block_0/attention_norm', 'block_0/mlp_norm'):
    expected |= {f'{norm}/scale': vector, f'{norm}/bias': vector}
  attention = [
    f'block_0/attention/{n}' for n in ('query', 'key', 'value', 'out')
  ]
  for name in ('pooler', *attention):
    expected |= {f'{name}/{leaf}': shape for leaf, shape in square.items()}
  assert shapes == expected


def test_without_token_types_there_is_no_table_for_them():
  params = noise(classifier(type_vocab_size=0), *BATCH)
  assert 'token_type' not in params['embeddings']


@pytest.mark.parametrize('cls_only', [False, True])
def test_padding_does_not_matter(cls_only):
  model = classifier(cls_only=cls_only)
  params = {'params': noise(model, *BATCH)}
  apply = jax.jit(model.apply)
  want = apply(params, *BATCH)
  pads = jnp.arange(5)[None] >= LENGTH[:, None]
  other = apply(
    params, jnp.where(pads, 6, TOKENS), jnp.where(pads, 1, TYPES), LENGTH
  )
  jax.tree.map(np.testing.assert_array_equal, other, want)
  # An id out of range makes a NaN, which nobody may read either.
  bad = apply(params, jnp.where(pads, 99, TOKENS), TYPES, LENGTH)
  jax.tree.map(np.testing.assert_array_equal, bad, want)
  longer = apply(
    params, jnp.pad(TOKENS, ((0, 0), (0, 1))), jnp.pad(TYPES, ((0, 0), (0, 1))),
    LENGTH,
  )  # fmt: skip
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), longer, want
  )
  alone = apply(params, TOKENS[1:2, :3], TYPES[1:2, :3], LENGTH[1:2])
  np.testing.assert_allclose(alone[0], want[0][1:2], atol=1e-5)


@pytest.mark.parametrize('token', [11, -1])
def test_a_token_outside_the_vocabulary_is_loud(token):
  model = classifier()
  params = {'params': noise(model, *BATCH)}
  tokens = TOKENS.at[0, 2].set(token)
  logits, _ = model.apply(params, tokens, TYPES, LENGTH)
  assert np.isnan(logits[0]).all()
  assert np.isfinite(logits[1:]).all()


def test_a_token_type_that_does_not_exist_is_loud():
  model = classifier(type_vocab_size=1)
  params = {'params': noise(model, *BATCH)}
  logits, _ = model.apply(params, *BATCH)
  assert np.isnan(logits[:2]).all()
  assert np.isfinite(logits[2]).all()


def test_a_sequence_that_is_too_long_names_the_field():
  model = classifier(max_positions=4)
  with pytest.raises(ValueError, match=r'max_positions: expected.*5.*got 4'):
    model.init(jax.random.key(0), *BATCH)


RATES = ('dropout', 'attention_dropout', 'classifier_dropout')


@pytest.mark.nightly
@pytest.mark.parametrize('rate', RATES)
def test_dropout_belongs_to_the_row(rate):
  rates = dict.fromkeys(RATES, 0.0) | {rate: 0.3}
  model = classifier(**rates)
  params = {'params': noise(model, *BATCH)}
  apply = jax.jit(lambda t, y, n, keys: model.apply(params, t, y, n, keys)[0])
  keys = jax.random.split(jax.random.key(2), 3)
  whole = apply(TOKENS, TYPES, LENGTH, keys)
  clean = apply(TOKENS, TYPES, LENGTH, None)
  assert float(jnp.abs(whole - clean).max()) > 0.01
  order = jnp.array([2, 0, 1])
  moved = apply(TOKENS[order], TYPES[order], LENGTH[order], keys[order])
  np.testing.assert_allclose(moved, whole[order], atol=1e-6)
  other = apply(TOKENS, TYPES, LENGTH, jax.random.split(jax.random.key(3), 3))
  assert float(jnp.abs(other - whole).max()) > 0.01


def test_no_use_of_dropout_shares_its_noise(monkeypatch):
  keys_used = []

  def dropout(x, rate, row_keys):
    keys_used.append(jax.random.key_data(row_keys).tobytes())
    return x

  monkeypatch.setattr(row_random, 'dropout', dropout)
  model = classifier()
  params = {'params': noise(model, *BATCH)}
  keys = jax.random.split(jax.random.key(2), 3)
  with jax.disable_jit():
    model.apply(params, *BATCH, keys)
  # Embeddings; weights and two halves of each of two blocks; classifier.
  assert len(keys_used) == len(set(keys_used)) == 1 + 2 * 3 + 1


def test_bfloat16_is_close_and_keeps_float32_parameters_and_logits():
  params = noise(classifier(), *BATCH)
  model = classifier(dtype=jnp.bfloat16)
  fresh = jax.eval_shape(model.init, jax.random.key(0), *BATCH)
  assert {leaf.dtype for leaf in jax.tree.leaves(fresh)} == {
    jnp.dtype('float32')
  }
  got, out = model.apply({'params': params}, *BATCH)
  assert got.dtype == out['features'].dtype == jnp.float32
  want, _ = classifier().apply({'params': params}, *BATCH)
  np.testing.assert_allclose(got, want, atol=0.15)
  assert float(jnp.abs(got - want).max()) > 1e-5


def test_initial_values_are_those_of_bert():
  model = classifier(width=64, mlp_dim=128, vocab_size=300)
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *BATCH))
  for path, leaf in jax.tree_util.tree_leaves_with_path(params['params']):
    name = path[-1].key
    if name in ('kernel', 'embedding'):
      # Truncated at two standard deviations of 0.02.
      assert float(jnp.abs(leaf).max()) <= 0.04
      if leaf.size > 3000:
        assert float(leaf.std()) == pytest.approx(0.0176, rel=0.05)
    else:
      assert (np.asarray(leaf) == (name == 'scale')).all()


def test_features_are_what_the_head_reads():
  model = classifier()
  params = noise(model, *BATCH)
  logits, out = model.apply({'params': params}, *BATCH)
  assert out['features'].shape == (3, 16)
  want = dense(params['head'], np.asarray(out['features']))
  np.testing.assert_allclose(logits, want, atol=1e-5)


@pytest.mark.parametrize(
  ('variant', 'millions'),
  [
    # Devlin et al. 2019 (110 M, 340 M), Sanh et al. 2019 (66 M), Turc et al.
    # 2019 (4.4, 11.3, 29.1, 41.7 M), MiniLM (22.7 M), all without a head.
    ('base', 109.5), ('large', 335.1), ('distil', 66.4), ('tiny', 4.4),
    ('mini', 11.2), ('small', 28.8), ('medium', 41.4), ('minilm', 22.7),
  ],
)  # fmt: skip
def test_parameter_counts_of_the_literature(variant, millions):
  fields = sizes.BERT.defaults | sizes.BERT.fields(variant)
  model = bert.BertClassifier(num_classes=2, **fields)
  params = jax.eval_shape(model.init, jax.random.key(0), *BATCH)
  params = params['params']
  del params['head']
  if variant == 'distil':
    del params['pooler']
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert count / 1e6 == pytest.approx(millions, abs=0.06)


def test_unknown_variant():
  with pytest.raises(ValueError, match=r"variant: expected one of.*'huge'"):
    sizes.BERT.fields('huge')


def test_explicit_sizes_override_the_variant():
  model = bert.BertClassifier(num_classes=2, variant='base', depth=6)
  got = (model.width, model.depth, model.mlp_dim, model.num_heads)
  assert got == (768, 6, 3072, 12)
  assert model.clone(depth=3).width == 768


@pytest.mark.parametrize('given', [{}, {'num_heads': -1}])
def test_missing_size_names_the_field(given):
  others = {'width': 8, 'depth': 1, 'mlp_dim': 8}
  with pytest.raises(ValueError, match='num_heads: expected a positive'):
    bert.BertClassifier(num_classes=2, **others, **given)


def test_a_variant_does_not_share_its_table():
  sizes.BERT.fields('base')['width'] = 0
  assert (
    sizes.BERT.defaults['width'] == sizes.BERT.fields('base')['width'] == 768
  )


@pytest.mark.parametrize('cls_only', [False, True])
def test_flops_agree_with_the_compiler(cls_only):
  sizes = {'width': 256, 'depth': 3, 'mlp_dim': 1024, 'num_heads': 4}
  model = classifier(cls_only=cls_only, max_positions=32, **sizes)
  tokens, length = jnp.zeros((1, 24), jnp.int32), jnp.full(1, 24)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens, length)
  lowered = jax.jit(model.apply).lower(params, tokens, tokens, length)
  got = lowered.cost_analysis()['flops']
  assert model.flops((24,)) == pytest.approx(got, rel=0.03)


def test_cls_alone_saves_about_five_sixths_of_a_block():
  share = flops.cls_block(128, 768, 3072) / flops.block(128, 768, 3072)
  assert share == pytest.approx(1 / 6, abs=0.01)


def test_gradient_reaches_every_parameter():
  model = classifier()
  params = noise(model, *BATCH)

  def loss(params):
    logits, _ = model.apply({'params': params}, *BATCH)
    return jnp.square(logits).sum()

  gradient = jax.jit(jax.grad(loss))(params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    assert bool(jnp.isfinite(leaf).all())
    # A bias of the keys shifts all scores of a query alike.
    if [key.key for key in path[-2:]] != ['key', 'bias']:
      assert float(jnp.abs(leaf).max()) > 1e-6, path
  words = np.asarray(gradient['embeddings']['word']['embedding'])
  assert (np.abs(words).max(1) > 0).tolist() == [
    index in (1, 2, 3, 4, 5, 7, 9) for index in range(11)
  ]
