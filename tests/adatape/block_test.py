"""The block of a tape equals its formula; also its FLOPs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.block import TapeBlock, block_flops
from tests.model_lib import plain


@pytest.mark.parametrize('tape_mlp', ['', 'mlp', 'glu'])
def test_block_equals_formula(tape_mlp):
  x = plain.normal(2, 5, 8)
  mask = jnp.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
  block = TapeBlock(num_heads=2, mlp_dim=12, tape_mlp=tape_mlp)
  params = plain.noise(block, x)
  got = block.apply({'params': params}, x, mask, None, num_input_tokens=3)
  params = plain.float64(params)
  for row in range(2):
    want = np.asarray(x[row], np.float64)
    normed = plain.layer_norm(params['attention_norm'], want)
    valid = np.asarray(mask[row]) > 0
    want += plain.attention_by_loop(params['attention'], normed, 2, valid)[0]
    normed = plain.layer_norm(params['mlp_norm'], want)
    tape = params['tape_mlp' if tape_mlp else 'mlp']
    want[:3] += plain.mlp(params['mlp'], normed[:3])
    want[3:] += plain.mlp(tape, normed[3:])
    np.testing.assert_allclose(got[row], want, atol=2e-5)


@pytest.mark.parametrize('tape_mlp', ['', 'mlp', 'glu'])
def test_flops_of_a_block_agree_with_the_compiler(tape_mlp):
  block = TapeBlock(num_heads=2, mlp_dim=1024, tape_mlp=tape_mlp)
  x = jnp.zeros((1, 20, 256))
  params = jax.eval_shape(block.init, jax.random.key(0), x)
  apply = jax.jit(lambda p, x: block.apply(p, x, num_input_tokens=12))
  got = apply.lower(params, x).cost_analysis()['flops']
  want = block_flops(12, 256, 1024, 8, tape_mlp)
  assert want == pytest.approx(got, rel=0.03)


def test_an_illegal_network_is_named():
  block = TapeBlock(num_heads=2, mlp_dim=12, tape_mlp='gelu')
  with pytest.raises(ValueError, match=r"tape_mlp: expected one of.*'gelu'"):
    block.init(jax.random.key(0), jnp.ones((1, 3, 8)))
