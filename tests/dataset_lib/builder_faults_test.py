"""Bad records: evaluation stops, training replaces, bugs are not hidden."""

import pathlib

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

FAULTS = {
  'empty': b'',
  'undecodable': b'I am a text file',
  'truncated': cv2.imencode('.jpg', np.eye(32) * 255)[1].tobytes()[:300],
  'unreadable': None,  # a folder
}


@pytest.fixture
def config(tmp_path):
  """40 images of one class; image n has the value n."""
  folder = tmp_path / 'train' / 'cat'
  folder.mkdir(parents=True)
  for number in range(40):
    image = np.full((8, 8, 3), number, np.uint8)
    assert cv2.imwrite(str(folder / f'{number:04}.png'), image)
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
  assert f'{path} (row 13)' in str(error.value)
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
