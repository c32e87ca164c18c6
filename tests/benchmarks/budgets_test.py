"""Readings of one checkpoint, against models built with these settings."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape import tape
from benchmarks import budgets, tape_report
from benchmarks.budgets import Setting
from core.errors import ConfigError
from serve_lib.engine import Engine
from tests import fakes
from tests.adatape import serving_test
from tests.benchmarks.tape_report_test import IMAGES, LEARNED

KEPT = (0, 3, 4, 7, 8, 9, 11, 12, 13, 15)


def batch_of(task, rows=12):
  return {'image': jnp.stack(serving_test.items_of(task, rows))}


def run(task, model, variables):
  """(logits, tape) of a model on the task's items."""
  inputs = task.inputs(batch_of(task))
  logits, out = jax.jit(model.apply)({'params': variables['params']}, inputs)
  return logits, out['tape']


@pytest.mark.nightly
def test_a_part_of_a_learned_bank_equals_a_bank_of_these_tokens():
  task, variables = serving_test.build(LEARNED, IMAGES)
  found = budgets.changed(task.model, Setting(1.5, 5, 0.5), KEPT)
  fields = {**LEARNED, 'threshold': 1.5, 'max_steps': 5, 'bank_size': len(KEPT)}
  scratch, _ = serving_test.build(fields, IMAGES)
  params = copy.deepcopy(variables['params'])
  bank = params['tape_bank']['tokens']
  params['tape_bank']['tokens'] = np.asarray(bank)[list(KEPT)]
  logits, tape = run(task, found, variables)
  wanted, reference = run(task, scratch.model, {'params': params})
  np.testing.assert_allclose(logits, wanted, atol=1e-5)
  for name in ('length', 'indices'):
    np.testing.assert_array_equal(tape[name], reference[name])
  assert tape['bank_size'] == len(KEPT)
  shape = (16, 16, 3)
  assert found.flops(shape, 2.5) == scratch.model.flops(shape, 2.5)


@pytest.mark.nightly
def test_a_part_of_an_input_bank_equals_hiding_the_other_positions():
  task, variables = serving_test.build(serving_test.IMAGE, IMAGES)
  setting = Setting(1.5, 5, 0.6)
  hidden = np.ones((12, 16), bool)
  hidden[:, KEPT] = False

  def read(model, images):
    x, bank = model.embed(images)
    encoder = model.encoder
    x = encoder._blocks(x, None, None, range(encoder.insert_after))
    norm, settings = encoder.tape_norm, encoder.reading
    query = norm(x.mean(1), settings.query_dim)
    given = bank, query, settings
    return tape.read(*given, normalize=norm, dropped=jnp.array(hidden))

  whole = budgets.changed(task.model, setting)
  given = {'params': variables['params']}, task.inputs(batch_of(task))
  wanted = jax.jit(lambda *a: whole.apply(*a, method=read))(*given)
  found = budgets.changed(task.model, setting, KEPT)
  _, got, size = jax.jit(lambda *a: found.apply(*a, method='read'))(*given)
  assert size == len(KEPT)
  np.testing.assert_array_equal(got.length, wanted.length)
  np.testing.assert_allclose(got.tokens, wanted.tokens, atol=1e-5)
  on_tape = np.asarray(got.mask) > 0
  picks = np.array(KEPT)[np.asarray(got.indices)]
  np.testing.assert_array_equal(picks[on_tape], wanted.indices[on_tape])


@pytest.mark.nightly
def test_a_row_of_the_sweep_equals_a_model_built_with_its_settings():
  task, variables = serving_test.build(serving_test.IMAGE, IMAGES)
  setting, shape = Setting(2.65, 7, 1.0), (16, 16, 3)
  changed = copy.copy(task)
  changed.model = budgets.changed(task.model, setting)
  data = tape_report.spread_rows(IMAGES, 'test', 20)
  row = budgets.measure(changed, variables, data)
  fields = {**serving_test.IMAGE, 'threshold': 2.65, 'max_steps': 7}
  scratch, _ = serving_test.build(fields, IMAGES)
  (batch,) = data.batches()
  real = {'image': jnp.array(batch['image'][:20])}
  logits, out = jax.jit(scratch.apply)(variables['params'], {}, real)
  lengths = np.asarray(out['tape']['length']).tolist()
  assert len(set(lengths)) > 1
  assert setting.name == 'tau 2.65, T 7, bank 100 %'
  right = logits.argmax(-1) == batch['label'][:20]
  assert row['quality'] == pytest.approx(float(right.mean()))
  assert row['tape_length_mean'] == pytest.approx(np.mean(lengths))
  costs = [scratch.model.flops(shape, n) for n in lengths]
  assert row['flops'] == pytest.approx(np.mean(costs))


def test_the_most_read_tokens_are_kept():
  counts = np.array([3, 0, 5, 3, 9, 0])
  assert budgets.most_read(counts, 0.5) == (0, 2, 4)
  assert budgets.most_read(counts, 0.01) == (4,)
  assert budgets.most_read(counts, 1.0) == tuple(range(6))


@pytest.mark.parametrize('model', [serving_test.IMAGE, LEARNED])
def test_too_small_a_part_of_the_bank_is_named(model):
  task, _ = serving_test.build(model, IMAGES)
  with pytest.raises(
    ConfigError, match=r'bank_size: expected at least .* = 12'
  ):
    budgets.changed(task.model, Setting(1.0, 6, 0.5), KEPT)
  wrong = r'bank_size: .* = 22 tokens \(of an input bank: .*\), got 1?\d'
  with pytest.raises(ConfigError, match=wrong):
    budgets.changed(task.model, Setting(1.0, 11, 1.0), size=16)


@dataclasses.dataclass(kw_only=True, eq=False)
class Framed(fakes.FakeImages):
  """Images that are resized and cropped."""

  resize_small: int = 0

  def __post_init__(self):
    given = self.resize_small
    super().__post_init__()
    self.resize_small = given
    self.describe(self.num_classes, (), self.test_examples)


@pytest.mark.parametrize('resize_small', [0, 16, 24])
def test_the_images_that_are_timed_are_those_that_are_measured(resize_small):
  name = 'tests.benchmarks.budgets_test:Framed'
  framed = IMAGES | {'name': name, 'resize_small': resize_small}
  task, variables = serving_test.build(LEARNED, framed)
  data = tape_report.spread_rows(framed, 'test', 20)
  items = tape_report.chosen_inputs(data.source, np.arange(20))
  chain, policy = budgets.serve_prepared(task, variables)
  with Engine(chain, policy, policy.lengths, (4,)) as engine:
    answers = [[*one.probabilities.values()] for one in engine.predict(items)]
  given = {'image': jnp.asarray(np.stack(items))}
  logits = jax.jit(task.apply)(variables['params'], {}, given)[0]
  np.testing.assert_allclose(answers, jax.nn.softmax(logits), atol=1e-5)
