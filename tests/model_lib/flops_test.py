"""FLOP formulas against the compiler and against the literature."""

import jax
import jax.numpy as jnp
import pytest

from model_lib import flops, layers, vit


def compiled_flops(function, *arguments):
  return jax.jit(function).lower(*arguments).cost_analysis()['flops']


def test_dense_is_the_compilers_count():
  x, w = jnp.zeros((7, 33)), jnp.zeros((33, 65))
  assert flops.dense(7, 33, 65) == compiled_flops(jnp.matmul, x, w)


@pytest.mark.parametrize('tape_mlp', ['', 'mlp', 'glu'])
def test_block_agrees_with_the_compiler(tape_mlp):
  block = layers.EncoderBlock(num_heads=2, mlp_dim=1024, tape_mlp=tape_mlp)
  x = jnp.zeros((1, 20, 256))
  params = jax.eval_shape(block.init, jax.random.key(0), x)
  got = compiled_flops(
    lambda p, x: block.apply(p, x, None, None, 12), params, x
  )
  want = flops.block(12, 256, 1024, tape_tokens=8, tape_mlp=tape_mlp)
  assert want == pytest.approx(got, rel=0.03)


@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_vit_agrees_with_the_compiler(pool):
  model = vit.ViT(num_classes=10, variant='S/16', depth=2, pool=pool)
  images = jnp.zeros((1, 64, 64, 3))
  params = jax.eval_shape(model.init, jax.random.key(0), images)
  got = compiled_flops(model.apply, params, images)
  assert model.flops((64, 64, 3)) == pytest.approx(got, rel=0.03)


def test_token_transformer_agrees_with_the_compiler():
  model = vit.TokenTransformer(
    num_classes=2, depth=3, width=256, mlp_dim=512, num_heads=4
  )
  tokens = jnp.zeros((1, 16), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)
  got = compiled_flops(model.apply, params, tokens)
  assert model.flops((16,)) == pytest.approx(got, rel=0.03)


@pytest.mark.parametrize(
  ('variant', 'multiply_adds'), [('Ti/16', 1.26), ('S/16', 4.6), ('B/16', 17.6)]
)
def test_vit_agrees_with_the_literature(variant, multiply_adds):
  # DeiT, Table 1 and its code: G multiply-adds at 224 pixels.
  model = vit.ViT(num_classes=1000, variant=variant)
  got = model.flops((224, 224, 3)) / 2e9
  assert got == pytest.approx(multiply_adds, rel=0.01)
