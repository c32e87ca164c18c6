"""The baselines UT, U2T, UViT, ViT-3FFN: plain NumPy, the ViT, the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape import universal
from adatape.ponder_vit import PonderViT
from adatape.vit_3ffn import ViT3FFN
from tests.adatape import plain_vit
from tests.model_lib import plain

TOKEN_SIZES = dict(num_classes=3, width=16, mlp_dim=32, num_heads=4)
SIZES = TOKEN_SIZES | dict(patch_size=4)
IMAGES = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
TOKENS = np.random.default_rng(0).integers(0, 3, size=(4, 6)).astype(np.int32)
LENGTHS = np.array([6, 3, 5, 1])
UT = universal.UniversalTransformer(**TOKEN_SIZES, max_steps=5)
MODELS = {
  'ut': universal.UniversalViT(**SIZES, max_steps=5),
  'u2t': universal.UnsharedViT(**SIZES, max_steps=5),
  'u2t coordinates': universal.UnsharedViT(
    **SIZES, max_steps=4, coordinates=True, combination='basic'
  ),
  'uvit': universal.UViT(**SIZES, ut_steps=4, depth=2),
  'tokens': UT,
  'tokens basic': UT.clone(combination='basic'),
}


def by_loop(params, model, row):
  """(logits, steps, remainders) of one row, its padding cut off."""
  if isinstance(model, universal.UniversalTransformer):
    embedding = params['tokens']['embedding'][TOKENS[row, : LENGTHS[row]]]
    x = np.concatenate([params['tokens']['cls'][0], embedding])
  else:
    image = np.float64(IMAGES[row])
    x = plain_vit.tokens(params['tokens'], image, model.patch_size)
  encoder, above = params['encoder'], 0
  if isinstance(model, universal.UnsharedViT):
    blocks = [encoder[f'block_{n}'] for n in range(model.max_steps)]
    score = encoder['score']
  elif isinstance(model, universal.UViT):
    step, above = params['universal']['step'], model.depth
    blocks, score = [step['block']] * model.ut_steps, step['score']
  else:
    step = encoder['step']
    blocks, score = [step['block']] * model.max_steps, step['score']
  x, *steps = plain_vit.act(x, blocks, score, model, model.coordinates)
  for n in range(above):
    x = plain_vit.block(encoder[f'block_{n}'], x, model.num_heads)
  x = plain.layer_norm(encoder['norm'], x)
  return plain.dense(params['head'], x[0]), *steps


@pytest.mark.parametrize(
  'halting', ['token', pytest.param('example', marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('name', MODELS)
def test_equals_plain_numpy(name, halting):
  model, inputs = MODELS[name].clone(halting=halting), [IMAGES]
  if name.startswith('tokens'):
    inputs = [TOKENS, None, np.arange(6)[None] < LENGTHS[:, None]]
  variables = plain_vit.spread(model, jnp.asarray(inputs[0]))
  logits, out = jax.jit(model.apply)(variables, *inputs)
  dynamic = jax.jit(model.clone(dynamic=True).apply)(variables, *inputs)
  np.testing.assert_allclose(dynamic[0], logits, atol=1e-6)
  ponder = out['ponder']
  jax.tree.map(np.testing.assert_array_equal, ponder, dynamic[1]['ponder'])
  params = plain.float64(variables['params'])
  for row in range(4):
    want, steps, remainder = by_loop(params, model, row)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)
    np.testing.assert_allclose(ponder['steps'][row], steps.mean(), atol=1e-5)
    cost = (steps + remainder).mean()
    np.testing.assert_allclose(ponder['cost'][row], cost, atol=1e-5)
    assert int(ponder['depth'][row]) == steps.max()
  if halting == 'token':
    assert len(set(np.asarray(ponder['steps']))) > 1


# A multiply-add is one FLOP in Table 1, whose other rows are in cost_test.
@pytest.mark.parametrize(
  ('kind', 'variant', 'gflops', 'fields'),
  [
    (universal.UnsharedViT, 'B/16', 22.016, {'max_steps': 15}),
    (universal.UniversalViT, 'B/16', 22.016, {'max_steps': 15}),
    (universal.UViT, 'L/16', 77.114, {'ut_steps': 6}),
    (PonderViT, 'B/16', 22.016, {'max_steps': 15}),
  ],
)
def test_flops_of_the_paper(kind, variant, gflops, fields):
  model = kind(num_classes=1000, variant=variant, **fields)
  shape = (224, 224, 3)
  assert model.flops(shape) / 2e9 == pytest.approx(gflops, rel=0.02)
  for field, most in fields.items():
    assert model.flops(shape, steps=most) == model.flops(shape)
    fewer = model.clone(**{field: 2})
    assert model.flops(shape, steps=2) == fewer.flops(shape)


# Patches 1-8 and 9-16 of a 4 x 4 grid; of 9 patches the first half has 5.
@pytest.mark.parametrize(('side', 'half'), [(16, 9), (12, 6)])
def test_equals_a_loop_over_the_parts_of_a_row(side, half):
  model, images = ViT3FFN(**plain_vit.SIZES), plain_vit.IMAGES[:, :side, :side]
  variables = {'params': plain.noise(model, images)}
  params = plain.float64(variables['params'])
  encoder = params['encoder']
  assert encoder['block_3']['mlp_0']['gated']['kernel'].shape == (16, 12)
  logits, _ = jax.jit(model.apply)(variables, images)
  parts = slice(0, 1), slice(1, half), slice(half, None)
  networks = {f'mlp_{index}': part for index, part in enumerate(parts)}
  for row, image in enumerate(images):
    x = plain_vit.tokens(params['tokens'], image, 4)
    for index in range(model.depth):
      block = encoder[f'block_{index}']
      assert 'mlp' not in block
      x = plain_vit.block(block, x, model.num_heads, networks)
    features = plain.layer_norm(encoder['norm'], x)[0]
    want = plain.dense(params['head'], features)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)
