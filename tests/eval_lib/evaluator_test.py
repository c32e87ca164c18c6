"""The contract of every evaluator; wrong configurations."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from core.errors import ConfigError
from dataset_lib import builder
from eval_lib import evaluator
from eval_lib.metrics import Average, ByClass
from tests import contexts, fakes, wrong_values

DIGITS = dict(name='digits', image_size=8)
PARITY = dict(name='parity', length=8)
FAKE = dict(
  name='tests.fakes:FakeImages', image_size=8, train_examples=30,
  test_examples=30,
)  # fmt: skip
HEADS = dict(split='test', layers=(2, 4))
# Fields of an entry that measures `FAKE`.
ENTRIES = {kind: {} for kind in evaluator.EVALUATORS} | {
  'calibration': dict(HEADS, calibration_split='train'),
  'certificate': HEADS,
  'classification': dict(per_class=True),
  'fewshot': dict(shots=(1, 2), train_split='train', test_split='test'),
  'frontier': HEADS,
  'glue': dict(split='test', task='sst2'),
  'submitted': dict(path='/x/SST-2.tsv'),
}
# They read GLUE's files, see tests/launch/glue_test.py.
MEASURED = [kind for kind in ENTRIES if not kind.startswith('submi')]
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
    ('calibration_split', 'dev'), ('delta', 0.0),
    *(('layers', wrong) for wrong in (
      (4, 2), (0, 1), (2, 2), 4, ('4',), (1.0,),
    )),
  ],
  'frontier': [
    ('thresholds', (1.1,)), ('flops', (-1.0,)), ('calibration_split', 'dev'),
  ],
  'fewshot': [
    ('shots', (0,)), ('shots', (1, 1)), ('shots', (1.5,)),
    ('test_split', 'validation'), ('batch', 3),
  ],
}  # fmt: skip


def outside_of_types():
  for kind in ENTRIES:
    located = evaluator.locate(kind, 'type')
    for row in wrong_values.wrong_fields(located, ('context',)):
      yield kind, *row


@pytest.mark.parametrize(
  ('kind', 'field', 'value'),
  [*outside_of_types(), *((k, *row) for k, rows in ILLEGAL.items()
                          for row in rows)],
)  # fmt: skip
def test_illegal_fields_are_named(kind, field, value):
  entry = dict(type=kind) | ENTRIES[kind] | {field: value}
  with pytest.raises(ConfigError) as caught:
    evaluator.validate(dict(dataset=DIGITS, evals=dict(test=entry)))
  assert caught.value.field == f'evals.test.{field}'
  assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
  ('entry', 'match'),
  [
    ({}, r'\.type: expected'),
    (dict(type='calibration', split='test'),
     r'\.calibration_split: .*got .nothing'),
    (dict(type='fewshot', dataset=dict(name='no_such')),
     r'\.dataset\.name: expected'),
    ('fewshot', ': expected a dict'),
  ],
)  # fmt: skip
def test_wrong_entries_are_named(entry, match):
  with pytest.raises(ConfigError, match=f'^evals.test{match}'):
    evaluator.validate(dict(dataset=DIGITS, evals=dict(test=entry)))


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
  with (
    pytest.raises(ConfigError, match=f'^evals.test.dataset.{match}')
    if match else contextlib.nullcontext()
  ):  # fmt: skip
    entry = dict(type='classification') | entry
    contexts.evaluator_of(entry.pop('type'), runs, dict(info=info), **entry)


@dataclasses.dataclass(kw_only=True, eq=False)
class Partly(fakes.FakeImages):
  """Images of which every third has no label."""

  def describe(self, *arguments):
    super().describe(*arguments)
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


def results_of(kind, data, classes, entry, **context):
  """The results of an evaluator, with the names that it declares."""
  context |= dict(
    measure=jax.jit(accuracy_of), outputs=jax.jit(logits_of),
    features=jax.jit(lambda _, batch: batch['image'].mean((1, 2))),
  )  # fmt: skip
  data = FAKE | dict(name=data, num_classes=classes)
  built = contexts.evaluator_of(kind, data, context, **entry)
  variables = {'classes': jnp.zeros(classes)}
  results = built.measure(variables)
  assert built.measure(variables) == results  # a second pass is a whole pass
  names = {*built.metric_names(['accuracy', 'class_accuracy'])}
  # Few rows certify no threshold.
  assert {*results} - {'unlabelled'} == names - {'tau', 'bound'}
  return results


@pytest.mark.parametrize(
  ('kind', 'entry', 'classes'),
  [
    *((k, ENTRIES[k], 2) for k in MEASURED),
    ('classification', {}, 6),
    ('frontier', dict(HEADS, task='qqp', thresholds=(0.9, 0.5, 0.9)), 2),
  ],
)
def test_every_evaluator_keeps_the_contract(kind, entry, classes, tmp_path):
  """Named results of the rows alone, but for those without a label."""
  run = dict(kind=kind, classes=classes, entry=entry)
  results = results_of(data=FAKE['name'], **run)
  assert 'unlabelled' not in results
  for size, devices in ((7, 1), (16, 8)):
    put = contexts.rows_on(devices)
    again = results_of(data=FAKE['name'], **run, batch_size=size, put=put)
    assert again == pytest.approx(results)
  some = results_of(data=f'{__name__}:Partly', **run, workdir=tmp_path)
  splits = [field for field in entry if field.endswith('split')]
  assert some['unlabelled'] == 10 * (len(splits) or 1)
  if 'accuracy' in some:
    # Of the rows with labels, 4 have a multiple of 5 for an index.
    wrong = sum(i % classes > 0 for i in (5, 10, 20, 25))
    assert some['accuracy'] == pytest.approx(1 - wrong / 20)
