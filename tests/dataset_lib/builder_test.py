"""Order, resumption, hosts, padding, faults and clean-up of batches."""

import itertools
import threading
import time

import numpy as np
import pytest

from dataset_lib import builder

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


@pytest.mark.slow
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
