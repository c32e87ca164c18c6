"""Damaged TFRecord files, without TFDS."""

import struct

import pytest

from dataset_lib import record_files
from dataset_lib.errors import InvalidDataError

# The TFRecord framing; the checksums are not read.
SHARD = b''.join(
  struct.pack('<QI', len(record), 0) + record + bytes(4)
  for record in (b'a0', b'', b'a2' * 50)
)


def flip(byte):
  return SHARD[:byte] + bytes([SHARD[byte] ^ 1]) + SHARD[byte + 1 :]


@pytest.mark.parametrize(
  ('data', 'count'),
  [
    (SHARD, 2),
    (SHARD, 4),
    *((SHARD[:-cut], 3) for cut in (1, 4, 5, 100, 110, 130)),
    *((flip(byte), 3) for byte in range(8)),  # of a length
  ],
)
def test_a_damaged_shard_is_named(tmp_path, data, count):
  path = tmp_path / 'shard-0'
  path.write_bytes(SHARD)
  assert record_files.record_offsets(str(path), 3).tolist() == [
    0,
    18,
    34,
    len(SHARD),
  ]
  path.write_bytes(data)
  with pytest.raises(InvalidDataError, match='shard-0'):
    record_files.record_offsets(str(path), count)
