"""Layers against formulas written plainly in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from model_lib import bert_layers, layers, tokens
from model_lib.attention import MultiHeadAttention


def noise(module, *inputs):
  """Parameters of the module, biases and scales too, drawn at random."""
  generator = np.random.default_rng(5)
  params = jax.eval_shape(module.init, jax.random.key(0), *inputs)['params']
  return jax.tree.map(
    lambda leaf: 0.4 * generator.normal(size=leaf.shape).astype(np.float32),
    nn.unbox(params),
  )


def normal(*shape):
  values = np.random.default_rng(0).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def gelu(x):
  return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def dense(params, x):
  return x @ np.asarray(params['kernel'], np.float64) + np.asarray(
    params['bias']
  )


def layer_norm(params, x):
  mean = x.mean(-1, keepdims=True)
  deviation = np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
  normed = (x - mean) / deviation
  return normed * np.asarray(params['scale']) + np.asarray(params['bias'])


def mlp(params, x):
  hidden = gelu(dense(params['hidden'], x))
  if 'gated' in params:
    hidden = hidden * dense(params['gated'], x)
  return dense(params['out'], hidden)


def test_gelu_is_exact():
  x = np.linspace(-6, 6, 101)
  np.testing.assert_allclose(
    layers.gelu(jnp.asarray(x, jnp.float32)), gelu(x), atol=1e-6
  )


def test_layer_norm_is_stable_for_a_large_mean():
  # E[x^2] - E[x]^2 in float32 would lose the variance here.
  x = np.array([[1000.0, 1000.5, 1001.0, 999.5]])
  model = layers.LayerNorm()
  params = model.init(jax.random.key(0), jnp.asarray(x, jnp.float32))
  got = model.apply(params, jnp.asarray(x, jnp.float32))
  want = layer_norm({'scale': np.ones(4), 'bias': np.zeros(4)}, x)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_layer_norm_of_bfloat16_is_computed_in_float32():
  x = jnp.full((1, 512), 3.0, jnp.bfloat16).at[0, 0].set(3.0625)
  model = layers.LayerNorm(dtype=jnp.bfloat16)
  got = model.apply(model.init(jax.random.key(0), x), x)
  assert got.dtype == jnp.bfloat16
  want = layer_norm(
    {'scale': np.ones(512), 'bias': np.zeros(512)}, np.asarray(x, np.float64)
  )
  np.testing.assert_allclose(
    got.astype(jnp.float32), want, rtol=0.01, atol=0.01
  )


@pytest.mark.parametrize('gated', [False, True])
def test_mlp_equals_formula(gated):
  x = normal(2, 3, 6)
  model = layers.Mlp(mlp_dim=10, gated=gated)
  params = noise(model, x)
  want = mlp(params, np.asarray(x, np.float64))
  np.testing.assert_allclose(
    model.apply({'params': params}, x), want, atol=1e-5
  )


def test_mlp_of_tokens_that_stand_in_no_rows():
  x = normal(2, 3, 6)
  model = layers.Mlp(mlp_dim=10, dropout=0.5)
  variables = {'params': noise(model, x)}
  np.testing.assert_allclose(
    model.apply(variables, x[0]), model.apply(variables, x)[0], atol=1e-6
  )
  with pytest.raises(ValueError, match='row_keys: expected None'):
    model.apply(variables, x[0], jax.random.split(jax.random.key(0), 3))


def gelu_tanh(x):
  return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


FORMULAS = {
  'gelu': gelu,
  'gelu_python': gelu,
  'gelu_new': gelu_tanh,
  'gelu_pytorch_tanh': gelu_tanh,
  'gelu_fast': gelu_tanh,
  'relu': lambda x: np.maximum(x, 0.0),
  'silu': lambda x: x / (1.0 + np.exp(-x)),
  'swish': lambda x: x / (1.0 + np.exp(-x)),
  'tanh': np.tanh,
}


def test_every_activation_equals_its_formula():
  assert layers.ACTIVATIONS.keys() == FORMULAS.keys()
  x = np.linspace(-6, 6, 101)
  for name, formula in FORMULAS.items():
    got = layers.activation_function(name)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, formula(x), atol=1e-6, err_msg=name)
  # The two GELUs differ by more than the tolerance.
  assert np.abs(gelu(x) - gelu_tanh(x)).max() > 1e-4


def test_mlp_uses_its_activation():
  x = normal(2, 3, 6)
  model = layers.Mlp(mlp_dim=10, activation='relu')
  params = noise(model, x)
  hidden = np.maximum(dense(params['hidden'], np.asarray(x, np.float64)), 0.0)
  np.testing.assert_allclose(
    model.apply({'params': params}, x), dense(params['out'], hidden), atol=1e-5
  )


def test_unknown_activation_names_the_field():
  with pytest.raises(ValueError, match=r"activation: expected one of.*'gleu'"):
    layers.Mlp(mlp_dim=10, activation='gleu').init(
      jax.random.key(0), normal(2, 3, 6)
    )


def test_embedding_looks_up_and_is_nan_outside():
  model = bert_layers.Embedding(5, 3)
  indices = jnp.array([[0, 4, 2], [5, -1, 1]])
  table = noise(model, indices)['embedding']
  got = np.asarray(model.apply({'params': {'embedding': table}}, indices))
  np.testing.assert_array_equal(got[0], table[[0, 4, 2]])
  assert np.isnan(got[1, :2]).all()
  np.testing.assert_array_equal(got[1, 2], table[1])


@pytest.mark.parametrize('activation', ['tanh', 'relu'])
def test_pooler_equals_formula(activation):
  cls = normal(3, 6)
  model = bert_layers.Pooler(activation)
  params = noise(model, cls)
  assert set(params) == {'kernel', 'bias'}
  want = FORMULAS[activation](dense(params, np.asarray(cls, np.float64)))
  np.testing.assert_allclose(
    model.apply({'params': params}, cls), want, atol=1e-5
  )


def test_pooler_of_unknown_activation_names_the_field():
  with pytest.raises(ValueError, match='pooler_activation: expected one of'):
    bert_layers.Pooler('none').init(jax.random.key(0), normal(3, 6))


@pytest.mark.parametrize('tape_mlp', ['', 'mlp', 'glu'])
def test_block_equals_formula(tape_mlp):
  x = normal(2, 5, 8)
  mask = jnp.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
  block = layers.EncoderBlock(num_heads=2, mlp_dim=12, tape_mlp=tape_mlp)
  params = noise(block, x)
  got = jax.jit(block.apply, static_argnums=4)(
    {'params': params}, x, mask, None, 3
  )
  rows = np.asarray(x, np.float64)
  normed = layer_norm(params['attention_norm'], rows)
  attended = (
    MultiHeadAttention(num_heads=2)
    .apply(
      {'params': params['attention']}, jnp.asarray(normed, jnp.float32), mask
    )
    .x
  )
  rows = rows + np.asarray(attended, np.float64)
  normed = layer_norm(params['mlp_norm'], rows)
  tape = params['tape_mlp' if tape_mlp else 'mlp']
  rows[:, :3] += mlp(params['mlp'], normed[:, :3])
  rows[:, 3:] += mlp(tape, normed[:, 3:])
  np.testing.assert_allclose(got, rows, atol=2e-5)


def test_tape_network_exists_without_tape_tokens():
  block = layers.EncoderBlock(num_heads=2, mlp_dim=12, tape_mlp='glu')
  x = jnp.ones((1, 3, 8))
  params = block.init(jax.random.key(0), x)['params']
  assert set(params['tape_mlp']) == {'hidden', 'gated', 'out'}
  got = block.apply({'params': params}, x, None, None, 3)
  np.testing.assert_array_equal(got, block.apply({'params': params}, x))


def test_block_of_unknown_tape_network_names_the_field():
  block = layers.EncoderBlock(num_heads=2, mlp_dim=12, tape_mlp='gelu')
  with pytest.raises(ValueError, match=r"tape_mlp: expected one of.*'gelu'"):
    block.init(jax.random.key(0), jnp.ones((1, 3, 8)))


def test_block_rows_and_noise_do_not_depend_on_the_batch():
  block = layers.EncoderBlock(
    num_heads=2, mlp_dim=12, dropout=0.3, tape_mlp='mlp'
  )
  x = normal(4, 5, 8)
  keys = jax.random.split(jax.random.key(2), 4)
  params = {'params': noise(block, x)}
  apply = jax.jit(block.apply, static_argnums=4)
  whole = apply(params, x, None, keys, 3)
  part = apply(params, x[2:3], None, keys[2:3], 3)
  np.testing.assert_allclose(whole[2:3], part, atol=1e-6)
  order = jnp.array([2, 0, 3, 1])
  moved = apply(params, x[order], None, keys[order], 3)
  np.testing.assert_allclose(moved, whole[order], atol=1e-6)
  assert float(jnp.abs(whole - apply(params, x, None, None, 3)).max()) > 0.1


def test_patch_embedding_equals_convolution():
  images = normal(2, 8, 12, 3)
  model = tokens.PatchEmbed(width=5, patch_size=4)
  kernel = normal(4, 4, 3, 5)
  bias = jnp.arange(5.0)
  params = {'projection': {'kernel': kernel.reshape(-1, 5), 'bias': bias}}
  got = model.apply({'params': params}, images)
  want = lax.conv_general_dilated(
    images, kernel, (4, 4), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  ).reshape(2, 6, 5)
  np.testing.assert_allclose(got, want + bias[None, None], atol=1e-4)


def test_patches_are_cut_row_by_row():
  image = jnp.arange(16.0).reshape(1, 4, 4, 1)
  got = tokens.patches(image, 2)
  want = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
  np.testing.assert_array_equal(got[0], want)


def test_patch_size_must_divide_the_image():
  with pytest.raises(
    ValueError, match=r'patch_size: expected a divisor.*got 3'
  ):
    tokens.patches(jnp.ones((1, 8, 9, 3)), 3)


def test_masked_mean():
  x = jnp.array([[[1.0], [2.0], [9.0]], [[4.0], [jnp.nan], [6.0]], [[7.0]] * 3])
  mask = jnp.array([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
  np.testing.assert_array_equal(
    layers.masked_mean(x, mask), [[1.5], [5.0], [0.0]]
  )
  np.testing.assert_array_equal(layers.masked_mean(x[:1]), [[4.0]])


def test_masked_mean_has_a_finite_gradient():
  x = jnp.ones((2, 3, 2))
  mask = jnp.array([[1, 1, 0], [0, 0, 0]])
  gradient = jax.grad(lambda x: layers.masked_mean(x, mask).sum())(x)
  want = np.zeros((2, 3, 2))
  want[0, :2] = 0.5
  np.testing.assert_array_equal(gradient, want)
