"""Steps map to records, by length or not; records are checked and counted."""

import numpy as np
import pytest

from core.errors import BadRecord
from dataset_lib import bad_records, order, source
from dataset_lib.bad_records import TooManyBadRecordsError
from dataset_lib.source import DatasetInfo
from tests.dataset_lib.batches import BUCKETS


def stream(num_examples, seed=0):
  return order.Order(num_examples, batch_size=8, seed=seed, shuffle=True)


@pytest.mark.parametrize('num_examples', [1, 2, 7, 1000])
def test_each_epoch_is_another_permutation(num_examples):
  assert stream(num_examples).steps_per_epoch == max(1, num_examples // 8)
  read = []
  for seed in (3, 4):
    for epoch in range(3):
      positions = range(epoch * num_examples, (epoch + 1) * num_examples)
      places = stream(num_examples, seed).batch(0, positions)
      assert set(places.epochs) == {epoch}
      read.append(tuple(places.indices))
      assert sorted(read[-1]) == list(range(num_examples))
  if num_examples == 1000:
    assert len({*read, tuple(range(1000))}) == 7


def test_large_sets_are_permuted_without_a_table(monkeypatch):
  monkeypatch.setattr(order, '_TABLE_EXAMPLES', 0)
  monkeypatch.setattr(order, '_table', None)
  first, second = (
    stream(3000).batch(0, range(3000 * epoch, 3000 * epoch + 3000)).indices
    for epoch in (1, 2)
  )
  assert sorted(first) == sorted(second) == list(range(3000))
  assert (first != second).any()
  huge = {*stream(2**31 - 1).batch(0, range(64)).indices}
  assert len(huge) == 64
  assert max(huge) > 2**24


def by_length(lengths, batch_size=8):
  """A function from a step to the records of its batch, and steps an epoch."""
  lengths = np.array(lengths, np.int32)
  given = order.Order(len(lengths), batch_size, 0, True, lengths, BUCKETS)

  def records(step):
    return given.batch(step, range(batch_size)).indices

  return records, given.steps_per_epoch


@pytest.mark.parametrize(
  ('count', 'batch_size'), [(1000, 8), (1003, 8), (9, 8), (8, 8), (17, 1)]
)
def test_an_epoch_by_length_loses_nothing_but_its_remainder(count, batch_size):
  lengths = np.random.default_rng(0).integers(2, 33, count)
  records, steps = by_length(lengths, batch_size)
  assert steps == count // batch_size
  missing = []
  for epoch in range(3):
    batches = [records(epoch * steps + step) for step in range(steps)]
    read = np.concatenate(batches).tolist()
    assert len(read) == len(set(read)) == count - count % batch_size
    missing.append(set(range(count)) - set(read))
  if count == 1003:
    assert not missing[0] & missing[1] & missing[2]


def test_any_two_rows_of_a_bucket_meet():
  # 16 rows of one length in batches of 8: in 200 epochs each pair is together
  # about every second time.
  records, _ = by_length([5] * 16)
  together = np.zeros((16, 16))
  for step in range(0, 400, 2):
    rows = records(step)
    for part in (rows, np.setdiff1d(np.arange(16), rows)):
      together[np.ix_(part, part)] += 1
  pairs = together[np.triu_indices(16, 1)] / 200
  assert 0.3 < pairs.min() < pairs.max() < 0.65


@pytest.mark.parametrize('count', [1, 3, 7])
def test_a_set_smaller_than_a_batch_is_repeated(count):
  records, steps = by_length([5] * count)
  assert steps == 1
  read = np.concatenate([records(step) for step in range(count)])
  # Every run of `count` positions is a permutation.
  for start in range(0, len(read), count):
    assert sorted(read[start : start + count]) == list(range(count))


IMAGES = DatasetInfo('image', (2, 2, 3), 'uint8', 3, (), 10)
TOKENS = DatasetInfo('tokens', (4,), 'int32', 2, (), 10, vocab_size=3)
VALUES = [
  (np.full((2, 2, 3), 255, np.uint8), IMAGES, None),
  (np.array([0, 1, 2, 0], np.int32), TOKENS, None),
  (np.zeros((2, 2, 3), np.float32), IMAGES, 'wrong_dtype'),
  (np.zeros((2, 3, 3), np.uint8), IMAGES, 'wrong_shape'),
  (np.zeros(4, np.int64), TOKENS, 'wrong_dtype'),
  (np.zeros(5, np.int32), TOKENS, 'wrong_shape'),
  (np.array([0, 1, 2, 3], np.int32), TOKENS, 'token_out_of_range'),
  (np.array([0, -1, 2, 1], np.int32), TOKENS, 'token_out_of_range'),
  *((label, 3, None) for label in (0, 2, np.int64(1), np.uint8(2))),
  *((n, 3, 'label_out_of_range') for n in (-1, 3, np.int64(10**12))),
  *((label, 3, 'wrong_dtype') for label in (1.0, '1', None, True)),
]


@pytest.mark.parametrize(('value', 'legal', 'kind'), VALUES)
def test_values_of_records_are_checked(value, legal, kind):
  is_input = isinstance(legal, DatasetInfo)
  check = source.check_input if is_input else source.check_label
  if kind is None:
    assert check(value, legal) in (None, value)
    return
  with pytest.raises(BadRecord) as error:
    check(value, legal)
  assert error.value.kind == kind


@pytest.mark.parametrize(
  ('num_examples', 'share', 'tolerated'),
  [(1000, 0.001, 1), (999, 0.001, 0), (5000, 0.001, 5), (100, 0.0, 0)],
)
def test_the_tolerance_is_a_share_of_the_split(num_examples, share, tolerated):
  records = bad_records.BadRecords(num_examples, share, 'train')
  for row in [*range(tolerated)] * 3:  # a record counts once
    records.count([(row, BadRecord('empty', f'{row}.jpg', 'no bytes'))])
  words = f'train: {tolerated + 1} of {num_examples} records are bad'
  words = rf'(?s)^{words}.* /data/last\.jpg: cut.*max_bad_share'
  with pytest.raises(TooManyBadRecordsError, match=words):
    records.count([(77, BadRecord('truncated', '/data/last.jpg', 'cut'))])
