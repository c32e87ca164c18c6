"""The image baselines UT, U2T and UViT: plain NumPy, the ViT, the paper."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape import universal
from adatape.ponder_vit import PonderNetClassification, PonderViT
from adatape.task import PonderClassification
from dataset_lib import builder
from model_lib.vit import ViT
from tests.adatape import plain_baselines
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


def variables_of(model, bias=-1.5):
  """Parameters at random, with a score bias that spreads the steps."""
  params = plain.noise(model, IMAGES, scale=0.3, seed=3)
  halting = params.get('universal', params['encoder'])
  score = halting.get('step', halting)['score']
  score['kernel'] = score['kernel'] / 4
  score['bias'] = np.full((1,), bias, np.float32)
  return {'params': params}


def by_loop(params, image, model):
  """(logits, steps, remainders) of one image."""
  x = plain_baselines.image_tokens(params['tokens'], image, model.patch_size)
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
  x, *steps = plain_baselines.act(x, blocks, score, model, model.coordinates)
  for n in range(above):
    x = plain_baselines.block(encoder[f'block_{n}'], x, model.num_heads)
  x = plain.layer_norm(encoder['norm'], x)
  return plain.dense(params['head'], x[0]), *steps


@pytest.mark.parametrize('halting', ['token', 'example'])
@pytest.mark.parametrize('name', MODELS)
def test_equals_plain_numpy(name, halting):
  model = MODELS[name].clone(halting=halting)
  variables = variables_of(model)
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


# Table 6, in millions: PlainViT's recipe, whose positions are fixed and whose
# tokens are averaged.
@pytest.mark.parametrize(
  ('variant', 'millions'), [('Ti/16', 6.1), ('S/16', 23.8)]
)
def test_parameters_of_the_paper(variant, millions):
  model = universal.UnsharedViT(
    num_classes=1000, variant=variant, max_steps=13, positions='sincos2d',
    pool='gap',
  )  # fmt: skip
  images = jnp.zeros((1, 224, 224, 3))
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert count / 1e6 == pytest.approx(millions, rel=0.01)


# Table 1 counts a multiply-add as one FLOP. Its head is left out: 18,291
# classes add 0.3 % at B/32.
@pytest.mark.parametrize(
  ('kind', 'variant', 'gflops', 'fields'),
  [
    (ViT, 'B/32', 4.437, {}),
    (ViT, 'B/16', 17.634, {}),
    (ViT, 'L/32', 15.628, {}),
    (ViT, 'L/16', 61.724, {}),
    (universal.UnsharedViT, 'B/32', 5.513, {'max_steps': 15}),
    (universal.UnsharedViT, 'B/16', 22.016, {'max_steps': 15}),
    (universal.UniversalViT, 'B/16', 22.016, {'max_steps': 15}),
    (universal.UViT, 'B/32', 5.511, {'ut_steps': 3}),
    (universal.UViT, 'B/16', 22.011, {'ut_steps': 3}),
    (universal.UViT, 'L/32', 19.242, {'ut_steps': 6}),
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


def train(task, batch, steps=12, rate=0.1):
  """Losses of some steps of gradient descent, and the last metrics."""
  params = nn.unbox(task.init(jax.random.key(0))[0])
  keys = jax.random.split(jax.random.key(1), len(batch['label']))
  norm, values = task.normalizers(batch), []

  @jax.jit
  def step(params):
    def loss(params):
      return task.loss(params, {}, {}, batch, norm, keys, {})

    gradient_of = jax.value_and_grad(loss, has_aux=True)
    (value, (metrics, _)), gradient = gradient_of(params)
    moved = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
    return moved, value, metrics

  for _ in range(steps):
    params, value, metrics = step(params)
    values.append(float(value))
  return values, metrics


@pytest.mark.parametrize(
  ('kind', 'task', 'fields'),
  [
    ('UnsharedViT', PonderClassification, {'max_steps': 3}),
    ('UViT', PonderClassification, {'ut_steps': 2, 'depth': 2}),
    ('PonderViT', PonderNetClassification, {'max_steps': 3}),
  ],
)
def test_a_task_trains_the_model(kind, task, fields):
  module = 'adatape.ponder_vit' if kind == 'PonderViT' else 'adatape.universal'
  sizes = {key: SIZES[key] for key in SIZES if key != 'num_classes'}
  config = dict(
    model=dict(name=f'{module}:{kind}', dropout=0.1, **sizes, **fields),
    dataset=dict(name='tests.fakes:FakeImages', image_size=8, num_classes=3),
    loss=dict(ponder_weight=0.01), dtype='float32',
  )  # fmt: skip
  task.validate_config(config)
  info = builder.build_source(config['dataset'], 'train').info
  batch = {
    'image': IMAGES,
    'label': jnp.array([0, 1, 2, 0]),
    'mask': jnp.array([1.0, 1.0, 1.0, 0.0]),
  }
  values, metrics = train(task(config, info), batch)
  assert np.isfinite(values).all()
  assert values[-1] < values[0] - 0.3
  assert 1 <= float(metrics['ponder_steps_mean'].compute()) <= 3
