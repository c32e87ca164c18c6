"""Configurations, splits and arguments that are not legal."""

import dataclasses
import subprocess
import sys
from typing import Annotated, Literal

import numpy as np
import pytest
from annotated_types import Interval

from core.errors import ConfigError
from dataset_lib import builder
from dataset_lib.source import DatasetInfo, Drawn, Indexed
from tests import wrong_values
from tests.dataset_lib.batches import build, take


@dataclasses.dataclass(kw_only=True)
class Squares(Indexed):
  """A data set of the least size: no `where`, records one by one."""

  split: Literal['train', 'test']
  size: Annotated[int, Interval(ge=1, le=100)] = 10

  def __post_init__(self):
    self.info = DatasetInfo('tokens', (1,), 'int32', 2, (), self.size, 10**4)

  def record(self, index):
    tokens = np.array([index**2], np.int32)
    return {'tokens': tokens, 'label': index % 2}


@dataclasses.dataclass(kw_only=True)
class Epochs(Drawn):
  """Rows that say in which epoch they are drawn."""

  split: Literal['train', 'test']

  def __post_init__(self):
    self.info = DatasetInfo('tokens', (2,), 'int32', 2, (), 8)

  def draw(self, seed, epochs, indices):
    tokens = np.stack([epochs, indices], 1).astype(np.int32)
    return {'tokens': tokens, 'label': np.zeros(len(indices), np.int32)}


SQUARES = f'{__name__}:Squares'
PARITY = dict(name='parity', length=4)
DIGITS = dict(name='digits')
FOLDER = dict(name='folder', root='/x', image_size=8)
TFDS = dict(name='tfds', builder='x', image_size=8)
RECORDS = dict(name='records', directory='/x', num_classes=2, image_size=8)
IMAGES = dict(name='tests.fakes:FakeImages', image_size=8)
GLUE = dict(name='glue', task='sst2', directory='/x', tokenizer='/x')
PROBING = GLUE | dict(name='probing', task='past_present')
TEXTS = dict(name='texts', path='/x', tokenizer='/x')
TAGS = dict(name='tags', directory='/x', tokenizer='/x')
PRETRAINING = dict(name='pretraining', directory='/x')
LEGAL = (
  PARITY, DIGITS, FOLDER, TFDS, RECORDS, IMAGES, GLUE, PROBING, TAGS,
  TEXTS, PRETRAINING, dict(name=SQUARES),
)  # fmt: skip
# Other than outside of the annotated types, see below.
ILLEGAL = [
  ('name', {}, ('imagenet', None, f'{__name__}:PARITY',
                'no.such.module:Squares', '../x:Squares',
                'dataset_lib.source:Indexed', 'dataset_lib.source:Source')),
  ('letters', PARITY, (2,)),
  ('lenght', PARITY, (8,)),
  ('augment', DIGITS,
   (('flop',), ('flip', 'flip'), ('flip', 'inception_crop'))),
  ('randaugment', DIGITS, ((0, 5), (2, 31), (2,))),
  ('resize_small', FOLDER, (7,)),
  ('root', FOLDER, ('/x\0',)),
  ('split', dict(name=SQUARES), ('train',)),
  ('builder', TFDS, ('huggingface:x', 'kaggle:x', '../x', 'x/a=1', 'X', 'x;y',
                     'x/..')),
  ('max_length', TEXTS, (4, -1)),
  ('split_shares', TEXTS, ((0.5, 0.25, 0.25), (0.9, 0.2, -0.1), (1.0,))),
  ('task', PROBING, ('', '../secret', 'a/b')),
  ('tokenizer', PRETRAINING, ('x',)),
  ('length_buckets', GLUE, ((64, 32), (32, 32), (2,))),
]  # fmt: skip


@pytest.mark.parametrize('config', LEGAL, ids=lambda config: config['name'])
def test_values_outside_of_the_type_of_a_field_name_it(config):
  builder.validate(config)
  kind = builder.source_class(config['name'])
  for field, value in wrong_values.wrong_fields(kind, ('split',)):
    with pytest.raises(ConfigError, match=f'^dataset.{field}: expected '):
      builder.validate(config | {field: value})


@pytest.mark.parametrize(('field', 'config', 'values'), ILLEGAL)
def test_illegal_values_name_the_field(field, config, values):
  for value in values:
    with pytest.raises(ConfigError, match=f'^dataset.{field}: expected '):
      builder.validate(config | {field: value})


@pytest.mark.parametrize(
  ('config', 'field'),
  [('digits', ''), (None, ''), ({}, '.name'), (dict(name='parity'), '.length')],
)
def test_a_missing_value_is_named(config, field):
  with pytest.raises(ConfigError, match=f'^dataset{field}: expected '):
    builder.validate(config)


SPLITS = [  # legal ones, and others
  (PARITY, ('train',), ('validation', '', 3)),
  (FOLDER, ('a b', 'a b[:9%]+c-d'),
   ('..', '../x', 'a/b', '.', '', 'a\\b', 'a[')),
  (TFDS, ('train', 'train[:90%]', 'train[90%:]', 'train[5:-10]+test'),
   ('train[:', 'train; rm', 'train[:101%]', f'train[:{10**400}]')),
  (GLUE, ('dev', 'test', 'validation_mismatched', 'train[:5]+train[-95%:]'),
   ('trian', 'train[:', 'train_matched', '', 'a+train', 'x/y')),
  (PRETRAINING, ('train[5:]',), ('test', 'dev', 'train+validation')),
  (TEXTS, ('all', 'dev[:40%]', 'test'), ('any', 'ax')),
  (PROBING, ('dev',), ('trian', 'train[:101%]', 'validation_matched')),
]  # fmt: skip


@pytest.mark.parametrize(('config', 'legal', 'illegal'), SPLITS)
def test_splits(config, legal, illegal):
  for split in legal:
    builder.check_split(config, split)
  for split in illegal:
    with pytest.raises(ConfigError, match=r'^split: expected '):
      builder.check_split(config, split)


def test_hosts_share_a_batch_evenly():
  with pytest.raises(ConfigError, match='a positive multiple of 4 hosts'):
    build(PARITY, batch_size=10, host_count=4)


def test_validation_completes_the_configuration():
  assert builder.validate(PARITY) == PARITY | dict(
    letters=0, data_seed=0, train_examples=2**20, test_examples=4096
  )
  for name in ('cifar10', 'a_b/c-d.e', 'x:1.2.3', 'x/y:1.2.3'):
    assert builder.validate(TFDS | dict(builder=name))['builder'] == name


def test_validation_imports_no_heavy_library():
  code = (
    'import sys; from dataset_lib import builder;'
    "builder.validate(dict(name='tfds', builder='x', image_size=8));"
    "heavy = {'tensorflow', 'tensorflow_datasets', 'sklearn', 'grain', 'jax'};"
    'print(sorted(heavy & set(sys.modules)))'
  )
  out = subprocess.check_output([sys.executable, '-c', code], text=True)
  assert out.strip() == '[]'


def test_a_data_set_is_named_by_its_class():
  config = dict(name=SQUARES, size=7)
  assert builder.validate(config) == config
  data = build(config, 'test', train=False, batch_size=4)
  rows = [batch['tokens'][:, 0].tolist() for batch in data.batches()]
  assert rows == [[0, 1, 4, 9], [16, 25, 36, 0]]
  assert data.source.places() == {'Squares/test'}


def test_a_drawn_source_is_asked_for_each_epoch():
  data = build(dict(name=f'{__name__}:Epochs'), batch_size=4)
  epochs = [batch['tokens'] for batch in take(data, 6)]
  assert np.unique(np.stack(epochs)[..., 0], axis=1).tolist() == [
    [0], [0], [1], [1], [2], [2]
  ]  # fmt: skip
  for first, second in zip(epochs[::2], epochs[1::2], strict=True):
    assert sorted([*first[:, 1], *second[:, 1]]) == list(range(8))
  assert data.source.record(3)['tokens'].tolist() == [0, 3]
