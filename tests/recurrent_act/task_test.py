"""The loss and the metrics of sequences, against NumPy."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from core.errors import ConfigError
from dataset_lib import builder
from eval_lib import metrics, predictions
from launch import command_line
from recurrent_act.task import SequenceTask
from tests import losses
from train_lib import config_schema, sharding, trainer

ROWS = 8


def dataset(task='addition', **fields):
  fields = {'length': 3} | fields
  if task == 'addition':
    fields['digits'] = 1
  config = dict(
    name='recurrent_act.data:Graves', task=task, test_examples=ROWS - 2,
    **fields,
  )  # fmt: skip
  return builder.build(
    config, split='test', train=False, seed=0, batch_size=ROWS, num_threads=0
  )


def task_of(
  data, ponder_weight=0.1, num_targets=2, label_smoothing=0.0, **model
):
  fields = dict(cell='rnn', width=8, max_steps=2, num_targets=num_targets)
  config = {
    'dtype': 'float32',
    'model': {'name': 'recurrent_act.model:RecurrentModel', **fields, **model},
    'loss': dict(ponder_weight=ponder_weight, label_smoothing=label_smoothing),
  }
  SequenceTask.validate_config(config)
  return SequenceTask(config, data.info)


@functools.cache
def case():
  """(task, batch with two rows of padding, parameters)."""
  data = dataset()
  (batch,) = data.batches()
  task = task_of(data)
  params = sharding.unbox(jax.jit(task.init)(jax.random.key(0))[0])
  # Halts at the first or at the second repetition.
  params['repetition']['score']['kernel'] *= 20
  params['repetition']['score']['bias'] += 7.0
  return task, batch, params


@functools.cache
def answers():
  task, batch, params = case()
  logits, out = jax.jit(lambda p, b: task.apply(p, {}, b))(params, batch)
  return np.asarray(logits, np.float64), jax.device_get(out['ponder'])


def test_loss_is_that_of_the_paper_per_step_with_a_target():
  task, batch, params = case()
  logits, ponder = answers()
  scores = log_softmax(logits, -1)
  entropy, targets, cost = 0.0, 0, 0.0
  for row in range(ROWS - 2):
    for t in range(3):
      if batch['valid'][row, t]:
        cost += ponder['cost'][row, t]
      if batch['target_mask'][row, t]:
        targets += 1
        for place, digit in enumerate(batch['targets'][row, t]):
          entropy -= scores[row, t, place, digit]
  # Rows differ in length and some have no target, or it would prove little.
  assert 0 < targets < (ROWS - 2) * 2

  loss, got = losses.of(task)(params, batch)
  np.testing.assert_allclose(loss, (entropy + 0.1 * cost) / targets, rtol=1e-5)
  got = metrics.compute(got)
  assert got['cross_entropy'] == pytest.approx(entropy / targets, rel=1e-5)
  loss, _ = losses.of(task)(params, batch, {'ponder_weight': 0.7})
  np.testing.assert_allclose(loss, (entropy + 0.7 * cost) / targets, rtol=1e-5)


def test_smoothing_counts_every_target_of_a_step():
  task, batch, params = case()
  batch = jax.tree.map(jnp.asarray, batch)
  plain = task.evaluate(params, {}, batch)['cross_entropy'].compute()
  smooth = task_of(dataset(), ponder_weight=0.0, label_smoothing=0.2)
  loss, _ = losses.of(smooth)(params, batch)
  asked = batch['target_mask'][: ROWS - 2] > 0
  scores = log_softmax(answers()[0], -1)[: ROWS - 2].mean(-1).sum(-1)
  want = 0.8 * plain - 0.2 * scores[asked].mean()
  np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_metrics_count_real_inputs_and_targets():
  task, batch, params = case()
  logits, ponder = answers()
  correct = logits.argmax(-1) == batch['targets']
  whole, elements, steps, cost = [], [], [], []
  for row in range(ROWS - 2):
    asked = np.flatnonzero(batch['target_mask'][row])
    if len(asked):
      whole.append(correct[row, asked].all())
      elements += correct[row, asked].ravel().tolist()
    here = np.flatnonzero(batch['valid'][row])
    steps += ponder['steps'][row, here].tolist()
    cost += ponder['cost'][row, here].tolist()
  evaluate = jax.jit(lambda p, b: task.evaluate(p, {}, b))
  got = metrics.compute(evaluate(params, batch))
  assert got['accuracy'] == pytest.approx(np.mean(whole))
  assert got['element_accuracy'] == pytest.approx(np.mean(elements))
  assert got['steps'] == pytest.approx(np.mean(steps))
  assert got['steps_max'] == max(steps) == 2
  assert got['cost'] == pytest.approx(np.mean(cost), rel=1e-6)
  assert got['skipped'] == 0.0
  assert 1.0 < got['steps'] < 2.0


def test_outputs_are_of_the_last_target():
  task, batch, params = case()
  logits, ponder = answers()
  found = jax.jit(task.outputs)(params, {}, batch)
  for row in range(ROWS - 2):
    (places,) = np.nonzero(batch['target_mask'][row])
    valid = batch['valid'][row] > 0
    steps, size = ponder['steps'][row, valid], task.info.input_shape[1]
    cost = sum(task.model.flops((1, size), float(n)) for n in steps)
    if len(places):
      assert found['label'][row] == batch['targets'][row, places[-1], -1]
      wanted = logits[row, places[-1], -1][None]
      np.testing.assert_allclose(found['logits'][row], wanted, atol=1e-5)
    else:
      assert found['label'][row] == -1
    assert found['length'][row] == valid.sum()
    set_numbers = np.count_nonzero(batch['inputs'][row]) / valid.sum()
    assert found['difficulty'][row] == pytest.approx(set_numbers)
    assert found['steps'][row] == pytest.approx(steps.mean())
    assert found['flops'][row] == pytest.approx(cost)
  data = predictions.collect(
    dataset(), params, lambda p, b: task.outputs(p, {}, b)
  )
  np.testing.assert_array_equal(data['label'], found['label'][: ROWS - 2])


def test_a_sequence_is_right_if_all_its_targets_are():
  task, batch, _ = case()
  logits = np.eye(11, dtype=np.float32)[batch['targets']]
  # Row 0: one digit wrong. Elsewhere wrong only where nothing is asked.
  asked = batch['target_mask'] > 0
  row, t = np.argwhere(asked)[0]
  logits[row, t, 0] = np.roll(logits[row, t, 0], 1)
  logits[~asked] = 0.0
  logits[~asked, :, 5] = 1.0
  batch = jax.tree.map(jnp.asarray, batch)
  ponder = dict.fromkeys(('steps', 'cost', 'skipped'), batch['valid'])
  answer = jnp.asarray(logits), {'ponder': ponder}
  with mock.patch.object(task, 'apply', return_value=answer):
    got = metrics.compute(task.evaluate({}, {}, batch))
  sequences = asked.any(1).sum()
  assert got['accuracy'] == pytest.approx(1 - 1 / sequences)
  assert got['element_accuracy'] == pytest.approx(1 - 1 / (2 * asked.sum()))


def test_skipped_inputs_are_told_apart_by_their_kind():
  data = dataset('sparse_parity', length=6)
  (batch,) = data.batches()
  rule = {'name': 'halting.token_rules:SkipACT', 'mu': 2}
  task = task_of(data, num_targets=1, rule=rule)
  params = sharding.unbox(jax.jit(task.init)(jax.random.key(0))[0])
  # Every score is 2: every second input is skipped, which fits by chance.
  params['repetition']['score']['bias'] = jnp.full((1,), 50.0)
  evaluate = jax.jit(lambda p, b: task.evaluate(p, {}, b))
  got = metrics.compute(evaluate(params, batch))
  marked = batch['marked'][: ROWS - 2]
  skipped = np.tile([0.0, 1.0], 3)[None].repeat(ROWS - 2, 0)
  assert got['skipped'] == got['cost'] == got['steps'] == 0.5
  for name, kind in (('marked', marked), ('unmarked', 1 - marked)):
    want = (skipped * kind).sum() / kind.sum()
    assert got[f'skipped_{name}'] == pytest.approx(want)


def test_the_number_of_targets_is_that_of_the_data():
  data = dataset()
  (batch,) = data.batches()
  task = task_of(data, num_targets=3)
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  with pytest.raises(ConfigError, match=r'num_targets: .* targets, 2, got 3'):
    jax.eval_shape(lambda p, b: task.evaluate(p, {}, b), params, batch)


def test_data_without_targets_are_refused():
  config = dict(
    task='recurrent_act.task:SequenceTask', phases=(dict(steps=1),),
    model=dict(name='recurrent_act.model:RecurrentModel'),
    dataset=dict(name='parity', length=4),
  )  # fmt: skip
  with pytest.raises(ConfigError, match=r'^dataset: .* with targets'):
    config_schema.validate(config)


@pytest.mark.nightly
@pytest.mark.parametrize('rule', ['act', 'straight_through', 'fixed'])
def test_a_run_learns_parity(rule, tmp_path):
  # Fojo's thesis at a size for a test: vectors of 12 numbers.
  file = 'configs/recurrent_act/graves.py'
  config = command_line.load_config(f'{file}:task=parity,rule={rule}', [
    'tensorboard=false', 'mesh.data=1', 'loader.num_threads=0',
    'dataset.length=12', 'model.max_steps=3', 'phases.0.steps=2500',
  ])  # fmt: skip
  config_schema.validate(config)
  result = trainer.train(config, str(tmp_path / 'run'))
  assert result['test/accuracy'] > 0.95
