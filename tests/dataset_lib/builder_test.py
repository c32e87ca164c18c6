"""Epochs, buckets and threads of batches; bad records."""

import pathlib

import cv2
import numpy as np
import pytest

from dataset_lib import builder
from dataset_lib.bad_records import TooManyBadRecordsError
from dataset_lib.source import DatasetInfo
from tests.dataset_lib.batches import (
  BUCKETS,
  DIGITS,
  PARITY,
  TEXT,
  assert_same,
  build,
  global_batches,
  grain_threads,
  take,
  wait_for_no_threads,
)
from tests.dataset_lib.image_folder_test import write_image


def test_augmentation_differs_between_epochs():
  first, second = (
    batch['image'][np.argsort(batch['index'])]
    for batch in take(build(batch_size=1438), 2)  # whole epochs
  )
  assert (first == second).all((1, 2, 3)).mean() < 0.1


def test_batches_are_as_long_as_their_bucket_and_seldom_mixed():
  texts = take(build(TEXT), 62)  # an epoch
  lengths = [batch['tokens'].shape[1] for batch in texts]
  assert set(lengths) == set(BUCKETS)
  for batch, length in zip(texts, lengths, strict=True):
    longest = batch['length'].max()
    assert length == min(size for size in BUCKETS if size >= longest)
  buckets = [np.searchsorted(BUCKETS, batch['length']) for batch in texts]
  mixed = [len(set(rows.tolist())) > 1 for rows in buckets]
  assert sum(mixed) <= len(BUCKETS) - 1
  # And they come in random order, not the short ones first.
  assert lengths not in (sorted(lengths), sorted(lengths)[::-1])


def test_no_threads_are_left():
  for config in (PARITY, DIGITS):
    batches = build(config, batch_size=64).batches()
    next(batches)
    assert grain_threads()
    batches.close()
    assert wait_for_no_threads()
  assert len(list(build(PARITY, 'test', train=False).batches())) == 1
  batches = build().batches()
  next(batches)
  del batches
  assert wait_for_no_threads()


FAULTS = {
  'empty': b'',
  'undecodable': b'I am a text file',
  'truncated': cv2.imencode('.jpg', np.eye(32) * 255)[1].tobytes()[:300],
  'not_a_file': None,  # a folder
}


@pytest.fixture
def config(tmp_path):
  """40 images of one class; image n has the value n."""
  for number in range(40):
    write_image(tmp_path / 'train' / 'cat' / f'{number:04}.png', number)
  return dict(name='folder', root=str(tmp_path), image_size=8)


def damage(config, number, fault):
  path = pathlib.Path(config['root'], 'train', 'cat', f'{number:04}.png')
  path.unlink()
  if FAULTS[fault] is None:
    path.mkdir()
  else:
    path.write_bytes(FAULTS[fault])
  return path


@pytest.mark.parametrize('fault', FAULTS)
def test_training_replaces_a_bad_record_and_evaluation_stops(config, fault):
  path = damage(config, 13, fault)
  config['max_bad_share'] = 0.05
  data = build(config, batch_size=8)
  read = take(data, 10)  # two epochs
  assert data.bad_records[fault]['count'] == 1
  first = data.bad_records[fault]['first'][0]
  assert (first['file'], first['row']) == (str(path), 13)
  indices = np.concatenate([batch['index'] for batch in read])
  assert len(indices) == 80  # nothing dropped
  assert set(indices) == set(range(40)) - {13}
  for batch in read:  # the row holds the record that its index names
    values = batch['image'].mean((1, 2, 3))
    np.testing.assert_array_equal(values, batch['index'])
  with pytest.raises(TooManyBadRecordsError) as error:
    list(build(config, train=False, batch_size=4).batches())
  assert 'valuation tolerates none' in str(error.value)
  assert f'  {path}: ' in str(error.value)
  assert fault in str(error.value)
  assert wait_for_no_threads()


def test_replacements_do_not_depend_on_hosts_or_resumption(config):
  for number, fault in zip((3, 17, 22, 31), FAULTS, strict=True):
    damage(config, number, fault)
  config['max_bad_share'] = 0.2
  arguments = dict(config=config, batch_size=8)
  expected = take(build(**arguments), 12)
  assert_same(global_batches(4, 12, **arguments), expected)
  assert_same(take(build(**arguments), 5, 7), expected[7:])


def test_the_limits_of_the_tolerance(config):
  assert builder.validate(config)['max_bad_share'] == 0.001
  damage(config, 5, 'empty')
  with pytest.raises(TooManyBadRecordsError, match='1 of 40 records are bad'):
    take(build(config, batch_size=40), 1)
  for number in {*range(40)} - {5}:
    damage(config, number, 'empty')
  with pytest.raises(TooManyBadRecordsError):  # it ends
    take(build({**config, 'max_bad_share': 0.5}, batch_size=2), 20)


def test_an_error_that_is_no_bad_record_is_not_hidden(monkeypatch):
  data = build()
  monkeypatch.setattr(data.source, 'record', lambda index: index // 0)
  with pytest.raises(ZeroDivisionError):
    take(data, 1)
  assert wait_for_no_threads()


@pytest.mark.parametrize(
  ('fields', 'labels', 'expected'),
  [
    ({}, [0, -1, 2], [1, 0, 1]),
    ({'max_labels': 2}, [[1, -1], [-1, -1], [0, 2]], [1, 0, 1]),
    ({}, [0.0, np.nan, -1.0], [1, 0, 1]),
    ({'label_kind': 'number'}, [3, -1], [1, 1]),
    ({'label_kind': 'tags'}, [[-1, -1, -1], [0, -1, 1]], [1, 1]),
  ],
)  # fmt: skip
def test_rows_without_a_label(fields, labels, expected):
  info = DatasetInfo('tokens', (3,), 'int32', 3, (), 9, **fields)
  found = info.labelled(np.array(labels))
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, expected)
