"""The baselines UT, U2T, UViT, ViT-3FFN: plain NumPy, the ViT, the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape import universal
from adatape.ponder_vit import PonderViT
from adatape.vit_3ffn import ViT3FFN
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


def by_loop_of_parts(params, image):
  """Logits of one image."""
  params = plain.float64(params)
  x = plain_vit.tokens(params['tokens'], image, 4)
  # [CLS], patches 1-8 and 9-16 of a 4 x 4 grid: its upper and lower half.
  ends = enumerate(((0, 1), (1, 9), (9, 17)))
  networks = {f'mlp_{group}': slice(*end) for group, end in ends}
  for index in range(plain_vit.SIZES['depth']):
    block = params['encoder'][f'block_{index}']
    assert 'mlp' not in block
    x = plain_vit.block(block, x, plain_vit.SIZES['num_heads'], networks)
  features = plain.layer_norm(params['encoder']['norm'], x)[0]
  return plain.dense(params['head'], features)


def test_equals_a_loop_over_tokens():
  model = ViT3FFN(**plain_vit.SIZES)
  params = plain.noise(model, plain_vit.IMAGES)
  own = params['encoder']['block_3']['mlp_0']
  assert own['gated']['kernel'].shape == (16, 12)
  logits, _ = jax.jit(model.apply)({'params': params}, plain_vit.IMAGES)
  for row, image in enumerate(plain_vit.IMAGES):
    want = by_loop_of_parts(params, image)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)


def test_an_odd_patch_belongs_to_the_first_half():
  model = ViT3FFN(**(plain_vit.SIZES | dict(depth=1)))
  images = plain_vit.IMAGES[:, :12, :12]  # 9 patches
  variables = {'params': plain.noise(model, images)}

  def states(bias):
    block = variables['params']['encoder']['block_0']
    block = block | {'mlp_2': jax.tree.map(jnp.copy, block['mlp_2'])}
    block['mlp_2']['out']['bias'] += bias
    encoder = variables['params']['encoder'] | {'block_0': block}
    params = variables['params'] | {'encoder': encoder}
    return model.apply({'params': params}, images, capture_intermediates=True)[
      1
    ]['intermediates']['encoder']['block_0']['__call__'][0]

  changed = np.abs(states(0.0) - states(1.0)).max((0, 2)) > 0
  np.testing.assert_array_equal(np.flatnonzero(changed), [6, 7, 8, 9])


TOKEN_SIZES = {'num_classes': 2, 'width': 16, 'mlp_dim': 32, 'num_heads': 4}
TOKENS = np.random.default_rng(0).integers(0, 3, size=(4, 6)).astype(np.int32)
ON_DEVICE = jnp.asarray(TOKENS)
LENGTHS = np.array([6, 3, 5, 1])
MASK = np.arange(6)[None] < LENGTHS[:, None]


def token_model(**fields):
  fields = {'max_steps': 5, **TOKEN_SIZES, **fields}
  return universal.UniversalTransformer(**fields)


VARIABLES = plain_vit.spread(token_model(), ON_DEVICE)


def run(model, tokens, row_keys=None, mask=None):
  return jax.jit(model.apply)(VARIABLES, jnp.asarray(tokens), row_keys, mask)


def by_loop_of_tokens(tokens, length, model):
  """One row, its padding cut off, in NumPy."""
  params = plain.float64(VARIABLES['params'])
  step = params['encoder']['step']
  embedding = params['tokens']['embedding'][tokens[:length]]
  state = np.concatenate([params['tokens']['cls'][0], embedding])
  blocks = [step['block']] * model.max_steps
  output, steps, remainder = plain_vit.act(state, blocks, step['score'], model)
  normed = plain.layer_norm(params['encoder']['norm'], output[0])
  logits = plain.dense(params['head'], normed)
  return logits, steps.mean(), (steps + remainder).mean(), steps.max()


@pytest.mark.parametrize('halting', ['token', 'example'])
@pytest.mark.parametrize('combination', ['accumulated', 'basic'])
def test_equals_plain_loop(halting, combination):
  model = token_model(halting=halting, combination=combination)
  logits, out = run(model, TOKENS, None, jnp.asarray(MASK))
  looped = run(model.clone(dynamic=True), TOKENS, None, jnp.asarray(MASK))
  np.testing.assert_allclose(logits, looped[0], atol=1e-6)
  jax.tree.map(
    np.testing.assert_array_equal, out['ponder'], looped[1]['ponder']
  )
  for row, length in enumerate(LENGTHS):
    want, steps, cost, depth = by_loop_of_tokens(TOKENS[row], length, model)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)
    np.testing.assert_allclose(out['ponder']['steps'][row], steps, atol=1e-5)
    np.testing.assert_allclose(out['ponder']['cost'][row], cost, atol=1e-4)
    assert int(out['ponder']['depth'][row]) == depth
  # The case has early and late tokens, or it would prove little.
  if halting == 'token':
    assert out['ponder']['steps'].min() < 4.5
    assert out['ponder']['depth'].max() == 5
