"""Expensive fixtures that several files share."""

import pytest

from dataset_lib import builder, tokenizer
from tests.eat import small
from tests.eat.calibrated import SIZES, calibrate, task_of, write_data
from tests.eat.policies import WORDS


@pytest.fixture(scope='package')
def finished(tmp_path_factory):
  """(directory, task, variables) of a run with a calibration."""
  directory = tmp_path_factory.mktemp('run')
  dataset = write_data(directory)
  model, variables = small.build(**SIZES)
  tokenizer.load(dataset['tokenizer']).save(directory / 'tokenizer.json')
  calibrate(directory, dataset, model, variables, epsilon=0.2, delta=0.1)
  info = builder.build_source(dataset, 'train').info
  return directory, task_of(model, info, dataset), variables


@pytest.fixture
def run(finished, tmp_path):
  """The same with a directory that a test may change."""
  directory, task, variables = finished
  for name in ('calibration.json', 'tokenizer.json'):
    (tmp_path / name).write_text((directory / name).read_text())
  return tmp_path, task, variables


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  path = tmp_path_factory.mktemp('words') / 'vocab.txt'
  path.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS]))
  return tokenizer.load(path)
