"""The parity model: what it reads. That it learns: end_to_end_test.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from adatape.parity import ParityModel


def build(length):
  model = ParityModel(2, max_steps=length // 2, threshold=length / 4)
  symbols = jax.random.randint(jax.random.key(0), (32, length), 0, 3)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), symbols))
  return model, variables, symbols


def test_order_of_the_symbols_does_not_matter():
  model, variables, symbols = build(8)
  apply = jax.jit(model.apply)
  logits, out = apply(variables, symbols)
  shuffled, _ = apply(variables, symbols[:, ::-1])
  np.testing.assert_allclose(logits, shuffled, atol=1e-5)
  assert logits.shape == (32, 2)
  assert out['tape']['indices'].shape == (32, 4, 2)
  assert out['tape']['length'].min() >= 2


def test_equal_symbols_are_merged_with_equal_weights():
  # Halting score 1/2 per step: all N / 2 steps run.
  model, variables, _ = build(8)
  assert 0 < model.flops((8,), tape_length=2.5) < model.flops((8,))
  assert model.flops((8,)) == model.flops((8,), tape_length=4)
  _, out = jax.jit(model.apply)(variables, jnp.ones((1, 8), jnp.int32))
  assert out['tape']['length'] == 4
  np.testing.assert_allclose(out['tape']['loss'], 4 * 0.5, atol=1e-6)
