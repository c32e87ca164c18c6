"""Batches by length: deterministic, the same on all hosts, nothing lost."""

import itertools

import numpy as np
import pytest

from dataset_lib import builder
from dataset_lib.length_order import LengthOrder

BUCKETS = (8, 16, 32)
TEXT = dict(
  name='fake_text',
  max_length=32,
  length_buckets=(8, 16, 64),  # cut at max_length
  train_examples=1000,
  test_examples=45,
)


def make(lengths, batch_size=8, seed=0, shuffle=True):
  lengths = np.array(lengths, np.int32)
  return LengthOrder(lengths, BUCKETS, batch_size, seed, shuffle)


def some_lengths(count):
  return np.random.default_rng(0).integers(2, 33, count)


def build(split='train', train=True, batch_size=16, **arguments):
  return builder.build(
    TEXT,
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
  """The batches of all hosts put together; their lengths must agree."""
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
  """200 global batches of one host: more than three epochs of 62."""
  return take(build(), 200)


@pytest.mark.parametrize('hosts', [2, 4, 8])
def test_200_batches_do_not_depend_on_the_number_of_hosts(hosts, reference):
  assert_same(global_batches(hosts, 200), reference)


@pytest.mark.parametrize('start', [1, 31, 61, 62, 63, 150, 199])
def test_seeking_equals_going_there(start, reference):
  assert_same(take(build(), 200 - start, start), reference[start:])


def test_other_hosts_resume_at_any_step(reference):
  assert_same(global_batches(4, 20, start_step=55), reference[55:75])


def test_seeking_reads_nothing_before(monkeypatch):
  data = build(num_threads=0)
  read = []
  original = data._records.padded
  monkeypatch.setattr(
    data._records,
    'padded',
    lambda indices, *size: read.extend(indices) or original(indices, *size),
  )
  batch = take(data, 1, start_step=10**9)[0]
  assert read == batch['index'].tolist()


def test_a_batch_is_as_long_as_its_bucket(reference):
  lengths = set()
  for batch in reference:
    padded = batch['tokens'].shape[1]
    lengths.add(padded)
    longest = batch['length'].max()
    assert padded == min(size for size in BUCKETS if size >= longest)
    assert batch['token_types'].shape == batch['tokens'].shape
  assert lengths == set(BUCKETS)


def test_an_epoch_has_few_batches_of_mixed_buckets(reference):
  bucket = [np.searchsorted(BUCKETS, batch['length']) for batch in reference]
  mixed = [len(set(rows.tolist())) > 1 for rows in bucket[:62]]
  assert sum(mixed) <= len(BUCKETS) - 1
  # And they come in random order, not the short ones first.
  padded = [batch['tokens'].shape[1] for batch in reference[:62]]
  assert padded != sorted(padded)
  assert padded != sorted(padded, reverse=True)


@pytest.mark.parametrize(
  ('count', 'batch_size'), [(1000, 8), (1003, 8), (9, 8), (8, 8), (17, 1)]
)
def test_an_epoch_loses_nothing_but_its_remainder(count, batch_size):
  order = make(some_lengths(count), batch_size)
  assert order.steps_per_epoch == count // batch_size
  missing = []
  for epoch in range(3):
    first = epoch * order.steps_per_epoch
    read = np.concatenate(
      [order.batch(first + step)[0] for step in range(order.steps_per_epoch)]
    )
    assert len(read) == len(set(read.tolist())) == count - count % batch_size
    missing.append(set(range(count)) - set(read.tolist()))
  if count == 1003:
    assert not missing[0] & missing[1] & missing[2]


def test_epochs_and_seeds_differ():
  lengths = some_lengths(200)
  order, other = make(lengths), make(lengths, seed=1)
  first = [order.batch(step)[0].tolist() for step in range(25)]
  second = [order.batch(25 + step)[0].tolist() for step in range(25)]
  assert first != second
  assert first != [other.batch(step)[0].tolist() for step in range(25)]
  again = make(lengths)
  assert first == [again.batch(step)[0].tolist() for step in range(25)]


def test_any_two_rows_of_a_bucket_meet():
  # 16 rows of one length in batches of 8: in 200 epochs each pair is together
  # about every second time.
  order = make([5] * 16)
  together = np.zeros((16, 16))
  for step in range(0, 400, 2):
    rows = order.batch(step)[0]
    together[np.ix_(rows, rows)] += 1
    rest = np.setdiff1d(np.arange(16), rows)
    together[np.ix_(rest, rest)] += 1
  pairs = together[np.triu_indices(16, 1)] / 200
  assert 0.3 < pairs.min() < pairs.max() < 0.65


@pytest.mark.parametrize('count', [1, 3, 7])
def test_a_set_smaller_than_a_batch_is_repeated(count):
  order = make([5] * count)
  assert order.steps_per_epoch == 1
  read = np.concatenate([order.batch(step)[0] for step in range(count)])
  assert len(read) == 8 * count
  # Every run of `count` positions is a permutation.
  for start in range(0, len(read), count):
    assert sorted(read[start : start + count]) == list(range(count))


@pytest.mark.parametrize('hosts', [1, 2, 4, 8])
def test_evaluation_is_one_pass_by_length(hosts):
  arguments = dict(split='test', train=False)
  batches = global_batches(hosts, 100, **arguments)
  data = build(**arguments)
  assert len(batches) == data.steps_per_epoch == 3
  joined = {
    key: np.concatenate([batch[key] for batch in batches])
    for key in ('length', 'mask', 'index', 'label')
  }
  assert sorted(joined['index'][:45].tolist()) == list(range(45))
  assert joined['length'][:45].tolist() == sorted(joined['length'][:45])
  assert np.all(joined['mask'][:45] == 1)
  # The padding is not empty: one token, which is [PAD].
  assert np.all(joined['mask'][45:] == 0)
  assert np.all(joined['index'][45:] == -1)
  assert np.all(joined['length'][45:] == 1)
  assert np.all(joined['label'][45:] == 0)
  assert not np.any(batches[-1]['tokens'][45 - 48 :])
  assert batches[0]['tokens'].shape == (16, 8)
  assert batches[-1]['tokens'].shape == (16, 32)


def test_evaluation_can_start_late_and_after_its_end():
  data = build('test', train=False)
  assert_same(list(data.batches(2)), list(data.batches())[2:])
  assert list(data.batches(3)) == []


def test_rows_hold_their_own_tokens(reference):
  source = builder.build_source(TEXT, 'train')
  for batch in reference[::20]:
    for row, index in enumerate(batch['index']):
      record, length = source.record(int(index)), batch['length'][row]
      assert len(record['tokens']) == length
      for key in ('tokens', 'token_types'):
        np.testing.assert_array_equal(batch[key][row, :length], record[key])
        assert not np.any(batch[key][row, length:])
      assert batch['label'][row] == record['label']


def test_dtypes(reference):
  assert {key: str(value.dtype) for key, value in reference[0].items()} == {
    'tokens': 'int32',
    'token_types': 'int32',
    'length': 'int32',
    'label': 'int32',
    'mask': 'float32',
    'index': 'int32',
  }


def test_records_take_the_smallest_bucket():
  source = builder.build_source(TEXT, 'train')
  short = np.flatnonzero(source.lengths <= 8)[:3]
  long = np.flatnonzero(source.lengths > 16)[:1]
  assert source.records(short)['tokens'].shape == (3, 8)
  assert source.records(np.append(short, long))['tokens'].shape == (4, 32)
