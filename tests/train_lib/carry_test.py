"""Training with a carry: slots keep their data until they halt."""

import functools
import math
import shutil
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_lib import compiled, config_schema, trainer
from train_lib.build import Setup
from train_lib.checkpoint_io import find
from train_lib.task import Task
from train_lib.terms import Term
from train_lib.train_step import first_culprit

ROWS, LENGTH, MOST, LIMIT, RATE = 32, 4, 4, 1.0, 0.02
START = (0.05, 0.2, 0.1, 0.9)  # a weight per token, and the decay
DATA = 'tokens', 'label', 'mask'


class Counter(Task):
  """Sums over tokens that decay; halts at `LIMIT`, or after `MOST` steps."""

  rows_together, factor = 2, 1.0
  example = arguments = None
  build_model = Task.check_training  # no module

  def flops(self):
    return math.nan

  def init(self, rng):
    return {'weights': jnp.asarray(START)}, {}

  def init_carry(self, rows):
    zeros, count = jnp.zeros(rows), jnp.zeros(rows, jnp.int32)
    tokens = jnp.zeros((rows, LENGTH), jnp.int32)
    data = dict(tokens=tokens, label=count, mask=zeros)
    return data | dict(total=zeros, steps=count, running=zeros > 0)

  def carried(self, carry, batch):
    select = functools.partial(jax.vmap(jnp.where), carry['running'])
    begun = {k: select(carry[k], 0 * carry[k]) for k in ('total', 'steps')}
    data = {k: select(carry[k], batch[k]) for k in DATA}
    return {**batch, **data, 'carry': begun}

  def apply(self, params, model_state, batch, row_keys=None):
    carry = batch.get('carry') or self.init_carry(len(batch['mask']))
    ones = jax.nn.one_hot(batch['tokens'], 3).sum(1)
    inputs = jnp.concatenate([ones, carry['total'][:, None]], 1)
    total, steps = inputs @ params['weights'], carry['steps'] + 1
    after = {k: batch[k] for k in DATA} | dict(total=total, steps=steps)
    after['running'] = (total < LIMIT) & (steps < MOST)
    return total, {'carry': after | {'total': self.factor * total}}

  def masks(self, batch):
    return {'rows': batch['mask'] * (1.0 + batch['label'])}

  def terms(self, forward):
    error = forward.logits - forward.batch['label']
    return (Term(jnp.square(error), name='error'),)


def config_of(steps=6, devices=1, **changes):
  plain = dict(schedule='constant', warmup_steps=0.0, clip_norm=0.0, b1=0.0)
  return config_schema.validate(dict(log_every=10) | dict(
    task='tests.train_lib.carry_test:Counter', batch_size=ROWS,
    dataset=dict(name='parity', length=LENGTH, test_examples=ROWS),
    mesh=dict(data=devices), phases=(dict(steps=steps),), tensorboard=False,
    optimizer=plain | dict(name='sgd', lr=RATE), **changes,
  ))  # fmt: skip


@functools.cache
def run(steps=6, devices=1, num_micro=1):
  """The state, loss and batch of each step, and the text of the program."""
  setup, records = Setup(config_of(steps, devices, num_micro=num_micro)), []
  with jax.set_mesh(setup.mesh), closing(setup.dataset.batches()) as batches:
    state = setup.init()
    for _ in range(steps):
      batch = next(batches)
      step, _ = setup.step(setup.phases[0], setup.put(batch))
      inputs = setup.frozen, setup.put(batch), {}, setup.rates
      state, metrics = step(state, *inputs)
      loss = metrics['loss'].compute()
      records.append((jax.device_get(state), loss, batch))
  return records, step.as_text()


def assert_equal(tree, expected, atol=0.0):
  same = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
  jax.tree.map(same, tree, expected)


def test_steps_equal_a_plain_loop():
  slots = [dict(total=0.0, steps=0, running=False) for _ in range(ROWS)]
  weights = np.float64(START)
  for state, loss, batch in run()[0]:
    value, slope, count = 0.0, np.zeros(4), 0.0
    for row, slot in enumerate(slots):
      if not slot['running']:
        slot.update({k: batch[k][row] for k in DATA}, total=0.0, steps=0)
      ones = np.bincount(slot['tokens'], minlength=3)
      inputs, steps = np.append(ones, slot['total']), slot['steps'] + 1
      total = inputs @ weights
      running = total < LIMIT and steps < MOST
      slot.update(total=total, steps=steps, running=running)
      mask, error = 1.0 + slot['label'], total - slot['label']
      value, count = value + mask * error**2, count + mask
      slope += 2 * mask * error * inputs
    weights -= RATE * slope / count
    carry = {k: np.array([slot[k] for slot in slots]) for k in slots[0]}
    assert_equal(state.carry, carry, 1e-5)
    assert_equal(state.params['weights'], weights, 1e-5)
    assert loss == pytest.approx(value / count, abs=1e-5)
  assert {*carry['steps'][~carry['running']]} >= {3, 4}  # they had gone on


@pytest.mark.parametrize('parts', [(8, 1), (1, 4), (8, 2), (2, 4)])
def test_devices_and_micro_batches_change_nothing(parts):
  records, text = run(6, *parts)
  for (state, *_), (expected, *_) in zip(records, run()[0], strict=True):
    assert_equal(state, expected, 1e-6)
  # No row leaves its device.
  assert {one.kind for one in compiled.collectives(text)} <= {'all-reduce'}


def test_a_carry_that_is_not_finite_is_not_kept(monkeypatch):
  monkeypatch.setattr(Counter, 'factor', np.inf)
  ((state, loss, batch),) = run(1)[0]
  assert (int(state.nonfinite), int(state.step)) == (1, np.isfinite(loss))
  assert not any(x.any() for x in jax.tree.leaves(state.carry))
  culprit = first_culprit(Setup(config_of()).task, state, {}, batch, {}, 1)
  assert culprit == "carry 'total'"


def train(workdir, steps=6, devices=1, every=3):
  """Trains, and returns the arrays of the last checkpoint."""
  more = dict(checkpoint=dict(every_steps=every), ema_decay=0.9)
  more['evals'] = dict(test=dict(type='classification', split='test'))
  trainer.train(config_of(steps, devices, **more), str(workdir))
  return find(workdir).read()


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_also_on_other_devices(tmp_path):
  expected = train(tmp_path / 'whole')
  shutil.rmtree(tmp_path / 'whole' / 'checkpoints' / '6')
  assert find(tmp_path / 'whole').read('carry/')['running'].any()
  for devices, atol in ((1, 0.0), (8, 1e-6)):
    resumed = shutil.copytree(tmp_path / 'whole', tmp_path / str(devices))
    assert_equal(train(resumed, devices=devices), expected, atol)
