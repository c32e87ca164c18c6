"""PonderViT, its distribution and its loss against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from adatape.ponder_vit import PonderNetClassification, PonderViT
from core.errors import ConfigError
from dataset_lib import builder
from halting import costs
from halting.token_rules import PonderNet
from tests import losses
from tests.adatape import plain_vit
from tests.model_lib import plain
from tests.train_lib import mixup_test

SIZES = dict(width=16, mlp_dim=32, num_heads=4, patch_size=4, max_steps=6)
MODEL = PonderViT(num_classes=3, **SIZES)
# Images of unlike contrast, so that rows halt in different steps.
IMAGES = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
IMAGES *= jnp.array([0.2, 1.0, 3.0, 9.0])[:, None, None, None]
LOSS = dict(ponder_weight=0.3, prior_rate=0.4, label_smoothing=0.1)
BATCH = {
  'image': IMAGES,
  'label': jnp.array([0, 1, 2, 0]),
  'mask': jnp.array([1.0, 1.0, 1.0, 0.0]),
}


def params_of(model=MODEL):
  """Parameters at random that spread the halting over rows and steps."""
  params = plain.noise(model, IMAGES, scale=0.3, seed=3)
  params['step']['norm']['scale'] += 1.0
  params['step']['halt']['bias'] = np.full((1,), 0.5, np.float32)
  return params


PARAMS = params_of()


def distributions(params, model=MODEL):
  """(p `[B, N]`, logits `[B, N, O]`) by the plain loop."""
  params = plain.float64(params)
  rows = [
    plain_vit.ponder_net(params, image, model)
    for image in np.asarray(IMAGES, np.float64)
  ]
  return [np.stack(parts) for parts in zip(*rows, strict=True)]


@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_equals_plain_numpy(pool):
  model = MODEL.clone(pool=pool)
  params = params_of(model)
  logits, out = jax.jit(model.apply)({'params': params}, IMAGES)
  p, want = distributions(params, model)
  np.testing.assert_allclose(out['halting'].T, p, atol=1e-5)
  np.testing.assert_allclose(out['step_logits'].swapaxes(0, 1), want, atol=1e-4)
  cost = p @ np.arange(1, 7)
  np.testing.assert_allclose(out['ponder']['cost'], cost, atol=1e-4)
  halted = p.cumsum(1)
  assert abs(halted - 0.5).min() > 1e-4  # no row is on the edge
  median = (halted >= 0.5).argmax(1)
  np.testing.assert_array_equal(out['ponder']['depth'], median + 1)
  np.testing.assert_array_equal(out['ponder']['steps'], median + 1)
  np.testing.assert_allclose(logits, want[range(4), median], atol=1e-4)
  assert len(set(median)) > 1


def task_of(**fields):
  data = dict(name='tests.fakes:FakeImages', image_size=8, num_classes=3)
  model = dict(name='adatape.ponder_vit:PonderViT', **SIZES, **fields)
  config = dict(model=model, dataset=data, loss=dict(LOSS), dtype='float32')
  PonderNetClassification.validate_config(config)
  info = builder.build_source(data, 'train').info
  return PonderNetClassification(config, info)


def plain_loss(params):
  """Equation 2, the mean of the real rows."""
  p, logits = distributions(params)
  prior = 0.4 * 0.6 ** np.arange(6)
  prior /= prior.sum()
  total = 0.0
  for row in range(3):
    for n in range(6):
      target = np.eye(3)[BATCH['label'][row]] * 0.9 + 0.1 / 3
      cross_entropy = -target @ scipy.special.log_softmax(logits[row, n])
      distance = np.log(p[row, n] / prior[n])
      total += p[row, n] * (cross_entropy + 0.3 * distance)
  return total / 3


def shifted(place, by):
  """`PARAMS` in float64 with one number of the halting layer moved."""
  params = plain.float64(PARAMS)
  halt = params['step']['halt']
  flat = np.concatenate([halt['kernel'][:, 0], halt['bias']])
  flat[place] += by
  moved = {'kernel': flat[:-1, None], 'bias': flat[-1:]}
  return params | {'step': params['step'] | {'halt': moved}}


def test_loss_and_its_gradient_equal_the_equation():
  task = task_of()
  with pytest.raises(ConfigError, match=r'model\.dynamic: .*every step'):
    task_of(dynamic=True).check_training()
  loss = losses.of(task)
  gradient_of = jax.value_and_grad(loss, has_aux=True)
  (value, metrics), gradient = gradient_of(PARAMS, BATCH)
  np.testing.assert_allclose(value, plain_loss(PARAMS), atol=1e-4)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
  halt = gradient['step']['halt']
  got = np.concatenate([halt['kernel'][:, 0], halt['bias']])
  want = [
    (plain_loss(shifted(i, 1e-5)) - plain_loss(shifted(i, -1e-5))) / 2e-5
    for i in (0, 5, 16)
  ]
  np.testing.assert_allclose(got[jnp.array([0, 5, 16])], want, atol=1e-4)
  assert abs(got).max() > 1e-2
  # A knob replaces the weight of the divergence.
  free, _ = loss(PARAMS, BATCH, {'ponder_weight': 0.0})
  divergence = metrics['divergence'].compute()
  np.testing.assert_allclose(value - free, 0.3 * divergence, atol=1e-5)


def test_mixup_reaches_every_step():
  mixup_test.assert_mixes(task_of(), PARAMS, BATCH)


@pytest.mark.slow
def test_a_dynamic_model_is_evaluated_by_its_predictions():
  masked = task_of().evaluate(PARAMS, {}, BATCH)
  dynamic = task_of(dynamic=True).evaluate(PARAMS, {}, BATCH)
  assert set(masked) - set(dynamic) == {'expected_steps', 'divergence'}
  for name, metric in dynamic.items():
    np.testing.assert_allclose(
      metric.compute(), masked[name].compute(), atol=1e-5
    )


def test_divergence_is_finite_where_probabilities_vanish():
  # ln prior_n = ln 0.99 + (n - 1) ln 0.01, but for what is cut off: 1e-48.
  prior = np.log(0.99) + np.arange(24) * np.log(0.01)
  chances = jnp.full((24, 2), 0.1).at[0, 1].set(1.0).at[1, 0].set(0.0)

  def divergence(chances):
    p = PonderNet().distribution(chances)
    return costs.divergence(p, costs.geometric_log_prior(0.99, 24)), p

  found, p = divergence(chances)
  np.testing.assert_allclose(p[:3, 0], [0.1, 0.0, 0.09], atol=1e-6)
  p = np.float64(p)
  want = -(scipy.special.entr(p) + p * prior[:, None]).sum(0)
  np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
  slopes = jax.grad(lambda chances: divergence(chances)[0].sum())(chances)
  assert np.isfinite(slopes).all()
