"""ViT and the plain Transformer: sizes, dtypes, invariances, learning."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from dataset_lib import fields
from dataset_lib.errors import ConfigError
from model_lib import sizes, vit

TINY = {'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 4}


def image_model(**fields):
  return vit.ViT(num_classes=3, patch_size=4, **(TINY | fields))


def count(model, shape):
  params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape)))
  return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
  ('variant', 'millions'),
  [('Ti/16', 5.7), ('S/16', 22.0), ('B/16', 86.6), ('L/16', 304.3)],
)
def test_parameter_counts_of_the_literature(variant, millions):
  model = vit.ViT(num_classes=1000, variant=variant)
  got = count(model, (224, 224, 3)) / 1e6
  assert got == pytest.approx(millions, abs=0.06)


def test_parameter_count_of_vit_b28_on_jft():
  # AdaTape, Table 7: 100.9 M with 18,291 classes.
  model = vit.ViT(num_classes=18291, variant='B/28')
  assert count(model, (224, 224, 3)) / 1e6 == pytest.approx(100.9, abs=0.1)


def test_decode_variant():
  got = sizes.VIT.fields('B/14')
  assert got == {
    'width': 768,
    'depth': 12,
    'mlp_dim': 3072,
    'num_heads': 12,
    'patch_size': 14,
  }
  assert 'patch_size' not in sizes.VIT.fields('Ti')


@pytest.mark.parametrize('variant', ['H/14', 'B/0', 'B/', 'B16', '', 'b/16'])
def test_unknown_variant(variant):
  with pytest.raises(ValueError, match='variant: expected one of'):
    sizes.VIT.fields(variant)


def test_explicit_sizes_override_the_variant():
  model = vit.ViT(10, 'Ti/16', depth=3, patch_size=8)
  got = (model.width, model.depth, model.mlp_dim, model.num_heads)
  assert (*got, model.patch_size) == (192, 3, 768, 3, 8)


def test_missing_size_names_the_field():
  with pytest.raises(ValueError, match='patch_size: expected a positive'):
    vit.ViT(10, 'Ti')


@pytest.mark.parametrize('field', ['pool', 'positions'])
def test_unknown_option_names_the_field(field):
  given = TINY | {field: 'none'}
  with pytest.raises(ConfigError, match=f"{field}: expected one of.*'none'"):
    fields.check(vit.ViT, given, 'model', without=('num_classes', 'dtype'))


@pytest.mark.nightly
@pytest.mark.parametrize('pool', ['cls', 'gap'])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_logits_and_parameters_are_float32(pool, dtype):
  model = image_model(pool=pool, dtype=dtype, positions='sincos2d')
  images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
  params = jax.jit(model.init)(jax.random.key(1), images)
  logits, out = jax.jit(model.apply)(params, images)
  assert logits.dtype == out['features'].dtype == jnp.float32
  assert out['features'].shape == (2, 16)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
    jnp.dtype('float32')
  }
  want = image_model(pool=pool, positions='sincos2d').apply(params, images)[0]
  np.testing.assert_allclose(logits, want, atol=0.02)


@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_logits_are_the_head_of_the_features(pool):
  model = image_model(pool=pool)
  images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), images))
  logits, out = jax.jit(model.apply)(variables, images)
  head = jax.tree.map(np.asarray, variables['params']['head'])
  want = np.asarray(out['features']) @ head['kernel'] + head['bias']
  np.testing.assert_allclose(logits, want, atol=1e-5)
  assert float(jnp.abs(logits).max()) > 0


@pytest.mark.parametrize('noise', [False, True])
def test_rows_do_not_depend_on_the_batch(noise):
  model = image_model(dropout=0.2, depth=1)
  images = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
  keys = jax.random.split(jax.random.key(2), 4) if noise else None
  params = jax.jit(model.init)(jax.random.key(1), images)
  whole = jax.jit(model.apply)(params, images, keys)[0]
  order = jnp.array([3, 1, 0, 2])
  moved = jax.jit(model.apply)(
    params, images[order], keys[order] if noise else None
  )[0]
  np.testing.assert_allclose(moved, whole[order], atol=1e-5)
  one = jax.jit(model.apply)(params, images[1:2], keys[1:2] if noise else None)[
    0
  ]
  np.testing.assert_allclose(one, whole[1:2], atol=1e-5)
  other = jax.jit(model.apply)(
    params, images, jax.random.split(jax.random.key(9), 4)
  )[0]
  assert float(jnp.abs(other - whole).max()) > 1e-3


def token_model(**fields):
  return vit.TokenTransformer(num_classes=2, **(TINY | fields))


def test_tokens_have_positions_and_a_class_token():
  model = token_model()
  tokens = jnp.array([[0, 1, 2, 0], [0, 2, 1, 0]])
  variables = jax.jit(model.init)(jax.random.key(0), tokens)
  logits, out = jax.jit(model.apply)(variables, tokens)
  assert out['features'].shape == (2, 16)
  assert float(jnp.abs(logits[0] - logits[1]).max()) > 1e-6
  cls = nn.unbox(variables)['params']['tokens']['cls']
  assert cls.shape == (1, 1, 16)
  assert 0.005 < float(cls.std()) < 0.05


def test_symbol_outside_the_vocabulary_is_loud():
  model = token_model()
  variables = jax.jit(model.init)(
    jax.random.key(0), jnp.zeros((1, 4), jnp.int32)
  )
  logits, _ = jax.jit(model.apply)(variables, jnp.array([[0, 1, 3, 2]]))
  assert bool(jnp.isnan(logits).all())


@pytest.mark.slow
def test_learns_the_parity_of_two_symbols():
  tokens = np.stack(np.meshgrid(*[range(3)] * 2), -1).reshape(-1, 2)
  labels = jnp.asarray((tokens == 0).sum(1) % 2)
  tokens = jnp.asarray(tokens, jnp.int32)
  model = token_model()
  params = jax.jit(model.init)(jax.random.key(0), tokens)

  def loss(params):
    logits = model.apply(params, tokens)[0]
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, labels
    ).mean()

  @jax.jit
  def train(params, trace):
    trace = jax.tree.map(
      lambda t, g: 0.9 * t + g, trace, jax.grad(loss)(params)
    )
    return jax.tree.map(lambda p, t: p - 0.05 * t, params, trace), trace

  trace = jax.tree.map(jnp.zeros_like, params)
  for _ in range(200):
    params, trace = train(params, trace)
  assert float(loss(params)) < 0.05
