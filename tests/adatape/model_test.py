"""AdaTape on images: invariants of the model, sizes and counts."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.model import AdaTapeViT
from adatape.parity import ParityModel

B = 6
TINY = dict(
  num_classes=3, width=16, depth=3, mlp_dim=16, num_heads=2, patch_size=8,
  bank='input', bank_patch_size=4, tokens_per_step=2, max_steps=5,
  threshold=1.7, query_dim=8, pool='gap',
)  # fmt: skip


def images(seed=0, rows=B):
  return jax.random.normal(jax.random.key(seed), (rows, 16, 16, 3))


@functools.cache
def initialised(**fields):
  model = AdaTapeViT(**(TINY | fields))
  init = jax.jit(model.init)
  return model, nn.unbox(init(jax.random.key(1), images(rows=1)))


def run(model, variables):
  return jax.jit(model.apply)(variables, images())


@pytest.mark.nightly
def test_tape_loss_trains_what_comes_before_the_insertion():
  # Invariant 8.
  model, variables = initialised(tape_mlp='glu')

  def loss(variables):
    return model.apply(variables, images())[1]['tape']['loss'].sum()

  gradient = jax.jit(jax.grad(loss))(variables)['params']
  inner = gradient.pop('encoder')
  largest = {
    name: max(float(jnp.abs(x).max()) for x in jax.tree.leaves(part))
    for name, part in {**gradient, **inner}.items()
  }
  untouched = {'block_1', 'block_2', 'norm', 'read_network', 'head'}
  assert {name for name in largest if largest[name] == 0} == untouched
  trained = {'tokens', 'tape_bank', 'tape_norm', 'block_0'}
  assert set(largest) - untouched == trained


def test_a_learnable_bank_is_trained_where_it_is_read():
  model, variables = initialised(bank='learnable', bank_size=24)

  def loss(variables):
    logits, out = model.apply(variables, images())
    return (logits**2).sum(), out['tape']

  gradient, tape = jax.jit(jax.grad(loss, has_aux=True))(variables)
  rows = np.abs(gradient['params']['tape_bank']['tokens']).max(-1) > 0
  read = np.unique(np.asarray(tape['indices'])[np.asarray(tape['mask']) > 0])
  assert set(np.flatnonzero(rows)) == set(read)
  assert 0 < len(read) < 24


@pytest.mark.nightly
def test_ablations_without_adaptive_length_and_without_bank():
  model, variables = initialised(fixed_length=True)
  _, out = run(model, variables)
  assert (out['tape']['length'] == 5).all()
  assert out['tape']['indices'].shape == (B, 5, 1)
  model, variables = initialised(bank='none')
  logits, out = run(model, variables)
  assert out['tape']['indices'] is None
  assert (out['tape']['length'] == 5).all()
  assert logits.shape == (B, 3)
  assert 'tape_norm' not in variables['params']['encoder']


def test_an_input_bank_too_small_for_the_reading_is_named():
  few = AdaTapeViT(**(TINY | {'bank_patch_size': 8}))
  with pytest.raises(ValueError, match=r'bank_size: expected at least .* = 10'):
    few.init(jax.random.key(0), images())


def test_parity_of_equal_and_shuffled_symbols():
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
