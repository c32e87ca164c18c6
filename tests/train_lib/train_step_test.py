"""The one train step, on terms whose losses a plain loop knows."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from core.errors import ConfigError
from dataset_lib.source import DatasetInfo
from eval_lib.metrics import compute
from train_lib import optimizers, terms
from train_lib.task import Task
from train_lib.terms import Forward, Term
from train_lib.train_step import init_state, make_train_step

ROWS, WORDS, RATE = 8, 4, 0.1
WEIGHTS = {'second': 0.5, 'cost': 0.25}
TEACHER = {'kernel': jnp.array([0.5, -1.0, 2.0])}


class Words(Task):
  """A value of each word and of each row, a cost of words; noise of rows."""

  KNOBS = ('second',)
  noise = 0.0

  def build_model(self):
    return nn.Dense(1)

  def example(self):
    return {'x': jnp.zeros((1, WORDS, 3))}

  def arguments(self, batch):
    return (batch['x'],)

  def init(self, rng):
    return super().init(rng)[0], {'seen': jnp.int32(0)}

  def apply(self, params, model_state, batch, row_keys=None):
    draw = jax.vmap(lambda key: jax.random.normal(key, (WORDS, 3)))
    x = batch['x'] + self.noise * draw(row_keys)
    return self.model.apply({'params': params}, x)[..., 0], {}

  def masks(self, batch):
    words = batch['words'] * batch['mask'][:, None]
    return super().masks(batch) | {'words': words}

  def terms(self, forward):
    y = forward.logits
    taught = forward.batch['x'].sum(1) @ forward.frozen['kernel']
    return (
      Term(jnp.square(y - 1.0), over='words', name='words'),
      Term(jnp.square(y.sum(1)), 'second', share='second_share'),
      Term(jnp.abs(y), 'cost', over='words', per='rows', name='cost'),
      Term(jnp.square(y.sum(1) - taught), name='taught'),
      Term(y[:, 0] > 0, 0.0, name='positive'),
    )

  def loss(self, params, model_state, frozen, batch, *rest):
    given = params, model_state, frozen, batch, *rest
    loss, (metrics, _, carry) = super().loss(*given)
    seen = model_state['seen'] + batch['mask'].sum().astype(jnp.int32)
    return loss, (metrics, {'seen': seen}, carry)


class NoisyWords(Words):
  noise = 0.1


def batch_of(seed=0):
  rng = np.random.default_rng(seed)
  mask = np.array([1, 1, 0, 1, 1, 1, 1, 0], np.float32)
  x = rng.normal(size=(ROWS, WORDS, 3)).astype(np.float32)
  x[mask == 0] = 1e3  # padding, which counts nothing
  words = (rng.uniform(size=(ROWS, WORDS)) < 0.6).astype(np.float32)
  return {'x': x, 'words': words, 'mask': mask}


def by_loop(weights, batch, second):
  """The loss, and the metrics that terms name; kernel and bias in one."""
  words, rows, taught, costs, positive = [], [], [], 0.0, []
  for row in np.flatnonzero(batch['mask']):
    x = batch['x'][row].astype(np.float64)
    y, here = x @ weights[:3] + weights[3], batch['words'][row] > 0
    words += [*(y[here] - 1) ** 2]
    costs += np.abs(y[here]).sum()
    rows.append(y.sum() ** 2)
    taught.append((y.sum() - x.sum(0) @ np.float64(TEACHER['kernel'])) ** 2)
    positive.append(y[0] > 0)
  part, cost = second * np.mean(rows), 0.25 * costs / len(rows)
  loss = np.mean(words) + part + cost + np.mean(taught)
  return loss, {
    'words': np.mean(words), 'positive': np.mean(positive),
    'second_share': part / loss, 'cost': costs / len(words), 'loss': loss,
    'taught': np.mean(taught),
  }  # fmt: skip


CONSTANT = optax.constant_schedule(RATE)


def begin(
  kind=Words, optimizer=None, num_micro=1, schedule=CONSTANT, **options
):
  """(fresh state, jitted step)."""
  info = DatasetInfo('x', (WORDS, 3), 'float32', 2, (), ROWS)
  task = kind({'loss': WEIGHTS}, info)
  optimizer = optimizer or optax.sgd(schedule)
  step = make_train_step(task, optimizer, schedule, num_micro, **options)
  decay = options.get('ema_decay', 0.0)
  return nn.unbox(init_state(task, optimizer, 0, decay)), jax.jit(step)


def flat(params):
  return np.append(np.float64(params['kernel'][:, 0]), params['bias'])


@pytest.mark.parametrize('knobs', [{}, {'second': jnp.float32(2.0)}])
def test_a_step_by_a_loop(knobs):
  before, step = begin()
  after, metrics = step(before, TEACHER, batch_of(), knobs)
  second, weights = float(knobs.get('second', 0.5)), flat(before.params)
  _, want = by_loop(weights, batch_of(), second)
  measured = compute(metrics)
  for name, value in want.items():
    assert measured[name] == pytest.approx(value, rel=1e-5), name
  slopes = []
  for shift in 1e-5 * np.eye(4):
    ends = (by_loop(weights + s, batch_of(), second) for s in (shift, -shift))
    slopes.append(np.subtract(*(loss for loss, _ in ends)) / 2e-5)
  moved = flat(after.params) - weights
  np.testing.assert_allclose(moved, -RATE * np.array(slopes), rtol=1e-4)
  assert (int(after.step), int(after.model_state['seen'])) == (1, 6)


def steps_of(kind, num_micro):
  """(state, metrics) of three steps."""
  state, step = begin(kind, num_micro=num_micro)
  for number in range(3):
    state, metrics = step(state, TEACHER, batch_of(number), {})
  return state, compute(metrics)


@pytest.mark.parametrize('kind', [Words, NoisyWords])
def test_accumulation_is_exact_also_with_noise_and_padding(kind):
  state, metrics = steps_of(kind, 1)
  for num_micro in (2, 4, 8):
    other, parts = steps_of(kind, num_micro)
    assert parts == pytest.approx(metrics, rel=1e-5)
    moved = [flat(one.params) for one in (state, other)]
    np.testing.assert_allclose(*moved, rtol=1e-5, atol=1e-6)
    assert int(other.model_state['seen']) == 18


def test_knobs_and_teachers_are_traced():
  (state, step), losses = begin(), []
  for weight, by in ((0.0, 1.0), (1.0, 1.0), (1.0, 9.0)):
    teacher = {'kernel': by * TEACHER['kernel']}
    knobs = {'second': jnp.float32(weight)}
    metrics = step(state, teacher, batch_of(), knobs)[1]
    losses.append(metrics['loss'].compute())
  assert losses == sorted({*losses})
  assert step._cache_size() == 1


def test_padding_may_be_nan_and_shapes_are_those_of_masks():
  masks = {'rows': jnp.array([1.0, 1.0, 0.0])}
  forward = Forward(
    logits=None, out={}, batch={}, targets=(), masks=masks, settings={}
  )
  term = Term(jnp.array([1.0, 3.0, np.nan]), 2.0, name='cost')
  loss, metrics = terms.total([term], forward, {'rows': 2.0})
  assert (loss, metrics['cost'].compute()) == (4.0, 2.0)
  wrong = Term(jnp.ones((3, 3)), name='cost')
  with pytest.raises(ConfigError, match=r'terms\.cost: .*\(3,\) as .*rows'):
    terms.total([wrong], forward, {'rows': 1.0})


def with_nan(batch):
  batch['x'][0, 0] = np.nan
  return batch


def test_a_step_that_is_not_finite_changes_nothing_but_counters():
  state, step = begin(optimizer=optax.adam(lambda step: RATE))
  good, _ = step(state, TEACHER, batch_of(), {})
  bad, metrics = step(good, TEACHER, with_nan(batch_of()), {})
  bad, _ = step(bad, TEACHER, with_nan(batch_of()), {})
  assert not np.isfinite(metrics['loss'].compute())
  assert (int(bad.nonfinite), int(bad.step)) == (2, 3)
  same = bad.replace(nonfinite=good.nonfinite, step=good.step)
  jax.tree.map(np.testing.assert_array_equal, good, same)
  again, _ = step(bad, TEACHER, batch_of(), {})
  assert int(again.nonfinite) == 0


@pytest.mark.parametrize('decay', [0.9999, 0.5, 1e-6])
def test_the_average_is_of_all_updates_without_skipped_steps(decay):
  rate = optax.chain(optax.scale_by_learning_rate(lambda step: 0.001))
  (state, step), kept = begin(optimizer=rate, ema_decay=decay), []
  for number in range(6):
    batch, before = batch_of(number), state.ema_params
    if number in (0, 3):  # the first step is skipped too
      state, _ = step(state, TEACHER, with_nan(batch), {})
      jax.tree.map(np.testing.assert_array_equal, state.ema_params, before)
      continue
    state, _ = step(state, TEACHER, batch, {})
    kept.append(flat(state.params))
    weights = decay ** np.arange(len(kept) - 1, -1, -1)
    expected = np.average(kept, 0, weights)
    np.testing.assert_allclose(flat(state.ema_params), expected, atol=1e-6)


@pytest.mark.parametrize('scales', [(), ('.->3',)])
@pytest.mark.parametrize('bad', [(), (0,), (2, 3), (1, 4)])
def test_the_logged_rate_is_the_applied_one(bad, scales):
  fields = dict(
    name='sgd', b1=0.0, b2=0.0, eps=0.0, clip_norm=0.0, weight_decay=0.0,
    scales=scales, lr=0.01, end_lr=0.0, warmup_steps=0.0, schedule='linear',
  )  # fmt: skip
  schedule = optimizers.build_schedule(fields, 20)
  optimizer = optimizers.build_optimizer(fields, schedule, Task.DECAY)
  state, step = begin(optimizer=optimizer, schedule=schedule)
  for number in range(6):
    before, batch = flat(state.params), batch_of(number)
    if number in bad:
      state, _ = step(state, TEACHER, with_nan(batch), {})
      continue
    state, metrics = step(state, TEACHER, batch, {})
    applied = np.linalg.norm(flat(state.params) - before)
    applied /= metrics['grad_norm'].compute() * (3 if scales else 1)
    rate = metrics['learning_rate'].compute()
    assert rate == pytest.approx(applied, rel=1e-4)
