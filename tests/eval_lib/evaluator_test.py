"""Evaluators by name, wrong configurations, and a pass against NumPy."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError
from dataset_lib import builder
from eval_lib import evaluator
from eval_lib.metrics import Average, ByClass, Maximum, Union, Variance
from tests import contexts, fakes, wrong_values

DIGITS = dict(name='digits', image_size=8)
PARITY = dict(name='parity', length=8)
FAKE = dict(name='tests.fakes:FakeImages', image_size=8)


LEGAL = {kind: {} for kind in evaluator.EVALUATORS} | {
  'calibration': dict(split='test', calibration_split='train'),
  'certificate': dict(split='test'),
  'frontier': dict(split='test'),
  'submitted': dict(path='/x/SST-2.tsv'),
}
# Other than outside of the annotated types, see below.
ILLEGAL = {
  'classification': [
    ('splits', 'test'), ('split', 'dev'), ('dataset', 'digits'),
    *(('type', kind) for kind in (
      'clasification', 'no_such_module:Evaluator', 'eval_lib.fewshot:No', 3,
      None, ':', 'math:sqrt', {},
    )),
  ],
  'calibration': [
    ('calibration_split', 'dev'), ('layers', (4, 2)), ('delta', 0.0),
  ],
  'frontier': [
    ('thresholds', (1.1,)), ('flops', (-1.0,)), ('calibration_split', 'dev'),
  ],
  'fewshot': [
    ('shots', (0,)), ('shots', (1, 1)), ('shots', (1.5,)),
    ('test_split', 'validation'), ('batch', 3),
  ],
}  # fmt: skip


def assert_refused(kind, field, value):
  entry = dict(type=kind) | LEGAL[kind] | {field: value}
  with pytest.raises(ConfigError) as caught:
    evaluator.validate(dict(dataset=DIGITS, evals=dict(test=entry)))
  assert caught.value.field == f'evals.test.{field}'
  assert str(caught.value).startswith(f'evals.test.{field}: expected ')
  assert repr(value) in str(caught.value)


@pytest.mark.parametrize('kind', LEGAL)
def test_values_outside_of_the_type_of_a_field_name_it(kind):
  located = evaluator.locate(kind, 'type')
  for field, value in wrong_values.wrong_fields(located, ('context',)):
    assert_refused(kind, field, value)


@pytest.mark.parametrize(
  ('kind', 'field', 'value'),
  [(kind, *row) for kind, rows in ILLEGAL.items() for row in rows],
)
def test_illegal_fields_are_named(kind, field, value):
  assert_refused(kind, field, value)


@pytest.mark.parametrize(
  ('runs', 'entry', 'match'),
  [
    (DIGITS, {}, r'\.type: expected'),
    (DIGITS, dict(type='calibration', split='test'),
     r'\.calibration_split: .*got .nothing'),
    (DIGITS, dict(type='fewshot', dataset=dict(name='no_such')),
     r'\.dataset\.name: expected'),
    (DIGITS, 'fewshot', ': expected a dict'),
  ],
)  # fmt: skip
def test_wrong_entries_are_named(runs, entry, match):
  with pytest.raises(ConfigError, match=f'^evals.test{match}'):
    evaluator.validate(dict(dataset=runs, evals=dict(test=entry)))


@pytest.mark.parametrize(
  ('runs', 'changes', 'entry', 'match'),
  [
    (DIGITS, {}, dict(type='fewshot', dataset=DIGITS | dict(image_size=16)),
     r'input_shape: expected \(8, 8, 3\)'),
    # Images do not fit a model of tokens.
    (DIGITS, {}, dict(dataset=PARITY), 'input_key: '),
    (PARITY, {}, dict(dataset=DIGITS), 'input_key: '),
    (DIGITS, {}, dict(dataset=FAKE | dict(num_classes=7)), 'class_names.*10 c'),
    (DIGITS, dict(num_classes=11, class_names=()), {}, 'num_classes.* 11'),
    (DIGITS, {}, {}, ''),
    (DIGITS, {}, dict(type='fewshot', dataset=FAKE | dict(num_classes=7)), ''),
  ],
)  # fmt: skip
def test_inputs_and_classes_must_be_those_of_the_model(
  runs, changes, entry, match
):
  info = builder.build_source(runs, 'test').info
  info = dataclasses.replace(info, **changes)
  context = contexts.eval_context(runs, info=info)
  with (
    pytest.raises(ConfigError, match=f'^evals.x.dataset.{match}')
    if match else contextlib.nullcontext()
  ):  # fmt: skip
    evaluator.build('x', dict(type='classification') | entry, context)


def measure(variables, batch):
  """Statistics of the pixels of each image, and which labels there are."""
  images, mask = batch['image'].astype(jnp.float32), batch['mask']
  values = images.sum((1, 2, 3)) * variables['scale']
  labels = jax.nn.one_hot(batch['label'], 20)
  return {
    'mean': Average.from_values(values, mask),
    'variance': Variance.from_values(values, mask),
    'maximum': Maximum.from_values(values, mask),
    'labels': Union((labels * mask[:, None] > 0).any(0)),
  }


@pytest.mark.parametrize(
  ('batch_size', 'devices'), [(359, 1), (64, 1), (7, 1), (64, 8), (512, 8)]
)
def test_equals_numpy_for_any_batch_size_and_device_count(batch_size, devices):
  context = contexts.eval_context(
    DIGITS, batch_size=batch_size, measure=jax.jit(measure),
    put=contexts.rows_on(devices),
  )  # fmt: skip
  entry = dict(type='classification', split='test', every_steps=7)
  built = evaluator.build('test', entry, context)
  assert built.every_steps == 7
  result = built.run({'scale': jnp.float32(0.5)})
  source = builder.build_source(DIGITS, 'test')
  records = [source.record(row) for row in range(len(source))]
  values = np.array([record['image'].sum() for record in records]) * 0.5
  expected = dict(
    mean=values.mean(), variance=values.var(), maximum=values.max(),
    labels=len({record['label'] for record in records}) / 20,
  )  # fmt: skip
  assert result == pytest.approx(expected, rel=1e-5)
  # A second pass is a whole pass.
  assert built.run({'scale': jnp.float32(0.5)}) == result


@dataclasses.dataclass(kw_only=True, eq=False)
class Partly(fakes.FakeImages):
  """Images of which every third has no label."""

  def describe(self, *given):
    super().describe(*given)
    self.info = dataclasses.replace(self.info, unlabelled=True)

  def record(self, index):
    record = super().record(index)
    return record | ({} if index % 3 else {'label': -1})


def logits_of(variables, batch):
  """Logits `[B, 2, C]` that are right in four of five rows."""
  label = jnp.where(batch['index'] % 5 == 0, 0, batch['label'])
  one = jax.nn.one_hot(label, variables['classes'].shape[0])
  return {'logits': jnp.stack([one, 2 * one], 1)}


def accuracy_of(variables, batch):
  logits = logits_of(variables, batch)['logits'][:, -1]
  right = logits.argmax(-1) == batch['label']
  classes = logits.shape[-1]
  return {
    'accuracy': Average.from_values(right, batch['mask']),
    'class_accuracy': ByClass.of(right, batch['mask'], batch['label'], classes),
  }


@pytest.mark.parametrize(
  ('kind', 'entry', 'classes', 'left_out'),
  [
    ('classification', dict(per_class=True), 2, 10),
    ('classification', {}, 6, 10),
    ('glue', dict(split='test', task='sst2'), 2, 10),
    ('fewshot', dict(shots=(1, 2)), 2, 20),
    (
      'calibration',
      dict(split='test', calibration_split='train', layers=(2, 4)),
      2,
      20,
    ),
    ('certificate', dict(split='test', layers=(2, 4)), 2, 10),
    ('frontier', dict(split='test', layers=(2, 4)), 2, 10),
  ],
)
def test_rows_without_labels_are_left_out_and_counted(
  kind, entry, classes, left_out
):
  given = dict(image_size=8, num_classes=classes)
  given |= dict(train_examples=30, test_examples=30)
  results = []
  for name in ('tests.eval_lib.evaluator_test:Partly', FAKE['name']):
    context = contexts.eval_context(
      given | {'name': name},
      measure=jax.jit(accuracy_of),
      outputs=jax.jit(logits_of),
      features=jax.jit(lambda _, batch: batch['image'].mean((1, 2))),
    )
    one = evaluator.build('test', dict(type=kind) | entry, context)
    found = one.measure({'classes': jnp.zeros(classes)})
    assert found.pop('unlabelled', 0) == (left_out if not results else 0)
    names = one.metric_names(['accuracy', 'class_accuracy'])
    # No few rows certify a threshold.
    assert {*found} == {*names} - {'tau', 'bound'}
    results.append(found)
  if kind in ('classification', 'glue'):
    # Of the rows with labels, 4 have a multiple of 5 for an index.
    wrong = sum(i % classes > 0 for i in (5, 10, 20, 25))
    assert results[0]['accuracy'] == pytest.approx(1 - wrong / 20)
