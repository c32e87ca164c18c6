"""Products with transposed kernels against NumPy, whatever the form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from albert_act import compaction, transposed_kernels
from model_lib.layers import Mlp
from tests.eat import small


def arrays(*shapes):
  rng = np.random.default_rng(0)
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
  'shape',
  [(0,), (1,), (5,), (8,), (24,), (32,), (64,), (65,), (128,), (2, 8), (3, 0),
   (2, 65)],
)  # fmt: skip
def test_product_against_numpy(shape):
  x, kernel = arrays((*shape, 6), (10, 6))
  out = jax.jit(transposed_kernels.product)(x, kernel)
  assert out.shape == (*shape, 10)
  np.testing.assert_allclose(out, x @ kernel.T, atol=1e-5)


@pytest.mark.parametrize(
  ('count', 'result'), [(8, 'f32[48,8]'), (9, 'f32[9,48]')]
)
def test_the_kernel_is_the_left_factor_for_few_tokens(count, result):
  # What the form is for is lost without a sign if XLA swaps the factors.
  x, kernel = arrays((count, 16), (48, 16))
  compiled = (
    jax.jit(transposed_kernels.product).lower(x, kernel).compile().as_text()
  )
  dots = [line for line in compiled.splitlines() if ' dot(' in line]
  assert len(dots) == 1
  assert f' = {result}' in dots[0]
  assert set(compaction.FEW_TOKENS) <= set(transposed_kernels.KERNEL_LEFT)


def mlp(x, width=12, **options):
  """(module, its parameters, those with transposed kernels)."""
  module = Mlp(width, **options)
  params = small.randomised(module.init(jax.random.key(0), x))['params']
  own = transposed_kernels.transpose({'block_0': params, 'pooler': params})
  jax.tree.map(np.testing.assert_array_equal, own['pooler'], params)
  assert own['block_0']['hidden']['kernel'].shape == (width, x.shape[-1])
  return module, {'params': params}, {'params': own['block_0']}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('length', [4, 9])
def test_a_module_with_transposed_kernels_equals_flax(length, dtype):
  x = jnp.asarray(arrays((2, length, 6))[0])
  module, params, own = mlp(x, dtype=jnp.dtype(dtype))
  want = module.apply(params, x)
  got = transposed_kernels.apply(module, own, x)
  assert got.dtype == want.dtype
  tolerance = 1e-5 if dtype == 'float32' else 0.05
  np.testing.assert_allclose(
    got.astype(np.float32), want.astype(np.float32), atol=tolerance
  )


def test_a_layer_without_bias_and_with_named_axes():
  x = jnp.asarray(arrays((8, 6))[0])
  init = nn.with_partitioning(nn.initializers.normal(), ('embed', 'mlp'))
  module = nn.Dense(12, use_bias=False, kernel_init=init)
  boxed = module.init(jax.random.key(0), x)['params']
  own = transposed_kernels.transpose({'block_0': boxed})['block_0']
  np.testing.assert_allclose(
    transposed_kernels.apply(module, {'params': own}, x),
    module.apply({'params': boxed}, x),
    atol=1e-5,
  )


def test_dropout_is_refused():
  x = jnp.zeros((2, 4, 6))
  module, _, own = mlp(x)
  keys = jax.random.split(jax.random.key(0), 2)
  with pytest.raises(ValueError, match='row_keys: expected None'):
    transposed_kernels.apply(module, own, x, keys)
