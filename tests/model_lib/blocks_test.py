"""Blocks that are scanned, or computed again, against the plain loop."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import blocks
from model_lib.vit import Encoder

CHOICES = [
  blocks.Options(scan, remat)
  for scan in (False, True)
  for remat in ('none', 'dots', 'full')
]
X = jax.random.normal(jax.random.key(0), (3, 5, 8))
KEYS = jax.random.split(jax.random.key(1), 3)
ENCODER = Encoder(depth=4, num_heads=2, mlp_dim=16, dropout=0.3)
VARIABLES = nn.unbox(ENCODER.init(jax.random.key(2), X))


@functools.cache
def value_and_gradient(chosen):
  """Loss and gradient by the parameters; the traced program; its FLOPs."""

  def loss(variables):
    return jnp.square(ENCODER.apply(variables, X, None, KEYS)).mean()

  with blocks.options(chosen):
    both = jax.value_and_grad(loss)
    lowered = jax.jit(both).lower(VARIABLES)
    flops = lowered.cost_analysis()['flops']
    program = str(jax.make_jaxpr(both)(VARIABLES))
    return lowered.compile()(VARIABLES), program, flops


@pytest.mark.parametrize('chosen', CHOICES[1:], ids=str)
def test_values_and_gradients_are_those_of_the_loop(chosen):
  (expected, gradient), *_ = value_and_gradient(CHOICES[0])
  (given, found), program, flops = value_and_gradient(chosen)
  np.testing.assert_allclose(given, expected, atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, gradient
  )
  assert ('scan[' in program) == chosen.scan
  # What is not kept is computed again.
  plain = value_and_gradient(blocks.Options(chosen.scan))[2]
  assert (plain < flops) == (chosen.remat != 'none')


def test_parameters_keep_their_names():
  with blocks.options(blocks.Options(scan=True, remat='full')):
    variables = nn.unbox(ENCODER.init(jax.random.key(2), X))
  assert jax.tree.structure(variables) == jax.tree.structure(VARIABLES)


def test_options_end_with_their_context():
  with blocks.options(CHOICES[-1]):
    pass
  assert 'scan[' not in str(jax.make_jaxpr(ENCODER.apply)(VARIABLES, X))
