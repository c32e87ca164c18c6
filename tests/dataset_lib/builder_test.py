"""Order, resumption, hosts, padding and threads of batches; bad records."""

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
  joined,
  take,
  wait_for_no_threads,
)

CONFIGS = {'digits': DIGITS, 'text': TEXT}
STEPS = 200  # more than two epochs of the digits, three of the texts


@pytest.fixture(scope='module')
def references():
  """200 global batches of one host, by name."""
  return {name: take(build(given), STEPS) for name, given in CONFIGS.items()}


@pytest.fixture(params=CONFIGS)
def reference(request, references):
  return CONFIGS[request.param], references[request.param]


@pytest.mark.parametrize(
  ('name', 'hosts', 'start'),
  [
    pytest.param('digits', 4, 0, marks=pytest.mark.slow),
    *(pytest.param('digits', n, 0, marks=pytest.mark.nightly) for n in (2, 8)),
    *(('text', hosts, 0) for hosts in (2, 4, 8)),
    ('digits', 4, 180),
  ],
)
def test_batches_do_not_depend_on_the_hosts(name, hosts, start, references):
  read = global_batches(hosts, STEPS - start, start, config=CONFIGS[name])
  assert_same(read, references[name][start:])


@pytest.mark.parametrize('start', [1, 62, 63, 90, 150, 199])
def test_seeking_equals_going_there(start, reference):
  # Epochs are 62 batches of texts, 89.9 of digits.
  config, expected = reference
  assert_same(take(build(config), STEPS - start, start), expected[start:])


@pytest.mark.parametrize(
  'arguments', [{'num_threads': 0}, {'num_threads': 5}, {'prefetch': 7}]
)
def test_threads_and_prefetch_do_not_matter(arguments, reference):
  config, expected = reference
  assert_same(take(build(config, **arguments), 20), expected[:20])


@pytest.mark.parametrize('config', [DIGITS, PARITY, TEXT])
def test_seeking_replays_nothing(config):
  # To replay so many steps would take days.
  batch = take(build(config, num_threads=0), 1, start_step=10**9)[0]
  assert_same(take(build(config), 2, 10**9 - 1)[1:], [batch])


def test_augmentation_differs_between_epochs_and_seeds(references):
  expected = references['digits']
  first, second = (
    {
      int(index): image
      for batch in expected[start : start + 89]
      for index, image in zip(batch['index'], batch['image'], strict=True)
    }
    for start in (0, 90)
  )
  shared = sorted(first.keys() & second.keys())
  same = [np.array_equal(first[i], second[i]) for i in shared]
  assert np.mean(same) < 0.1
  other = take(build(seed=1), 1)[0]
  assert np.any(other['index'] != expected[0]['index'])


@pytest.mark.parametrize('config', [DIGITS, PARITY, TEXT])
def test_rows_are_the_records_that_their_index_names(config):
  source = builder.build_source(config, 'train')
  for batch in take(build(config), 5):
    types = {key: str(array.dtype) for key, array in batch.items()}
    assert types.pop('image', 'uint8') == 'uint8'
    assert types.pop('mask') == 'float32'
    assert {*types.values()} == {'int32'}
    assert batch['mask'].tolist() == [1] * 16
    for row, index in enumerate(batch['index']):
      record = source.record(int(index))
      assert batch['label'][row] == record['label']
      for key in {'tokens', 'token_types'} & record.keys():
        size = len(record[key])
        np.testing.assert_array_equal(batch[key][row, :size], record[key])
        assert not np.any(batch[key][row, size:])


@pytest.mark.parametrize('hosts', [1, 2, 4])
@pytest.mark.parametrize('config', [PARITY, DIGITS])
def test_evaluation_is_one_ordered_padded_pass(config, hosts):
  arguments = dict(config=config, split='test', train=False, batch_size=8)
  batches = global_batches(hosts, 100, **arguments)
  data = build(**arguments)
  size = data.info.num_examples
  assert len(batches) == data.steps_per_epoch == -(-size // 8)
  rows = joined(batches)
  padding = 8 * len(batches) - size
  assert rows['index'].tolist() == [*range(size), *[-1] * padding]
  assert rows['mask'].tolist() == [1] * size + [0] * padding
  assert not np.any(rows['label'][size:])
  assert not np.any(rows[data.info.input_key][size:])


@pytest.mark.parametrize('hosts', [1, 2, 4, 8])
def test_evaluation_of_texts_is_one_pass_by_length(hosts):
  arguments = dict(config=TEXT, split='test', train=False)
  batches = global_batches(hosts, 100, **arguments)
  assert len(batches) == build(**arguments).steps_per_epoch == 3
  keys = ('length', 'mask', 'index', 'label')
  rows = joined([{key: batch[key] for key in keys} for batch in batches])
  assert sorted(rows['index'][:45].tolist()) == list(range(45))
  assert rows['length'][:45].tolist() == sorted(rows['length'][:45])
  assert rows['mask'].tolist() == [1] * 45 + [0] * 3
  # The padding is not empty: one token, which is [PAD].
  padding = {key: rows[key][45:].tolist() for key in keys}
  assert padding.pop('length') == [1] * 3
  assert padding == {'mask': [0] * 3, 'index': [-1] * 3, 'label': [0] * 3}
  assert not np.any(batches[-1]['tokens'][-3:])
  assert batches[0]['tokens'].shape == (16, 8)
  assert batches[-1]['tokens'].shape == (16, 32)


@pytest.mark.parametrize(('batch_size', 'steps'), [(16, 6), (512, 1)])
def test_an_epoch_of_training_has_full_batches(batch_size, steps):
  assert build(PARITY, batch_size=batch_size).steps_per_epoch == steps


@pytest.mark.parametrize('config', [PARITY, TEXT])
def test_evaluation_can_start_late_and_after_its_end(config):
  data = build(config, 'test', train=False, batch_size=4)
  batches, steps = list(data.batches()), data.steps_per_epoch
  assert_same(list(data.batches(steps - 1)), batches[-1:])
  assert list(data.batches(steps)) == list(data.batches(99)) == []


def test_batches_are_as_long_as_their_bucket_and_seldom_mixed(references):
  texts = references['text']
  lengths = [batch['tokens'].shape[1] for batch in texts]
  assert set(lengths) == set(BUCKETS)
  for batch, length in zip(texts, lengths, strict=True):
    longest = batch['length'].max()
    assert length == min(size for size in BUCKETS if size >= longest)
  epoch = texts[:62]
  buckets = [np.searchsorted(BUCKETS, batch['length']) for batch in epoch]
  mixed = [len(set(rows.tolist())) > 1 for rows in buckets]
  assert sum(mixed) <= len(BUCKETS) - 1
  # And they come in random order, not the short ones first.
  ascending = sorted(lengths[:62])
  assert lengths[:62] not in (ascending, ascending[::-1])


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

  monkeypatch.setattr(data.source, 'record', broken)
  with pytest.raises(ZeroDivisionError, match='a bug'):
    take(data, 1)
  assert wait_for_no_threads()


@pytest.mark.parametrize('label', [-1, 10])
def test_a_wrong_label_is_a_bad_record(monkeypatch, label):
  data = build(train=False)
  monkeypatch.setattr(data.source, '_labels', np.full(1797, label))
  with pytest.raises(TooManyBadRecordsError, match='label_out_of_range'):
    take(data, 1)


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
