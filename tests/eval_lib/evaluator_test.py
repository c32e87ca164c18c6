"""Evaluators are found by name, and configurations checked without data."""

import dataclasses

import ml_collections
import pytest

from dataset_lib.errors import ConfigError
from eval_lib import classification, evaluator, fewshot

DIGITS = dict(name='digits', image_size=8)
PARITY = dict(name='parity', length=8)


def config(**entry):
  return ml_collections.ConfigDict(
    dict(dataset=DIGITS, evals=dict(test=entry))
  ).lock()


def test_type_names_and_module_names_find_the_same_class():
  for kind in ('classification', 'eval_lib.classification:Evaluator'):
    assert evaluator.locate(kind, 'k') is classification.Evaluator
  assert evaluator.locate('fewshot', 'k') is fewshot.Evaluator


@pytest.mark.parametrize(
  'kind',
  [
    'clasification',
    'no_such_module:Evaluator',
    'eval_lib.fewshot:No',
    3,
    None,
    ':',
    'math:sqrt',
  ],
)
def test_unknown_types_are_named(kind):
  with pytest.raises(ConfigError, match=r'^evals.test.type: expected one of'):
    evaluator.validate(config(type=kind))


@pytest.mark.parametrize(
  ('legal', 'changes', 'key'),
  [
    (dict(type='classification', every_steps=200), dict(every_steps=-1), ''),
    (dict(type='fewshot', shots=(1, 5)), dict(shots=(0, 5)), '.shots'),
    (
      dict(type='fewshot', dataset=dict(name='fake_images', image_size=8)),
      dict(dataset=dict(name='fake_images', image_size=9)),
      '',
    ),
  ],
)
def test_legal_entries_pass(legal, changes, key):
  evaluator.validate(config(**legal))
  assert key_of(**legal | changes).startswith(f'evals.test{key}')


def test_a_run_may_have_no_evaluators():
  assert evaluator.validate(dict(dataset=DIGITS, evals={})) is None


def key_of(**entry):
  with pytest.raises(ConfigError) as caught:
    evaluator.validate(config(**entry))
  return caught.value.field


def test_errors_name_their_place():
  kind = dict(type='classification')
  assert key_of(**kind, splits='test') == 'evals.test.splits'
  assert key_of(**kind, split='dev') == 'evals.test.split'
  assert key_of(**kind, split=3) == 'evals.test.split'
  assert key_of(**kind, every_steps=1.5) == 'evals.test.every_steps'
  assert key_of(**kind, dataset='digits') == 'evals.test.dataset'
  assert key_of() == 'evals.test.type'


def test_own_data_set_is_checked_at_its_place():
  kind = dict(type='fewshot')
  unknown = dict(name='no_such')
  assert key_of(**kind, dataset=unknown) == 'evals.test.dataset.name'
  other_size = dict(name='digits', image_size=16)
  assert key_of(**kind, dataset=other_size) == 'evals.test.dataset.image_size'


@pytest.mark.parametrize(
  ('runs', 'other'),
  [(DIGITS, PARITY), (PARITY, DIGITS)],
)
def test_images_do_not_fit_a_model_of_tokens(runs, other):
  entry = dict(type='classification', dataset=other)
  with pytest.raises(ConfigError, match=r'^evals.test.dataset.name: expected'):
    evaluator.validate(dict(dataset=runs, evals=dict(test=entry)))


def test_classes_must_be_those_of_the_model():
  context = evaluator.EvalContext(
    measure=lambda variables, batch: {},
    features=lambda variables, batch: None,
    put=lambda batch: batch,
    seed=0,
    batch_size=8,
    dataset=DIGITS,
    workdir='',
    num_classes=10,
  )
  other = dict(name='fake_images', image_size=8, num_classes=7)
  evaluator.build('own', dict(type='classification'), context)
  evaluator.build('few', dict(type='fewshot', dataset=other), context)
  entry = dict(type='classification', dataset=other)
  with pytest.raises(ConfigError, match=r'^evals.far.dataset: .*10 classes'):
    evaluator.build('far', entry, context)
  one_more = dataclasses.replace(context, num_classes=11)
  with pytest.raises(ConfigError, match=r'^dataset: .*11 classes'):
    evaluator.build('own', dict(type='classification'), one_more)


def test_an_entry_must_be_a_mapping():
  with pytest.raises(ConfigError, match=r'^evals.test: expected a dict'):
    evaluator.validate(dict(dataset=DIGITS, evals=dict(test='fewshot')))
