"""The one train step on a toy task whose gradients are known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dataset_lib.source import DatasetInfo
from eval_lib.metrics import Average
from train_lib import optimizers
from train_lib.task import Task
from train_lib.train_step import init_state, make_train_step

INFO = DatasetInfo('x', (3,), 'float32', 2, (), 16)


class Regression(Task):
  """Squared error of a linear map, with a teacher, a knob and row noise."""

  noise = 0.0
  arguments = example = terms = None  # it has a loss of its own

  def build_model(self):
    return None

  def init(self, rng):
    return {'head': {'kernel': jnp.zeros(3)}, 'bias': jnp.zeros(())}, {
      'seen': jnp.zeros((), jnp.int32)
    }

  def normalizers(self, batch):
    return {'examples': batch['mask'].sum()}

  def loss(self, params, model_state, frozen, batch, norm, row_keys, knobs):
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(row_keys)
    x = batch['x'] + self.noise * noise
    error = x @ params['head']['kernel'] + params['bias'] - batch['y']
    teacher = x @ frozen['kernel'] if frozen else jnp.zeros_like(error)
    per_row = jnp.square(error) + knobs['weight'] * jnp.square(error - teacher)
    loss = (per_row * batch['mask']).sum() / norm['examples']
    metrics = {'error': Average.from_values(error, batch['mask'])}
    seen = model_state['seen'] + batch['mask'].sum().astype(jnp.int32)
    return loss, (metrics, {'seen': seen}, None)

  def evaluate(self, params, model_state, batch):
    return {}

  def features(self, params, model_state, batch):
    return batch['x']


class NoisyRegression(Regression):
  noise = 0.1


def make_batch(rows=16, seed=0):
  generator = np.random.default_rng(seed)
  x, y = generator.normal(size=(rows, 3)), generator.normal(size=rows)
  mask = np.arange(rows) < rows - 3
  batch = {'x': x, 'y': y, 'mask': mask}
  return {key: value.astype(np.float32) for key, value in batch.items()}


def begin(task_class=Regression, optimizer=None, num_micro=1, **options):
  """(fresh state, train step)."""
  task, schedule = task_class({}, INFO), optax.constant_schedule(0.1)
  optimizer = optimizer or optax.sgd(schedule)
  step = make_train_step(task, optimizer, schedule, num_micro, **options)
  return init_state(task, optimizer, 0, options.get('ema_decay', 0.0)), step


def run(*arguments, steps=3, **options):
  state, step = begin(*arguments, **options)
  step, losses = jax.jit(step), []
  for number in range(steps):
    batch = make_batch(seed=number)
    state, metrics = step(state, {}, batch, {'weight': jnp.float32(0.5)})
    losses.append(metrics['loss'].compute())
  return state, losses, metrics


def test_one_step_by_hand():
  state, losses, metrics = run(steps=1)
  batch = make_batch()
  real = batch['mask'] > 0
  x, y = batch['x'][real].astype(np.float64), batch['y'][real]
  assert losses[0] == pytest.approx(np.mean(1.5 * y**2), rel=1e-5)
  gradient = (3.0 * -y[:, None] * x).mean(0)
  np.testing.assert_allclose(
    state.params['head']['kernel'], -0.1 * gradient, rtol=1e-5, atol=1e-6
  )
  assert metrics['error'].compute() == pytest.approx(np.mean(-y), abs=1e-5)
  assert int(state.model_state['seen']) == real.sum()
  assert int(state.step) == 1


@pytest.mark.parametrize('task', [Regression, NoisyRegression])
@pytest.mark.parametrize('num_micro', [2, 4, 16])
def test_accumulation_is_exact_also_with_noise_and_padding(task, num_micro):
  state, losses, metrics = run(task)
  other, other_losses, other_metrics = run(task, num_micro=num_micro)
  np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
  kernels = (one.params['head']['kernel'] for one in (state, other))
  np.testing.assert_allclose(*kernels, rtol=1e-5, atol=1e-6)
  errors = [one['error'].compute() for one in (metrics, other_metrics)]
  assert errors[0] == pytest.approx(errors[1], abs=1e-6)


def test_the_knob_and_the_teacher_are_traced():
  state, train_step = begin()
  step, losses = jax.jit(train_step), []
  for weight in (0.0, 1.0):
    frozen = {'kernel': jnp.ones(3)}
    knobs = {'weight': jnp.float32(weight)}
    _, metrics = step(state, frozen, make_batch(), knobs)
    losses.append(metrics['loss'].compute())
  assert losses[1] > losses[0]
  assert step._cache_size() == 1


def test_a_step_that_is_not_finite_changes_nothing_but_counters():
  state, step = begin(optimizer=optax.adam(lambda step: 0.1))
  step = jax.jit(step)
  knobs = {'weight': jnp.float32(0.0)}
  good, _ = step(state, {}, make_batch(), knobs)
  batch = make_batch()
  batch['x'][0, 0] = np.nan
  bad, metrics = step(good, {}, batch, knobs)
  bad, _ = step(bad, {}, batch, knobs)
  assert not np.isfinite(metrics['loss'].compute())
  assert int(bad.nonfinite) == 2
  assert int(bad.step) == 3
  for name in ('params', 'opt_state', 'model_state'):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(good, name), getattr(bad, name)
    )
  again, _ = step(bad, {}, make_batch(), knobs)
  assert int(again.nonfinite) == 0


@pytest.mark.parametrize('decay', [0.9999, 0.5, 1e-6])
def test_the_average_is_of_all_updates_without_skipped_steps(decay):
  rate = optax.scale_by_learning_rate(lambda step: 0.1)
  state, step = begin(optimizer=optax.chain(rate), ema_decay=decay)
  knobs, step, kept = {'weight': jnp.float32(0.5)}, jax.jit(step), []
  for number in range(6):
    batch, before = make_batch(seed=number), state.ema_params
    if number in (0, 3):  # the first step is skipped too
      batch['x'] = batch['x'] * np.nan
    state, _ = step(state, {}, batch, knobs)
    if number in (0, 3):
      jax.tree.map(np.testing.assert_array_equal, state.ema_params, before)
      continue
    kept.append(jax.tree.map(np.float64, state.params))
    weights = decay ** np.arange(len(kept) - 1, -1, -1)
    jax.tree.map(
      lambda found, *every, weights=weights: np.testing.assert_allclose(
        found, np.average(every, 0, weights), atol=1e-6
      ), state.ema_params, *kept,
    )  # fmt: skip


@pytest.mark.parametrize('scales', [(), ('^bias->3',)])
@pytest.mark.parametrize('bad', [(), (0,), (2, 3), (1, 4)])
def test_the_logged_rate_is_the_applied_one(bad, scales):
  fields = dict(
    name='sgd', b1=0.0, b2=0.0, eps=0.0, clip_norm=0.0, weight_decay=0.0,
    scales=scales, lr=0.1, end_lr=0.0, warmup_steps=0.0, schedule='linear',
  )  # fmt: skip
  schedule = optimizers.build_schedule(fields, 20)
  optimizer = optimizers.build_optimizer(fields, schedule, Task.DECAY)
  step = jax.jit(make_train_step(Regression({}, INFO), optimizer, schedule))
  state = init_state(Regression({}, INFO), optimizer, 0, 0.0)
  for number in range(6):
    batch = make_batch(seed=number)
    batch['x'][0] = np.nan if number in bad else batch['x'][0]
    before = state.params['bias']
    state, metrics = step(state, {}, batch, {'weight': jnp.float32(0.0)})
    if number not in bad:
      error = metrics['error'].compute()  # half the gradient of the bias
      applied = (before - state.params['bias']) / (2 * error)
      applied /= 3 if scales else 1
      rate = metrics['learning_rate'].compute()
      assert rate == pytest.approx(float(applied), rel=1e-4)
