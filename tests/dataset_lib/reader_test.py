"""Labels, dtypes and blocks of rows."""

import numpy as np
import pytest

from dataset_lib import reader
from dataset_lib.errors import BadRecord
from dataset_lib.source import DatasetInfo

IMAGES = DatasetInfo('image', (2, 2, 3), 'uint8', 3, (), 10)
TOKENS = DatasetInfo('tokens', (4,), 'int32', 2, (), 10, vocab_size=3)


@pytest.mark.parametrize('label', [0, 2, np.int64(1), np.uint8(2)])
def test_legal_labels(label):
  assert reader.check_label(label, 3) == int(label)


@pytest.mark.parametrize(
  ('label', 'kind'),
  [
    (-1, 'label_out_of_range'),
    (3, 'label_out_of_range'),
    (np.int64(10**12), 'label_out_of_range'),
    (1.0, 'wrong_dtype'),
    ('1', 'wrong_dtype'),
    (None, 'wrong_dtype'),
    (True, 'wrong_dtype'),
  ],
)
def test_illegal_labels(label, kind):
  with pytest.raises(BadRecord) as error:
    reader.check_label(label, 3)
  assert error.value.kind == kind


@pytest.mark.parametrize(
  ('value', 'info', 'kind'),
  [
    (np.zeros((2, 2, 3), np.float32), IMAGES, 'wrong_dtype'),
    (np.zeros((2, 3, 3), np.uint8), IMAGES, 'wrong_shape'),
    (np.zeros(4, np.int64), TOKENS, 'wrong_dtype'),
    (np.zeros(5, np.int32), TOKENS, 'wrong_shape'),
    (np.array([0, 1, 2, 3], np.int32), TOKENS, 'token_out_of_range'),
    (np.array([0, -1, 2, 1], np.int32), TOKENS, 'token_out_of_range'),
  ],
)
def test_illegal_inputs(value, info, kind):
  with pytest.raises(BadRecord) as error:
    reader.check_input(value, info)
  assert error.value.kind == kind


def test_legal_inputs():
  reader.check_input(np.full((2, 2, 3), 255, np.uint8), IMAGES)
  reader.check_input(np.array([0, 1, 2, 0], np.int32), TOKENS)


def test_blocks_cover_a_hosts_rows_in_order():
  blocks = reader.Blocks(batch_size=20, rows=range(10, 20), rows_per_block=4)
  assert blocks.per_batch == 3
  parts = [list(blocks.positions(number)) for number in range(3, 6)]
  assert parts == [
    [30, 31, 32, 33],
    [34, 35, 36, 37],
    [38, 39],
  ]
