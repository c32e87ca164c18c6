"""Layers, tokens, ViT, noise per row and logical axes, by plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from model_lib import layers, logical, row_random, vit
from tests.model_lib import plain


def silu(x):
  return x / (1.0 + np.exp(-x))


FORMULAS = {
  'gelu': plain.gelu, 'gelu_python': plain.gelu, 'gelu_new': plain.gelu_new,
  'gelu_pytorch_tanh': plain.gelu_new, 'gelu_fast': plain.gelu_new,
  'relu': lambda x: np.maximum(x, 0.0), 'silu': silu, 'swish': silu,
  'tanh': np.tanh,
}  # fmt: skip


def test_every_activation_equals_its_formula():
  assert layers.ACTIVATIONS.keys() == FORMULAS.keys()
  x = np.linspace(-6, 6, 101)
  for name, formula in FORMULAS.items():
    got = layers.ACTIVATIONS[name](jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, formula(x), atol=1e-6, err_msg=name)
  # The two GELUs differ by more than the tolerance.
  assert np.abs(plain.gelu(x) - plain.gelu_new(x)).max() > 1e-4


@pytest.mark.parametrize(
  ('dtype', 'x'),
  [
    # E[x^2] - E[x]^2 in float32 would lose the variance here.
    ('float32', [[1000.0, 1000.5, 1001.0, 999.5]]),
    ('bfloat16', [[3.0625] + [3.0] * 511]),
  ],
)
def test_layer_norm_is_computed_in_float32(dtype, x):
  x, dtype = np.array(x), jnp.dtype(dtype)
  model = layers.LayerNorm(dtype)
  inputs = jnp.asarray(x, dtype)
  got = model.apply(model.init(jax.random.key(0), inputs), inputs)
  assert got.dtype == dtype
  want = plain.layer_norm({'scale': 1.0, 'bias': 0.0}, x)
  tolerance = 1e-5 if dtype == jnp.float32 else 0.01
  np.testing.assert_allclose(
    np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance
  )


@pytest.mark.parametrize('fields', [{'gated': True}, {'activation': 'relu'}])
def test_mlp_equals_formula(fields):
  x = plain.normal(2, 3, 6)
  model = layers.Mlp(mlp_dim=10, **fields)
  params = plain.noise(model, x)
  activation = FORMULAS[fields.get('activation', 'gelu')]
  want = plain.mlp(params, np.asarray(x, np.float64), activation)
  for some in (slice(None), 0):  # flat tokens, too
    got = model.apply({'params': params}, x[some])
    np.testing.assert_allclose(got, want[some], atol=1e-5)


def test_patches_are_cut_row_by_row():
  got = vit.patches(jnp.arange(24.0).reshape(1, 4, 6, 1), 2)
  want = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [12, 13, 18, 19]]
  np.testing.assert_array_equal(got[0, :4], want)
  with pytest.raises(ValueError, match='patch_size: expected a divisor'):
    vit.patches(jnp.ones((1, 8, 9, 3)), 3)


def test_illegal_widths_of_sines_are_named():
  for width in (2, 7):
    with pytest.raises(ValueError, match='width: expected an even number'):
      vit.sincos1d(np.zeros(1, 'f'), width)
  with pytest.raises(ValueError, match='width: expected a multiple of 4'):
    vit.sincos2d(2, 2, 10)


def test_masked_mean():
  x = jnp.array([[[1.0], [2.0], [9.0]], [[4.0], [jnp.nan], [6.0]], [[7.0]] * 3])
  mask = jnp.array([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
  got = layers.masked_mean(x, mask)
  np.testing.assert_array_equal(got, [[1.5], [5.0], [0.0]])
  np.testing.assert_array_equal(layers.masked_mean(x[:1]), [[4.0]])
  slopes = jax.grad(lambda x: layers.masked_mean(x, mask).sum())(x)
  want = np.array([[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0, 0]])
  np.testing.assert_array_equal(slopes[:, :, 0], want)


def test_learned_positions_add_one_vector_each():
  x, model = jnp.ones((2, 100, 100)), vit.LearnedPositions()
  added = model.apply(model.init(jax.random.key(1), x), x) - x
  np.testing.assert_allclose(added[0], added[1], atol=1e-6)
  assert abs(float(added.std()) - 0.02) < 0.001


TINY = {'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 4}
IMAGES = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))


def test_tokens_have_positions_and_a_class_token():
  tokens = jnp.array([[0, 1, 2, 0], [0, 2, 1, 0], [0, 1, 3, 2]])
  model = vit.TokenTransformer(num_classes=2, **TINY)
  variables = jax.jit(model.init)(jax.random.key(0), tokens)
  logits, out = jax.jit(model.apply)(variables, tokens)
  assert out['features'].shape == (3, 16)
  assert float(jnp.abs(logits[0] - logits[1]).max()) > 1e-6
  # A symbol outside the vocabulary is NaN.
  assert np.isnan(logits).all(1).tolist() == [False, False, True]
  cls = nn.unbox(variables)['params']['tokens']['cls']
  assert cls.shape == (1, 1, 16)
  assert 0.005 < float(cls.std()) < 0.05


KEYS = jax.random.split(jax.random.key(3), 6)


def test_noise_of_a_row_depends_on_its_key_alone():
  x = jnp.ones((6, 4, 5))
  whole = row_random.drop(x, 0.5, KEYS, 'a')
  halves = [row_random.drop(x[:3], 0.5, k, 'a') for k in (KEYS[:3], KEYS[3:])]
  np.testing.assert_array_equal(whole, jnp.concatenate(halves))
  assert row_random.drop(x, 0.5, None, 'a') is x
  assert row_random.drop(x, 0.0, KEYS, 'a') is x
  for rate in (-0.1, 1.0):
    with pytest.raises(ValueError, match='dropout: expected a rate'):
      row_random.drop(x, rate, KEYS, 'a')


def test_dropout_keeps_the_expectation_and_the_rate():
  got = row_random.drop(jnp.ones((6, 100, 50)), 0.2, KEYS, 'a')
  # 30,000 draws: the standard error of the mean is 0.003.
  assert abs(float(got.mean()) - 1.0) < 0.012
  np.testing.assert_allclose(np.unique(got), [0.0, 1.25], rtol=1e-6)


def test_uses_are_distinct_and_the_same_in_every_process():
  drawn = [
    float(jax.random.uniform(row_random.fold_rows(KEYS, use)[0]))
    for use in ('a', 'b', 0, jnp.asarray(1))
  ]
  assert len(set(drawn)) == 4
  # crc32('a'), not Python's hash, which differs between processes.
  same = jax.random.fold_in(KEYS[0], 0xE8B7BE43)
  assert drawn[0] == float(jax.random.uniform(same))


def test_wrong_names_are_refused():
  with pytest.raises(ValueError, match=r"logical axis: expected.*'embedd'"):
    logical.partitioned(nn.initializers.zeros, 'embedd')
  for names, message in (
    (['bach', None], r"logical axis: expected.*'bach'"),
    (['batch'], 'names: expected one per dimension'),
  ):
    with pytest.raises(ValueError, match=message):
      logical.constrain(jnp.zeros((2, 2)), *names)


def test_is_the_identity_without_mesh_or_rules(mesh):
  x = jnp.ones((8, 2))
  assert logical.constrain(x, 'batch', None) is x


def test_every_parameter_is_named():
  model = vit.ViT(num_classes=4, patch_size=4, **TINY)
  shapes = jax.eval_shape(model.init, jax.random.key(1), IMAGES)
  boxed = jax.tree.leaves(
    shapes, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
  )
  assert all(isinstance(leaf, nn.LogicallyPartitioned) for leaf in boxed)
  assert all(len(leaf.names) == leaf.value.ndim <= 3 for leaf in boxed)
