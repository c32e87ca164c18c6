"""The parity model: what it reads. That it learns: end_to_end_test.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from adatape.parity import ParityModel


def test_equal_and_shuffled_symbols():
  model = ParityModel(2, max_steps=4, threshold=2.0)
  symbols = jax.random.randint(jax.random.key(0), (32, 8), 0, 3)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), symbols))
  apply = jax.jit(model.apply)
  logits, out = apply(variables, symbols)
  shuffled, _ = apply(variables, symbols[:, ::-1])
  np.testing.assert_allclose(logits, shuffled, atol=1e-5)
  assert out['tape']['indices'].shape == (32, 4, 2)
  assert out['tape']['length'].min() >= 2
  # Equal weights: a halting score of 1/2 per step, so that all steps run.
  _, out = apply(variables, jnp.ones((1, 8), jnp.int32))
  assert out['tape']['length'] == 4
  np.testing.assert_allclose(out['tape']['loss'], 4 * 0.5, atol=1e-6)
  assert 0 < model.flops((8,), tape_length=2.5) < model.flops((8,))
  assert model.flops((8,)) == model.flops((8,), tape_length=4)
