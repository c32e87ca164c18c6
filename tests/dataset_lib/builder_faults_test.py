"""Bad records: evaluation stops, training replaces, bugs are not hidden."""

import cv2
import numpy as np
import pytest

from dataset_lib import builder
from dataset_lib.errors import TooManyBadRecordsError
from tests.dataset_lib.batches import (
  assert_same,
  build,
  global_batches,
  take,
  wait_for_no_threads,
)


def write_folder(root, count):
  folder = root / 'train' / 'cat'
  folder.mkdir(parents=True)
  for number in range(count):
    image = np.full((8, 8, 3), number % 256, np.uint8)
    assert cv2.imwrite(str(folder / f'{number:04}.png'), image)
  return dict(name='folder', root=str(root), image_size=8), folder


def damage(folder, number, fault):
  path = folder / f'{number:04}.png'
  path.unlink()
  if fault == 'empty':
    path.write_bytes(b'')
  elif fault == 'undecodable':
    path.write_text('I am a text file')
  elif fault == 'truncated':
    data = cv2.imencode('.jpg', np.zeros((32, 32, 3), np.uint8))[1].tobytes()
    path.write_bytes(data[: len(data) // 2])
  else:
    path.mkdir()
  return path


FAULTS = ('empty', 'undecodable', 'truncated', 'unreadable')


@pytest.mark.parametrize('fault', FAULTS)
def test_training_replaces_a_bad_record_and_evaluation_stops(tmp_path, fault):
  config, folder = write_folder(tmp_path, 40)
  path = damage(folder, 13, fault)
  config['max_bad_share'] = 0.05
  data = build(config, batch_size=8)
  read = take(data, 10)  # two epochs
  assert data.bad_records[fault]['count'] == 1
  assert data.bad_records[fault]['first'][0]['file'] == str(path)
  assert data.bad_records[fault]['first'][0]['row'] == 13
  indices = np.concatenate([batch['index'] for batch in read])
  assert len(indices) == 80  # nothing dropped
  assert 13 not in indices
  assert set(indices) == set(range(40)) - {13}
  for batch in read:  # the row holds the record that its index names
    values = batch['image'].mean((1, 2, 3))
    np.testing.assert_array_equal(values, batch['index'])
  data = build(config, train=False, batch_size=4)
  with pytest.raises(TooManyBadRecordsError) as error:
    list(data.batches())
  assert f'{path} (row 13)' in str(error.value)
  assert fault in str(error.value)
  assert wait_for_no_threads()


def test_replacements_do_not_depend_on_hosts_or_resumption(tmp_path):
  config, folder = write_folder(tmp_path, 40)
  for number, fault in zip((3, 17, 22, 31), FAULTS, strict=True):
    damage(folder, number, fault)
  config['max_bad_share'] = 0.2
  arguments = dict(config=config, batch_size=8)
  expected = take(build(**arguments), 12)
  assert_same(global_batches(4, 12, **arguments), expected)
  assert_same(take(build(**arguments), 5, 7), expected[7:])


def test_the_default_tolerance_is_one_in_a_thousand(tmp_path):
  config, folder = write_folder(tmp_path, 40)
  damage(folder, 5, 'empty')
  data = build(config, batch_size=40)
  with pytest.raises(TooManyBadRecordsError, match='1 of 40 records are bad'):
    take(data, 1)
  assert builder.validate(config)['max_bad_share'] == 0.001


def test_a_folder_of_nothing_but_bad_records_ends(tmp_path):
  config, folder = write_folder(tmp_path, 3)
  for number in range(3):
    damage(folder, number, 'empty')
  config['max_bad_share'] = 0.5
  with pytest.raises(TooManyBadRecordsError):
    take(build(config, batch_size=2), 2)


def test_an_error_that_is_no_bad_record_is_not_hidden(monkeypatch):
  data = build()

  def broken(index):
    raise ZeroDivisionError('a bug')

  monkeypatch.setattr(data.records, 'record', broken)
  with pytest.raises(ZeroDivisionError, match='a bug'):
    take(data, 1)
  assert wait_for_no_threads()


@pytest.mark.parametrize('label', [-1, 10])
def test_a_wrong_label_is_a_bad_record(monkeypatch, label):
  data = build(train=False)
  monkeypatch.setattr(data.records, '_labels', np.full(1797, label))
  with pytest.raises(TooManyBadRecordsError, match='label_out_of_range'):
    take(data, 1)
