"""GLUE in TFDS directories, written here, read without TensorFlow."""

import numpy as np
import pytest

from dataset_lib import builder, tfds
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
  TooManyBadRecordsError,
)
from tests.dataset_lib import tfds_marks

pytestmark = tfds_marks.MARKS


@pytest.fixture(scope='module')
def prepared(tfds_data, tmp_path_factory):
  """(a TFDS data_dir, a tokenizer)."""
  folder = tmp_path_factory.mktemp('vocab')
  words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', *(f'w{n}' for n in range(20))]
  (folder / 'vocab.txt').write_text('\n'.join([*words, 'e']))
  return tfds_data, folder


def config(prepared, task, **others):
  return {
    'name': 'glue',
    'task': task,
    'data_dir': str(prepared[0]),
    'tokenizer': str(prepared[1]),
    'max_bad_share': 0.1,
    **others,
  }


def rows(prepared, task, split, **others):
  source = builder.build_source(config(prepared, task, **others), split)
  records = [source.record(index) for index in range(len(source))]
  return [(record['tokens'].tolist(), record['label']) for record in records]


def single(number):
  return [2, 4 + number, 24, 3]


def pair(number):
  return [2, 4 + number, 24, 3, 4 + number, 24, 3]


def test_one_sentence(prepared):
  # Row 9 has an empty text.
  expected = [(single(n), n % 2) for n in range(20) if n != 9]
  assert rows(prepared, 'sst2', 'train') == expected
  assert rows(prepared, 'sst2', 'validation')[0] == (single(0), 1)
  assert rows(prepared, 'sst2', 'dev') == rows(prepared, 'sst2', 'validation')


def test_parts_of_splits(prepared):
  whole = rows(prepared, 'sst2', 'train')
  first, rest = (rows(prepared, 'sst2', f'train{p}') for p in ('[:6]', '[6:]'))
  assert 5 <= len(first) <= 6  # row 9 has an empty text
  assert first != whole[: len(first)]
  assert rows(prepared, 'sst2', 'train[:6]+train[6:]') == first + rest
  assert sorted(map(repr, first + rest)) == sorted(map(repr, whole))
  assert len(rows(prepared, 'sst2', 'train', max_examples=5)) in (4, 5)


def test_pairs(prepared):
  assert rows(prepared, 'mnli', 'train') == [(pair(0), 0), (pair(1), 1)]
  matched = rows(prepared, 'mnli', 'validation')
  assert [label for _, label in matched] == [2, 1]
  mismatched = rows(prepared, 'mnli', 'validation_mismatched')
  assert [label for _, label in mismatched] == [0, 2]


def test_scores(prepared):
  assert rows(prepared, 'stsb', 'train') == [(pair(0), 0.5), (pair(1), 4.25)]
  source = builder.build_source(config(prepared, 'stsb'), 'train')
  assert source.records(np.arange(2))['label'].dtype == np.float32


def test_by_directory(prepared):
  folder = prepared[0] / 'glue' / 'sst2' / '2.0.0'
  by_directory = rows(prepared, 'sst2', 'validation', data_dir=str(folder))
  assert by_directory == rows(prepared, 'sst2', 'validation')


@pytest.mark.parametrize('task', ['sst2', 'stsb'])
def test_test_splits_have_no_labels(prepared, task):
  with pytest.raises(ConfigError, match='a split with labels') as error:
    rows(prepared, task, 'test')
  assert error.value.field == 'split'


def test_a_bad_row_is_counted(prepared):
  def build(train):
    return builder.build(
      config(prepared, 'sst2'), split='train', train=train, seed=0, batch_size=4
    )

  entry = build(train=True).bad_records['empty_text']
  assert entry['count'] == 1
  assert entry['first'][0]['row'] == 9
  assert 'glue-train.tfrecord-00001' in entry['first'][0]['file']
  with pytest.raises(TooManyBadRecordsError, match='text 1 is empty'):
    build(train=False)


def test_a_bad_first_record_is_like_any_other(prepared, monkeypatch):
  read = tfds.Examples.__getitem__

  def damaged(examples, row):
    if row == 0:
      raise BadRecord('unparsable', examples.where(row), 'damaged')
    return read(examples, row)

  whole = rows(prepared, 'sst2', 'train')
  monkeypatch.setattr(tfds.Examples, '__getitem__', damaged)
  assert rows(prepared, 'sst2', 'train') == whole[1:]


def test_another_order_of_classes_is_refused(prepared):
  folder = prepared[0] / 'glue' / 'rte' / '2.0.0'
  with pytest.raises(InvalidDataError, match='expected the classes'):
    rows(prepared, 'rte', 'train', data_dir=str(folder))


def test_another_task_is_refused(prepared):
  with pytest.raises(InvalidDataError, match='expected the features question'):
    rows(prepared, 'qnli', 'train', builder='glue/sst2')


def test_what_is_not_prepared(prepared, tmp_path):
  with pytest.raises(MissingDataError, match='tfds build glue/qqp'):
    rows(prepared, 'qqp', 'train', data_dir=str(tmp_path))
  with pytest.raises(MissingDataError, match="no split 'validation'"):
    rows(prepared, 'stsb', 'validation')
