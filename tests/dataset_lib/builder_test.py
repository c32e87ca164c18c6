"""Order, resumption, hosts, padding, faults and clean-up of batches."""

import itertools
import sys
import threading
import time

import cv2
import numpy as np
import pytest

from dataset_lib import builder
from dataset_lib.errors import ConfigError, TooManyBadRecordsError

DIGITS = dict(name='digits', image_size=8, augment=('inception_crop', 'flip'))
PARITY = dict(name='parity', length=4, train_examples=100, test_examples=10)


def build(config=DIGITS, split='train', train=True, batch_size=16, **arguments):
  return builder.build(
    config,
    split=split,
    train=train,
    batch_size=batch_size,
    **{'seed': 0, 'num_threads': 2, **arguments},
  )


def take(data, count, start_step=0):
  batches = data.batches(start_step)
  taken = list(itertools.islice(batches, count))
  batches.close()
  return taken


def assert_same(left, right):
  assert len(left) == len(right)
  for one, other in zip(left, right, strict=True):
    assert one.keys() == other.keys()
    for key in one:
      np.testing.assert_array_equal(one[key], other[key])


def global_batches(hosts, count, start_step=0, **arguments):
  """The batches of all hosts put together."""
  parts = [
    take(
      build(host_index=host, host_count=hosts, **arguments), count, start_step
    )
    for host in range(hosts)
  ]
  return [
    {key: np.concatenate([part[key] for part in step]) for key in step[0]}
    for step in zip(*parts, strict=True)
  ]


@pytest.fixture(scope='module')
def reference():
  """200 global batches of one host: more than two epochs of the digits."""
  return take(build(), 200)


@pytest.mark.parametrize('hosts', [2, 4, 8])
def test_200_batches_do_not_depend_on_the_number_of_hosts(hosts, reference):
  assert 200 * 16 > 2 * 1438
  assert_same(global_batches(hosts, 200), reference)


@pytest.mark.parametrize('start', [1, 45, 90, 137, 199])
def test_seeking_equals_going_there(start, reference):
  # An epoch is 89.9 batches: 45 is inside it, 90 just in the next.
  assert_same(take(build(), 200 - start, start), reference[start:])


def test_other_hosts_resume_at_any_step(reference):
  assert_same(global_batches(4, 20, start_step=80), reference[80:100])


@pytest.mark.parametrize(
  'arguments', [{'num_threads': 0}, {'num_threads': 5}, {'prefetch': 7}]
)
def test_threads_and_prefetch_do_not_matter(arguments, reference):
  assert_same(take(build(**arguments), 20), reference[:20])


def test_seeking_reads_nothing_before(monkeypatch):
  data = build(num_threads=0)
  read = []
  original = data._records.record
  monkeypatch.setattr(
    data._records,
    'record',
    lambda index: read.append(index) or original(index),
  )
  batch = take(data, 1, start_step=10**9)[0]
  assert read == batch['index'].tolist()


def test_each_epoch_shows_every_record_once(reference):
  indices = np.concatenate([batch['index'] for batch in reference])
  first, second = indices[:1438], indices[1438:2876]
  assert sorted(first) == list(range(1438))
  assert sorted(second) == list(range(1438))
  assert np.any(first != second)


def test_augmentation_differs_between_epochs_and_seeds(reference):
  def by_index(batches):
    return {
      int(index): image
      for batch in batches
      for index, image in zip(batch['index'], batch['image'], strict=True)
    }

  first, second = by_index(reference[:89]), by_index(reference[90:179])
  shared = sorted(first.keys() & second.keys())
  same = [np.array_equal(first[i], second[i]) for i in shared]
  assert np.mean(same) < 0.1
  other = take(build(seed=1), 1)[0]
  assert np.any(other['index'] != reference[0]['index'])


def test_dtypes_and_shapes(reference):
  batch = reference[0]
  assert {
    key: (value.shape, str(value.dtype)) for key, value in batch.items()
  } == {
    'image': ((16, 8, 8, 3), 'uint8'),
    'label': ((16,), 'int32'),
    'mask': ((16,), 'float32'),
    'index': ((16,), 'int32'),
  }
  assert np.all(batch['mask'] == 1)


def test_labels_belong_to_their_records(reference):
  source = builder.build_source(DIGITS, 'train')
  for batch in reference[:5]:
    for label, index in zip(batch['label'], batch['index'], strict=True):
      assert label == source.record(int(index))['label']


@pytest.mark.parametrize('hosts', [1, 2, 4])
@pytest.mark.parametrize('config', [PARITY, DIGITS])
def test_evaluation_is_one_ordered_padded_pass(config, hosts):
  arguments = dict(config=config, split='test', train=False, batch_size=8)
  batches = global_batches(hosts, 100, **arguments)
  data = build(**arguments)
  size = data.info.num_examples
  assert len(batches) == data.steps_per_epoch == -(-size // 8)
  joined = {
    key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]
  }
  assert joined['index'][:size].tolist() == list(range(size))
  assert np.all(joined['index'][size:] == -1)
  assert np.all(joined['mask'][:size] == 1)
  assert np.all(joined['mask'][size:] == 0)
  assert np.all(joined['label'][size:] == 0)
  assert not np.any(joined[data.info.input_key][size:])


def test_every_host_has_the_same_number_of_evaluation_steps():
  # 10 examples, batches of 16: host 3 has nothing but padding.
  counts = [
    len(
      take(
        build(
          PARITY,
          'test',
          train=False,
          host_index=host,
          host_count=4,
        ),
        100,
      )
    )
    for host in range(4)
  ]
  assert counts == [1, 1, 1, 1]


def test_evaluation_can_start_late_and_after_its_end():
  data = build(PARITY, 'test', train=False, batch_size=4)
  assert [b['index'].tolist() for b in data.batches(2)] == [[8, 9, -1, -1]]
  assert list(data.batches(3)) == []
  assert list(data.batches(99)) == []


def test_steps_per_epoch():
  assert build(PARITY, batch_size=16).steps_per_epoch == 6
  assert build(PARITY, batch_size=512).steps_per_epoch == 1
  assert build(PARITY, train=False, batch_size=16).steps_per_epoch == 7


def test_parity_batches_are_the_sources_records():
  batch = take(build(PARITY), 3)[2]
  source = builder.build_source(PARITY, 'train')
  for row, index in enumerate(batch['index']):
    record = source.record(int(index))
    np.testing.assert_array_equal(batch['tokens'][row], record['tokens'])
    assert batch['label'][row] == record['label']


def grain_threads():
  return [t for t in threading.enumerate() if 'grain' in t.name]


def wait_for_no_threads():
  deadline = time.monotonic() + 5
  while grain_threads() and time.monotonic() < deadline:
    time.sleep(0.01)
  return not grain_threads()


@pytest.mark.parametrize('config', [PARITY, DIGITS])
def test_closing_stops_the_threads(config):
  batches = build(config, batch_size=64).batches()
  next(batches)
  assert grain_threads()
  batches.close()
  assert wait_for_no_threads()


def test_a_finished_pass_and_garbage_leave_no_threads():
  assert len(list(build(PARITY, 'test', train=False).batches())) == 1
  batches = build().batches()
  next(batches)
  del batches
  assert wait_for_no_threads()


# Faults.


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
def test_evaluation_tolerates_no_bad_record(tmp_path, fault):
  config, folder = write_folder(tmp_path, 20)
  path = damage(folder, 13, fault)
  config['max_bad_share'] = 0.5
  data = build(config, train=False, batch_size=4)
  with pytest.raises(TooManyBadRecordsError) as error:
    list(data.batches())
  assert f'{path} (row 13)' in str(error.value)
  assert fault in str(error.value)
  assert wait_for_no_threads()


@pytest.mark.parametrize('fault', FAULTS)
def test_training_counts_and_replaces_a_bad_record(tmp_path, fault):
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

  monkeypatch.setattr(data._records, 'record', broken)
  with pytest.raises(ZeroDivisionError, match='a bug'):
    take(data, 1)
  assert wait_for_no_threads()


@pytest.mark.parametrize('label', [-1, 10])
def test_a_wrong_label_is_a_bad_record(monkeypatch, label):
  data = build(train=False)
  monkeypatch.setattr(data._records, '_labels', np.full(1438, label))
  with pytest.raises(TooManyBadRecordsError, match='label_out_of_range'):
    take(data, 1)


# Configuration.


@pytest.mark.parametrize(
  ('config', 'key'),
  [
    (dict(name='parity'), 'dataset.length'),
    (dict(name='parity', length=0), 'dataset.length'),
    (dict(name='parity', length=8, lenght=8), 'dataset.lenght'),
    (dict(name='parity', length=8, augment=('flip',)), 'dataset.augment'),
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
  assert error.value.key == key
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
  assert error.value.key == 'split'


@pytest.mark.parametrize(
  'split', ['train', 'train[:90%]', 'train[90%:]', 'train[5:10]+test', 'test']
)
def test_parts_of_tfds_splits(split):
  builder.validate(dict(name='tfds', builder='x', image_size=8), split)


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
    build(PARITY, **arguments)
  assert error.value.key == key


def test_illegal_start_step():
  with pytest.raises(ConfigError) as error:
    build(PARITY).batches(-1)
  assert error.value.key == 'start_step'


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
  import subprocess

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
