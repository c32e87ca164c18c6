"""The image baselines UT, U2T and UViT: plain NumPy, the ViT, the paper."""

import jax
import numpy as np
import pytest

from adatape import universal
from adatape.ponder_vit import PonderViT
from model_lib.vit import ViT
from tests.adatape import plain_vit
from tests.model_lib import plain

SIZES = dict(num_classes=3, width=16, mlp_dim=32, num_heads=4, patch_size=4)
IMAGES = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
MODELS = {
  'ut': universal.UniversalViT(**SIZES, max_steps=5),
  'u2t': universal.UnsharedViT(**SIZES, max_steps=5),
  'u2t coordinates': universal.UnsharedViT(
    **SIZES, max_steps=4, coordinates=True, combination='basic'
  ),
  'uvit': universal.UViT(**SIZES, ut_steps=4, depth=2),
}


def by_loop(params, image, model):
  """(logits, steps, remainders) of one image."""
  x = plain_vit.tokens(params['tokens'], image, model.patch_size)
  encoder = params['encoder']
  if isinstance(model, universal.UnsharedViT):
    blocks = [encoder[f'block_{n}'] for n in range(model.max_steps)]
    score, above = encoder['score'], 0
  elif isinstance(model, universal.UViT):
    step, above = params['universal']['step'], model.depth
    blocks, score = [step['block']] * model.ut_steps, step['score']
  else:
    step, above = encoder['step'], 0
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
  model = MODELS[name].clone(halting=halting)
  variables = plain_vit.spread(model, IMAGES)
  logits, out = jax.jit(model.apply)(variables, IMAGES)
  dynamic = jax.jit(model.clone(dynamic=True).apply)(variables, IMAGES)
  np.testing.assert_allclose(dynamic[0], logits, atol=1e-5)
  ponder = out['ponder']
  jax.tree.map(np.testing.assert_array_equal, ponder, dynamic[1]['ponder'])
  params = plain.float64(variables['params'])
  for row, image in enumerate(np.asarray(IMAGES, np.float64)):
    want, steps, remainder = by_loop(params, image, model)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)
    np.testing.assert_allclose(ponder['steps'][row], steps.mean(), atol=1e-5)
    cost = (steps + remainder).mean()
    np.testing.assert_allclose(ponder['cost'][row], cost, atol=1e-5)
    assert int(ponder['depth'][row]) == steps.max()
  if halting == 'token':
    assert len(set(np.asarray(ponder['steps']))) > 1


@pytest.mark.slow
def test_unshared_steps_that_never_halt_are_the_vit():
  vit = ViT(**SIZES, depth=3)
  params = plain.noise(vit, IMAGES, scale=0.3)
  want = jax.jit(vit.apply)({'params': params}, IMAGES)[0]
  model = universal.UnsharedViT(**SIZES, max_steps=3)
  score = {'kernel': np.zeros((16, 1), 'f'), 'bias': np.full(1, -30, 'f')}
  params['encoder']['score'] = score
  logits, out = jax.jit(model.apply)({'params': params}, IMAGES)
  np.testing.assert_allclose(logits, want, atol=1e-5)
  np.testing.assert_array_equal(out['ponder']['depth'], 3)
  # A score of 1 halts in the first step: the other blocks are not used.
  score['bias'] = np.full(1, 30, 'f')
  logits, out = jax.jit(model.apply)({'params': params}, IMAGES)
  first = {k: params['encoder'][k] for k in ('block_0', 'norm')}
  params = params | {'encoder': first}
  want = jax.jit(vit.clone(depth=1).apply)({'params': params}, IMAGES)[0]
  np.testing.assert_allclose(logits, want, atol=1e-5)
  np.testing.assert_array_equal(out['ponder']['depth'], 1)


# A multiply-add is one FLOP in Table 1, whose other rows are in costs_test.
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
