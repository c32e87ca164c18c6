"""A-ViT against a loop that deletes halted tokens; its prior; its forms."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, log_softmax

from adatape import avit
from model_lib import tokens
from tests import losses
from tests.adatape import plain_vit
from tests.adatape.plain_vit import BATCH, IMAGES, INFO, MASK, PIXELS, SIZES
from tests.halting.plain import act
from tests.model_lib import plain

GATE = dict(gamma=1.0, beta=0.5)


def model_of(**fields):
  return avit.AViT(**(SIZES | GATE | fields))


VARIABLES = {'params': plain.noise(model_of(), IMAGES, seed=3)}


@functools.cache
def compiled(**fields):
  return jax.jit(model_of(**fields).apply)


def run(images=IMAGES, **fields):
  return compiled(**fields)(VARIABLES, jnp.asarray(images, jnp.float32))


def loop(image):
  """One image; halted tokens are deleted. (logits, N, R, scores [L, K])."""
  params = plain.float64(VARIABLES['params'])
  encoder = params['encoder']
  x = plain_vit.tokens(params['tokens'], image, 4)
  scores = np.zeros((SIZES['depth'], len(x)))

  def step(state, layer, running):
    block, new = encoder[f'block_{layer}'], np.zeros(state.shape)
    new[running] = plain_vit.block(block, state[running], SIZES['num_heads'])
    gate = GATE['gamma'] * new[running, 0] + GATE['beta']
    scores[layer, running] = expit(gate)
    return new, scores[layer]

  output, steps, rest, _ = act(step, x, SIZES['depth'])
  features = plain.layer_norm(encoder['norm'], output)[0]
  return plain.dense(params['head'], features), steps, rest, scores


LOOPED = [loop(image) for image in IMAGES]


@pytest.mark.nightly
def test_compaction_does_not_change_the_gradient():
  def gradient(dynamic):
    def loss(variables):
      images = jnp.asarray(IMAGES, jnp.float32)
      logits, out = model_of(dynamic=dynamic).apply(variables, images)
      ponder = out['ponder']
      costs = ponder['cost'].sum() + ponder['log_scores'].sum()
      return jnp.square(logits).sum() + 0.1 * costs

    return jax.jit(jax.grad(loss))(VARIABLES)

  masked, compacted = gradient(False), gradient(True)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5),
    compacted,
    masked,
  )
  sizes = [float(jnp.abs(g).max()) for g in jax.tree.leaves(masked)]
  assert np.median(sizes) > 1e-2


@pytest.mark.parametrize('dynamic', [False, True])
def test_equals_a_loop_that_deletes_halted_tokens(dynamic):
  logits, out = run(dynamic=dynamic)
  ponder = out['ponder']
  for row, (want, steps, rest, scores) in enumerate(LOOPED):
    np.testing.assert_allclose(logits[row], want, atol=1e-4)
    np.testing.assert_allclose(ponder['steps'][row], steps.mean(), atol=1e-5)
    cost = (steps + rest).mean()
    np.testing.assert_allclose(ponder['cost'][row], cost, atol=1e-5)
    assert int(ponder['depth'][row]) == steps.max()
    summed = np.exp(ponder['log_scores'][row])
    np.testing.assert_allclose(summed, scores.sum(1), rtol=1e-4)
  # Some tokens halt at each layer, [CLS] among them, or it would prove little.
  steps = np.stack([steps for _, steps, _, _ in LOOPED])
  assert set(steps.ravel()) == {1, 2, 3, 4}
  assert len(set(steps[:, 0])) > 1


class Spy(nn.Module):
  """Reports the number of tokens that it computes."""

  report: object

  @nn.compact
  def __call__(self, x, mask, row_keys=None):
    jax.debug.callback(lambda _: self.report(x.shape[1]), x[0, 0, 0])
    return 2 * x


@pytest.mark.parametrize(
  ('most', 'computed'), [(0, []), (1, [5]), (5, [5]), (6, [9]), (17, [17])]
)
def test_the_dynamic_form_computes_quarters_of_the_tokens(most, computed):
  seen: list[int] = []
  spy = Spy(seen.append)

  def block(x, running):
    return jnp.where(running[..., None], spy.apply({}, x, running), x)

  draw = np.random.default_rng(most)
  running = draw.permuted(np.arange(17)[None] < [[most], [most // 2]], axis=1)
  x = draw.normal(size=(2, 17, 4)).astype(np.float32)
  got = jax.jit(lambda *args: tokens.compacted(block, *args))(x, running)
  jax.effects_barrier()
  assert seen == computed
  np.testing.assert_array_equal(got, np.where(running[..., None], 2 * x, x))


def gradient_of(name, **fields):
  def loss(variables):
    ponder = model_of(**fields).apply(variables, IMAGES)[1]['ponder']
    prior = avit.depth_prior(ponder['log_scores'], 3.0)
    return {'prior': prior, 'cost': ponder['cost']}[name].mean()

  return jax.jit(jax.grad(loss))(VARIABLES)['params']


@pytest.mark.slow
@pytest.mark.parametrize('name', ['cost', 'prior'])
def test_losses_train_the_feature_of_the_gate(name):
  gradient = gradient_of(name)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
  assert np.abs(gradient['head']['kernel']).max() == 0
  bias = gradient['encoder']['block_2']['mlp']['out']['bias']
  # The gate reads feature 0, the next block all of them.
  assert np.abs(bias[0]) > 2 * np.abs(bias[1:]).max()
  if name == 'cost':
    assert bias[0] < 0  # a larger score leaves a smaller remainder
  last = gradient['encoder']['block_3']['mlp']['out']['bias']
  np.testing.assert_array_equal(last[1:], 0.0)
  assert (last[0] == 0) == (name == 'cost')


@pytest.mark.slow
@pytest.mark.parametrize('beta', [-75.0, -200.0])
def test_tiny_scores_have_a_finite_gradient(beta):
  gradient = gradient_of('prior', beta=beta)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
  assert np.abs(gradient['encoder']['block_2']['mlp']['out']['bias'][0]) > 1e-3


def prior_by_hand(scores, depth):
  shares = np.maximum(scores / scores.sum(), 0.01)
  target = [np.exp(-((n + 1 - depth) ** 2) / 2) for n in range(len(scores))]
  target = np.array(target) / sum(target)
  return sum(t * np.log(t / s) for t, s in zip(target, shares, strict=True))


def test_prior_by_hand():
  for scores, depth in (([0.1, 0.2, 0.5, 0.2], 3.0), ([0.9, 0.1, 1e-6], 2.5)):
    scores = np.array(scores)
    got = avit.depth_prior(jnp.log(scores)[None], depth)
    np.testing.assert_allclose(got, [prior_by_hand(scores, depth)], atol=1e-5)
  # Scores in the shape of the target: no divergence.
  target = -0.5 * (jnp.arange(1.0, 5.0) - 2.5) ** 2
  np.testing.assert_allclose(avit.depth_prior(target[None], 2.5), 0, atol=1e-6)


def test_the_default_weight_of_the_prior_is_that_of_the_authors():
  # `get_distribution_target`, `KLDivLoss` (a mean over layers) of their code.
  target = np.exp(-0.5 * (np.arange(12) - 8.0) ** 2)
  target *= 0.98 / target[:8].sum()
  scores = jnp.log(jnp.linspace(0.3, 0.6, 12))[None]

  def theirs(scores):
    return 1e-3 * -(target * jax.nn.log_softmax(scores)[0]).mean()

  ours = jax.grad(lambda x: avit.depth_prior(x, 9.0)[0])(scores)
  weight = avit.AViTClassification.Loss().prior_weight
  want = jax.grad(theirs)(scores)
  np.testing.assert_allclose(weight * ours, want, rtol=0.01, atol=1e-8)


def test_loss_and_metrics_of_the_task():
  model = dict(name='adatape.avit:AViT', **SIZES, **GATE)
  del model['num_classes']
  config = {'model': model, 'loss': {}, 'dtype': 'float32', 'evals': {}}
  avit.AViTClassification.validate_config(config)
  assert config['loss']['prior_weight'] == 2.7e-4
  task = avit.AViTClassification(config, INFO)
  knobs = {'ponder_weight': 0.3, 'prior_weight': 0.7, 'prior_depth': 2.0}
  keys, given = jax.random.split(jax.random.key(0), 4), VARIABLES['params']
  loss, metrics = losses.of(task)(given, BATCH, knobs, keys=keys)
  want, depths, priors = [], [], []
  for row in range(int(MASK.sum())):
    logits, steps, rest, scores = loop(PIXELS[row])
    entropy = -log_softmax(logits)[BATCH['label'][row]]
    priors.append(prior_by_hand(scores.sum(1), 2.0))
    want.append(entropy + 0.3 * (steps + rest).mean() + 0.7 * priors[-1])
    depths.append(steps.max())
  np.testing.assert_allclose(loss, np.mean(want), atol=1e-4)
  prior = metrics['prior'].compute()
  np.testing.assert_allclose(prior, np.mean(priors), atol=1e-4)
  assert metrics['halting_depth_mean'].compute() == np.mean(depths)
  assert 'ponder_steps_min' in metrics
