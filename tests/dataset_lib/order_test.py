"""Steps map to records: a permutation per epoch, rows split over hosts."""

import numpy as np
import pytest

from dataset_lib import order
from dataset_lib.errors import ConfigError

BUCKETS = (8, 16, 32)


def stream(num_examples, seed=0):
  return order.Order(num_examples, batch_size=8, seed=seed, shuffle=True)


@pytest.mark.parametrize('num_examples', [1, 2, 7, 1000])
def test_each_epoch_is_another_permutation(num_examples):
  places = stream(num_examples, seed=3)
  epochs = []
  for epoch in range(3):
    start = epoch * num_examples
    read = [places.place(start + p) for p in range(num_examples)]
    assert {e for e, _ in read} == {epoch}
    epochs.append([index for _, index in read])
    assert sorted(epochs[-1]) == list(range(num_examples))
  if num_examples == 1000:
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(num_examples))


def test_large_sets_are_permuted_without_a_table(monkeypatch):
  monkeypatch.setattr(order, '_TABLE_EXAMPLES', 0)
  monkeypatch.setattr(order, '_table', None)
  read = [order.permuted(p, 3000, 5, 1) for p in range(3000)]
  assert sorted(read) == list(range(3000))
  assert read != [order.permuted(p, 3000, 5, 2) for p in range(3000)]


def test_a_set_beyond_the_table_uses_constant_memory():
  places = stream(2**31 - 1)
  read = {places.place(p)[1] for p in range(64)}
  assert len(read) == 64
  assert max(read) > 2**24


def test_seeds_give_different_orders():
  orders = [stream(100, seed) for seed in range(5)]
  read = {tuple(o.place(p)[1] for p in range(100)) for o in orders}
  assert len(read) == 5


def test_positions_are_uniform_over_epochs():
  first = [order.permuted(0, 10, 0, epoch) for epoch in range(1000)]
  counts = np.bincount(first, minlength=10)
  # 99.9 % quantile of chi-square with 9 degrees of freedom.
  assert np.sum((counts - 100) ** 2 / 100) < 27.9


def test_rows_of_a_batch():
  places = order.Order(10, batch_size=4, seed=0, shuffle=False)
  batches = [places.batch(step, range(1, 4)) for step in range(4)]
  assert [batch.indices.tolist() for batch in batches] == [
    [1, 2, 3], [5, 6, 7], [9], []
  ]  # fmt: skip
  assert {*batches[0].epochs.tolist()} == {0}
  shuffled = stream(10).batch(1, range(2, 6))
  expected = [stream(10).place(position) for position in range(10, 14)]
  pairs = zip(shuffled.epochs, shuffled.indices, strict=True)
  assert list(pairs) == expected


def test_a_replacement_is_a_function_of_its_arguments():
  draws = [stream(1000).replacement(2, 5, attempt) for attempt in range(20)]
  again = [stream(1000).replacement(2, 5, attempt) for attempt in range(20)]
  assert draws == again
  assert len(set(draws)) > 15
  assert all(0 <= draw < 1000 for draw in draws)


def test_hosts_split_the_rows_in_order():
  rows = [list(order.local_rows(8, host, 4)) for host in range(4)]
  assert rows == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
  ('batch_size', 'host_index', 'host_count', 'key'),
  [
    (6, 0, 4, 'batch_size'),
    (0, 0, 1, 'batch_size'),
    (8, 4, 4, 'host_index'),
    (8, -1, 4, 'host_index'),
    (8, 0, 0, 'host_count'),
  ],
)
def test_impossible_hosts(batch_size, host_index, host_count, key):
  with pytest.raises(ConfigError) as error:
    order.local_rows(batch_size, host_index, host_count)
  assert error.value.field == key


def by_length(lengths, batch_size=8, seed=0):
  """A function from a step to the records of its batch, and steps an epoch."""
  lengths = np.array(lengths, np.int32)
  given = order.LengthOrder(lengths, BUCKETS, batch_size, seed, True)

  def records(step):
    return given.batch(step, range(batch_size)).indices

  return records, given.steps_per_epoch


def some_lengths(count):
  return np.random.default_rng(0).integers(2, 33, count)


@pytest.mark.parametrize(
  ('count', 'batch_size'), [(1000, 8), (1003, 8), (9, 8), (8, 8), (17, 1)]
)
def test_an_epoch_by_length_loses_nothing_but_its_remainder(count, batch_size):
  records, steps = by_length(some_lengths(count), batch_size)
  assert steps == count // batch_size
  missing = []
  for epoch in range(3):
    batches = [records(epoch * steps + step) for step in range(steps)]
    read = np.concatenate(batches).tolist()
    assert len(read) == len(set(read)) == count - count % batch_size
    missing.append(set(range(count)) - set(read))
  if count == 1003:
    assert not missing[0] & missing[1] & missing[2]


def test_epochs_and_seeds_differ_by_length():
  def read(seed, first):
    records, _ = by_length(some_lengths(200), seed=seed)
    return [records(first + step).tolist() for step in range(25)]

  assert read(0, 0) == read(0, 0)
  assert read(0, 0) != read(0, 25)
  assert read(0, 0) != read(1, 0)


def test_any_two_rows_of_a_bucket_meet():
  # 16 rows of one length in batches of 8: in 200 epochs each pair is together
  # about every second time.
  records, _ = by_length([5] * 16)
  together = np.zeros((16, 16))
  for step in range(0, 400, 2):
    rows = records(step)
    together[np.ix_(rows, rows)] += 1
    rest = np.setdiff1d(np.arange(16), rows)
    together[np.ix_(rest, rest)] += 1
  pairs = together[np.triu_indices(16, 1)] / 200
  assert 0.3 < pairs.min() < pairs.max() < 0.65


@pytest.mark.parametrize('count', [1, 3, 7])
def test_a_set_smaller_than_a_batch_is_repeated(count):
  records, steps = by_length([5] * count)
  assert steps == 1
  read = np.concatenate([records(step) for step in range(count)])
  assert len(read) == 8 * count
  # Every run of `count` positions is a permutation.
  for start in range(0, len(read), count):
    assert sorted(read[start : start + count]) == list(range(count))


def splitmix64_loop(counter):
  """The published algorithm in Python integers."""
  mask = 2**64 - 1
  z = counter * 0x9E3779B97F4A7C15 & mask
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
  return z ^ (z >> 31)


def test_splitmix64_known_values():
  # The reference generator seeded with 0 begins with this number.
  assert splitmix64_loop(1) == 0xE220A8397B1DCDAF
  counters = np.array([1, 2, 12345, 2**64 - 1], np.uint64)
  expected = [splitmix64_loop(int(counter)) for counter in counters]
  assert order.splitmix64(counters).tolist() == expected
