"""Configurations, splits and arguments that are not legal."""

import dataclasses
import subprocess
import sys
from typing import Annotated, Literal

import numpy as np
import pytest
from annotated_types import Interval

from dataset_lib import builder
from dataset_lib.errors import ConfigError
from dataset_lib.source import DatasetInfo

PARITY = dict(name='parity', length=4)
DIGITS = dict(name='digits')


@dataclasses.dataclass(kw_only=True)
class Squares:
  """A data set of the least size: no `where`, records one by one."""

  split: Literal['train', 'test']
  size: Annotated[int, Interval(ge=1, le=100)] = 10

  def __post_init__(self):
    self.info = DatasetInfo('tokens', (1,), 'int32', 2, (), self.size, 10**4)

  def __len__(self):
    return self.size

  def record(self, index):
    tokens = np.array([index**2], np.int32)
    return {'tokens': tokens, 'label': index % 2}


SQUARES = f'{__name__}:Squares'


FOLDER = dict(name='folder', root='/x', image_size=8)
TFDS = dict(name='tfds', builder='x', image_size=8)
IMAGES = dict(name='tests.fakes:FakeImages', image_size=8)
ILLEGAL = [
  (dict(name='parity'), 'dataset.length'),
  (PARITY | dict(length=0), 'dataset.length'),
  (PARITY | dict(lenght=8), 'dataset.lenght'),
  (PARITY | dict(data_seed=-1), 'dataset.data_seed'),
  (DIGITS | dict(image_size=-3), 'dataset.image_size'),
  (DIGITS | dict(image_size=8.0), 'dataset.image_size'),
  (DIGITS | dict(augment=('flop',)), 'dataset.augment'),
  (DIGITS | dict(augment=('flip', 'inception_crop')), 'dataset.augment'),
  (dict(name='folder', image_size=8), 'dataset.root'),
  (FOLDER | dict(root=''), 'dataset.root'),
  (dict(name='folder', root='/x'), 'dataset.image_size'),
  (FOLDER | dict(max_bad_share=2.0), 'dataset.max_bad_share'),
  (FOLDER | dict(resize_small=7), 'dataset.resize_small'),
  (FOLDER | dict(min_crop_area=0.0), 'dataset.min_crop_area'),
  (TFDS | dict(builder=3), 'dataset.builder'),
  (IMAGES | dict(num_classes=1), 'dataset.num_classes'),
  (dict(name=SQUARES, size=0), 'dataset.size'),
  (dict(name=SQUARES, sise=1), 'dataset.sise'),
  (dict(name=SQUARES, split='train'), 'dataset.split'),
  *(
    (dict(name=name), 'dataset.name')
    for name in ('imagenet', None, f'{__name__}:PARITY',
                 'no.such.module:Squares', '../x:Squares')
  ),
  (dict(), 'dataset.name'),
  ('digits', 'dataset'),
  (None, 'dataset'),
]  # fmt: skip


@pytest.mark.parametrize(('config', 'key'), ILLEGAL)
def test_illegal_configurations_name_the_key(config, key):
  with pytest.raises(ConfigError) as error:
    builder.validate(config, 'train')
  assert error.value.field == key
  assert str(error.value).startswith(f'{key}: expected ')


@pytest.mark.parametrize(
  ('config', 'split'),
  [
    *((PARITY, split) for split in ('validation', '', 3)),
    (DIGITS, 'tset'),
    (FOLDER, '../x'),
    (TFDS, 'train[:'),
    (TFDS, 'train; rm'),
    (dict(name=SQUARES), 'dev'),
  ],
)
def test_illegal_splits(config, split):
  with pytest.raises(ConfigError) as error:
    builder.validate(config, split)
  assert error.value.field == 'split'


@pytest.mark.parametrize(
  'split', ['train', 'train[:90%]', 'train[90%:]', 'train[5:10]+test', 'test']
)
def test_parts_of_tfds_splits(split):
  complete = builder.validate(
    dict(name='tfds', builder='x', image_size=8), split
  )
  assert complete['builder'] == 'x'


@pytest.mark.parametrize(
  ('arguments', 'key'),
  [
    (dict(batch_size=0), 'batch_size'),
    (dict(batch_size=-7), 'batch_size'),
    (dict(batch_size=10, host_count=4), 'batch_size'),
    (dict(host_index=1), 'host_index'),
    (dict(host_index=-1), 'host_index'),
    (dict(host_count=0), 'host_count'),
    (dict(seed=-1), 'seed'),
    (dict(seed=2**32), 'seed'),
    (dict(num_threads=-1), 'num_threads'),
    (dict(prefetch=0), 'prefetch'),
    (dict(start_step=-1), 'start_step'),
  ],
)
def test_illegal_arguments(arguments, key):
  start_step = arguments.pop('start_step', 0)
  legal = dict(split='train', train=True, seed=0, batch_size=16)
  with pytest.raises(ConfigError) as error:
    builder.build(PARITY, **{**legal, **arguments}).batches(start_step)
  assert error.value.field == key


def test_validation_completes_the_configuration():
  assert builder.validate(PARITY) == PARITY | dict(
    data_seed=0, train_examples=2**20, test_examples=4096
  )


def test_validation_imports_no_heavy_library(repository):
  code = (
    'import sys; from dataset_lib import builder;'
    "builder.validate(dict(name='tfds', builder='x', image_size=8));"
    "heavy = {'tensorflow', 'tensorflow_datasets', 'sklearn', 'grain', 'jax'};"
    'print(sorted(heavy & set(sys.modules)))'
  )
  result = subprocess.run(
    [sys.executable, '-c', code],
    cwd=repository,
    capture_output=True,
    text=True,
    check=True,
  )
  assert result.stdout.strip() == '[]'


def test_a_data_set_is_named_by_its_class():
  config = dict(name=SQUARES, size=7)
  assert builder.validate(config) == config
  data = builder.build(config, split='test', train=False, seed=0, batch_size=4)
  rows = [batch['tokens'][:, 0].tolist() for batch in data.batches()]
  assert rows == [[0, 1, 4, 9], [16, 25, 36, 0]]
  assert data.places() == {'Squares/test'}
