"""Checks of records, and the count of bad ones."""

import threading

import numpy as np
import pytest

from dataset_lib import reader
from dataset_lib.errors import BadRecord, TooManyBadRecordsError
from dataset_lib.reader import BadRecords
from dataset_lib.source import DatasetInfo

IMAGES = DatasetInfo('image', (2, 2, 3), 'uint8', 3, (), 10)
TOKENS = DatasetInfo('tokens', (4,), 'int32', 2, (), 10, vocab_size=3)


@pytest.mark.parametrize(
  ('label', 'kind'),
  [
    *((label, None) for label in (0, 2, np.int64(1), np.uint8(2))),
    *((label, 'label_out_of_range') for label in (-1, 3, np.int64(10**12))),
    *((label, 'wrong_dtype') for label in (1.0, '1', None, True)),
  ],
)
def test_labels(label, kind):
  if kind is None:
    assert reader.check_label(label, 3) == int(label)
    return
  with pytest.raises(BadRecord) as error:
    reader.check_label(label, 3)
  assert error.value.kind == kind


@pytest.mark.parametrize(
  ('value', 'info', 'kind'),
  [
    (np.full((2, 2, 3), 255, np.uint8), IMAGES, None),
    (np.zeros((2, 2, 3), np.float32), IMAGES, 'wrong_dtype'),
    (np.zeros((2, 3, 3), np.uint8), IMAGES, 'wrong_shape'),
    (np.array([0, 1, 2, 0], np.int32), TOKENS, None),
    (np.zeros(4, np.int64), TOKENS, 'wrong_dtype'),
    (np.zeros(5, np.int32), TOKENS, 'wrong_shape'),
    (np.array([0, 1, 2, 3], np.int32), TOKENS, 'token_out_of_range'),
    (np.array([0, -1, 2, 1], np.int32), TOKENS, 'token_out_of_range'),
  ],
)
def test_inputs(value, info, kind):
  if kind is None:
    reader.check_input(value, info)
    return
  with pytest.raises(BadRecord) as error:
    reader.check_input(value, info)
  assert error.value.kind == kind


def test_blocks_cover_a_hosts_rows_in_order():
  blocks = reader.Blocks(rows=range(10, 20), rows_per_block=4)
  assert blocks.per_batch == 3
  assert [blocks.place(number) for number in range(3, 6)] == [
    (1, range(10, 14)), (1, range(14, 18)), (1, range(18, 20))
  ]  # fmt: skip


def test_bad_records_are_counted_once_by_kind_with_file_and_row():
  records = BadRecords(num_examples=1000, max_share=0.01)
  for _ in range(10):  # epochs
    records.add(BadRecord('empty', '', 'no bytes'), 'a.jpg', 3)
    records.add(BadRecord('empty', '', 'no bytes'), 'b.jpg', 4)
    records.add(BadRecord('truncated', '', 'cut'), 'c.jpg', 9)
  first = [
    {'file': 'a.jpg', 'row': 3, 'message': 'no bytes'},
    {'file': 'b.jpg', 'row': 4, 'message': 'no bytes'},
    {'file': 'c.jpg', 'row': 9, 'message': 'cut'},
  ]
  assert records.summary() == {
    'empty': {'count': 2, 'first': first[:2]},
    'truncated': {'count': 1, 'first': first[2:]},
  }


@pytest.mark.parametrize(
  ('num_examples', 'share', 'tolerated'),
  [(1000, 0.001, 1), (999, 0.001, 0), (5000, 0.001, 5), (100, 0.0, 0)],
)
def test_the_tolerance_is_a_share_of_the_split(num_examples, share, tolerated):
  records = BadRecords(num_examples, share)
  for row in range(tolerated):
    records.add(BadRecord('empty', '', 'no bytes'), f'{row}.jpg', row)
  with pytest.raises(TooManyBadRecordsError) as error:
    records.add(BadRecord('truncated', '', 'cut'), '/data/last.jpg', 77)
  message = str(error.value)
  assert '/data/last.jpg (row 77): cut' in message
  assert f'{tolerated + 1} of {num_examples} records are bad' in message
  assert 'max_bad_share' in message


def test_threads_lose_no_count():
  records = BadRecords(num_examples=10**6, max_share=0.1)

  def add(first):
    for row in range(first, first + 500):
      records.add(BadRecord('empty', '', ''), 'x', row)

  threads = [threading.Thread(target=add, args=(500 * i,)) for i in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert records.summary()['empty']['count'] == 4000
  assert len(records.summary()['empty']['first']) == 5
