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


def build(**arguments):
  legal = dict(split='train', train=True, seed=0, batch_size=16)
  return builder.build(PARITY, **{**legal, **arguments})


@pytest.mark.parametrize(
  ('config', 'key'),
  [
    (dict(name='parity'), 'dataset.length'),
    (dict(name='parity', length=0), 'dataset.length'),
    (dict(name='parity', length=8, lenght=8), 'dataset.lenght'),
    (dict(name='parity', length=8, data_seed=-1), 'dataset.data_seed'),
    (dict(name='digits', image_size=-3), 'dataset.image_size'),
    (dict(name='digits', image_size=8.0), 'dataset.image_size'),
    (dict(name='digits', augment=('flop',)), 'dataset.augment'),
    (dict(name='folder', image_size=8), 'dataset.root'),
    (dict(name='folder', root='', image_size=8), 'dataset.root'),
    (dict(name='folder', root='/x'), 'dataset.image_size'),
    (
      dict(name='folder', root='/x', image_size=8, max_bad_share=2.0),
      'dataset.max_bad_share',
    ),
    (
      dict(name='folder', root='/x', image_size=8, resize_small=7),
      'dataset.resize_small',
    ),
    (
      dict(name='folder', root='/x', image_size=8, min_crop_area=0.0),
      'dataset.min_crop_area',
    ),
    (
      dict(name='digits', augment=('flip', 'inception_crop')),
      'dataset.augment',
    ),
    (dict(name='tfds', image_size=8, builder=3), 'dataset.builder'),
    (
      dict(name='fake_images', image_size=8, num_classes=1),
      'dataset.num_classes',
    ),
    (dict(name='imagenet'), 'dataset.name'),
    (dict(name=None), 'dataset.name'),
    (dict(), 'dataset.name'),
    ('digits', 'dataset'),
    (None, 'dataset'),
  ],
)
def test_illegal_configurations_name_the_key(config, key):
  with pytest.raises(ConfigError) as error:
    builder.validate(config)
  assert error.value.field == key
  assert str(error.value).startswith(f'{key}: expected ')


@pytest.mark.parametrize(
  ('name', 'split'),
  [
    (PARITY, 'validation'),
    (PARITY, ''),
    (PARITY, 3),
    (DIGITS, 'tset'),
    (dict(name='folder', root='/x', image_size=8), '../x'),
    (dict(name='tfds', builder='x', image_size=8), 'train[:'),
    (dict(name='tfds', builder='x', image_size=8), 'train; rm'),
  ],
)
def test_illegal_splits(name, split):
  with pytest.raises(ConfigError) as error:
    builder.validate(name, split)
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
    (dict(seed=-1), 'seed'),
    (dict(seed=2**32), 'seed'),
    (dict(num_threads=-1), 'num_threads'),
    (dict(prefetch=0), 'prefetch'),
  ],
)
def test_illegal_arguments(arguments, key):
  with pytest.raises(ConfigError) as error:
    build(**arguments)
  assert error.value.field == key


def test_illegal_start_step():
  with pytest.raises(ConfigError) as error:
    build().batches(-1)
  assert error.value.field == 'start_step'


def test_validation_completes_the_configuration():
  complete = builder.validate(dict(name='parity', length=8))
  assert complete == dict(
    name='parity',
    length=8,
    data_seed=0,
    train_examples=2**20,
    test_examples=4096,
  )


def test_the_default_uses_every_core():
  assert 1 <= builder.default_num_threads() <= builder.MAX_THREADS


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


def test_a_data_set_is_named_by_its_class():
  config = dict(name=SQUARES, size=7)
  assert builder.validate(config) == config
  data = builder.build(config, split='test', train=False, seed=0, batch_size=4)
  rows = [batch['tokens'][:, 0].tolist() for batch in data.batches()]
  assert rows == [[0, 1, 4, 9], [16, 25, 36, 0]]
  assert data.places() == {'Squares/test'}


@pytest.mark.parametrize(
  ('config', 'split', 'field'),
  [
    (dict(name=SQUARES, size=0), 'train', 'dataset.size'),
    (dict(name=SQUARES, sise=1), 'train', 'dataset.sise'),
    (dict(name=SQUARES, split='train'), 'train', 'dataset.split'),
    (dict(name=SQUARES), 'dev', 'split'),
    (dict(name=f'{__name__}:PARITY'), 'train', 'dataset.name'),
    (dict(name='no.such.module:Squares'), 'train', 'dataset.name'),
    (dict(name='../x:Squares'), 'train', 'dataset.name'),
  ],
)
def test_illegal_fields_of_a_named_class(config, split, field):
  with pytest.raises(ConfigError) as error:
    builder.validate(config, split)
  assert error.value.field == field
