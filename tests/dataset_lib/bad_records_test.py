"""Counting bad records."""

import threading

import pytest

from dataset_lib.bad_records import BadRecords
from dataset_lib.errors import BadRecord, TooManyBadRecordsError


def test_counts_by_kind_with_file_and_row():
  records = BadRecords(num_examples=1000, max_share=0.01)
  records.add(BadRecord('empty', '', 'no bytes'), 'a.jpg', 3)
  records.add(BadRecord('empty', '', 'no bytes'), 'b.jpg', 4)
  records.add(BadRecord('truncated', '', 'cut'), 'c.jpg', 9)
  assert records.summary() == {
    'empty': {
      'count': 2,
      'first': [
        {'file': 'a.jpg', 'row': 3, 'message': 'no bytes'},
        {'file': 'b.jpg', 'row': 4, 'message': 'no bytes'},
      ],
    },
    'truncated': {
      'count': 1,
      'first': [{'file': 'c.jpg', 'row': 9, 'message': 'cut'}],
    },
  }


def test_a_record_read_in_every_epoch_counts_once():
  records = BadRecords(num_examples=1000, max_share=0.001)
  for _ in range(10):
    records.add(BadRecord('empty', '', 'no bytes'), 'a.jpg', 3)
  assert records.summary()['empty']['count'] == 1


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
