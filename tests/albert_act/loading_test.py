"""From a run's directory to what the engine takes; what is refused."""

import shutil

import pytest

from albert_act import loading
from dataset_lib.errors import ConfigError
from tests.albert_act import tiny_run
from train_lib import loading as runs
from train_lib import strict_json
from train_lib.checkpoint_io import CheckpointError


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return tiny_run.made(tmp_path_factory, 'glue')


def test_a_run_becomes_chain_policy_and_lengths(run, tmp_path):
  # Serving needs neither the data nor the corpus.
  copy = shutil.copytree(run, tmp_path / 'copy')
  chain, policy, lengths = loading.load(copy, options={'iterations': 2})
  assert lengths == (16, 32)
  assert (chain.iterations, chain.num_stages) == (2, 3)
  assert chain.pad_id == 0
  assert policy.class_names == ('negative', 'positive')
  assert policy.max_length == 32
  assert policy.encode('w1 w2').length == 4


def test_what_is_asked_is_obeyed(run):
  loaded = loading.load(
    run, lengths=(24, 8), options={'max_characters': 5}, step=tiny_run.STEP
  )
  assert loaded.lengths == (8, 24)
  assert loaded.chain.iterations == 12
  with pytest.raises(ValueError, match='at most 5 characters'):
    loaded.policy.encode('w1 w2 w3')


@pytest.fixture
def unread(monkeypatch):
  """No parameters may be read."""

  def refuse(*_):
    raise AssertionError('the checkpoint was read')

  monkeypatch.setattr(runs, 'load_params', refuse)


@pytest.mark.parametrize(
  ('arguments', 'key', 'expected'),
  [
    (dict(options={'tau': 0.9}), 'serve.tau', 'iterations'),
    (dict(options={'iterations': 0}), 'serve.iterations', '[1, '),
    (dict(options={'iterations': 'many'}), 'serve.iterations', 'integer'),
    (dict(options={'max_characters': 0}), 'serve.max_characters', '[1, '),
    (dict(thresholds={'forum': 0.9}), 'thresholds', 'none for an ALBERT'),
    (dict(minimum_retention={'forum': 0.9}), 'minimum_retention', 'none for'),
    (dict(lengths=(8, 64)), 'lengths', 'from 1 to 32'),
    (dict(lengths=(4,)), 'lengths', 'the longest at least 5'),
  ],
)  # fmt: skip
def test_wrong_arguments_are_answered_at_once(
  run, unread, arguments, key, expected
):
  with pytest.raises(ConfigError) as error:
    loading.load(run, **arguments)
  assert error.value.field == key
  assert expected in error.value.expected


def test_a_fixed_depth_is_refused(tmp_path_factory, unread):
  run = tiny_run.made(tmp_path_factory, 'glue', 'fixed')
  with pytest.raises(ConfigError) as error:
    loading.load(run)
  assert error.value.field == 'model.halting'
  assert 'a fixed depth saves nothing' in error.value.expected


def changed(run, to, task, model):
  """A copy of a run with another task and model."""
  copy = shutil.copytree(run, to)
  config = strict_json.loads((copy / 'config.json').read_text())
  config |= {'task': task, 'model': model(config['model'])}
  strict_json.write(copy / 'config.json', config)
  return copy


def test_groups_are_refused(run, unread, tmp_path):
  copy = changed(
    run, tmp_path / 'copy', 'albert_act.task:FineTune',
    lambda model: model | {'num_groups': 2},
  )  # fmt: skip
  with pytest.raises(ConfigError) as error:
    loading.load(copy)
  assert error.value.field == 'model.num_groups'


@pytest.mark.parametrize('other', ['bert', 'pretraining'])
def test_another_model_is_refused(
  run, unread, tmp_path, tmp_path_factory, other
):
  name = 'albert_act.model:AlbertPretraining'
  if other == 'pretraining':
    copy = tiny_run.made(tmp_path_factory, 'pretrain')
  else:
    name = 'model_lib.bert:BertClassifier'
    copy = changed(
      run, tmp_path / 'copy',
      'train_lib.text_classification:TextClassification',
      lambda model: {'name': name, 'variant': 'tiny'},
    )  # fmt: skip
  with pytest.raises(ConfigError) as error:
    loading.load(copy)
  assert (error.value.field, error.value.given) == ('model.name', name)
  assert 'albert_act.model:AlbertClassifier' in error.value.expected


def test_a_step_and_a_directory_that_are_not_there(run, tmp_path):
  with pytest.raises(CheckpointError):
    loading.load(run, step=7)
  with pytest.raises(ConfigError, match='workdir: expected the directory of'):
    loading.load(tmp_path)
