"""TFRecord files at random, against files written byte by byte here."""

import dataclasses
import struct

import pytest

from dataset_lib import tfds
from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError


@dataclasses.dataclass(frozen=True)
class Instruction:
  filename: str
  skip: int
  take: int
  examples_in_shard: int


def write(path, records):
  """The TFRecord framing; the checksums are not read."""
  with open(path, 'wb') as file:
    for record in records:
      file.write(struct.pack('<QI', len(record), 0) + record + bytes(4))


@pytest.fixture
def shards(tmp_path):
  contents = [
    [b'a0', b'', b'a2' * 50],
    [b'b0', b'b1b1', b'b2', b'b3'],
  ]
  names = [str(tmp_path / f'shard-{number}') for number in range(2)]
  for name, records in zip(names, contents, strict=True):
    write(name, records)
  return names


def test_every_record_of_every_shard(shards):
  files = tfds.TFRecordFiles(
    [Instruction(shards[0], 0, 3, 3), Instruction(shards[1], 0, 4, 4)]
  )
  expected = [b'a0', b'', b'a2' * 50, b'b0', b'b1b1', b'b2', b'b3']
  assert [files[index] for index in range(7)] == expected
  assert files.where(4) == f'{shards[1]}, record 1'


def test_parts_of_shards(shards):
  files = tfds.TFRecordFiles(
    [Instruction(shards[0], 2, 1, 3), Instruction(shards[1], 1, 2, 4)]
  )
  assert [files[index] for index in range(3)] == [b'a2' * 50, b'b1b1', b'b2']
  assert files.where(0) == f'{shards[0]}, record 2'
  assert files.where(2) == f'{shards[1]}, record 2'


@pytest.mark.parametrize('count', [2, 4])
def test_another_number_of_records(shards, count):
  with pytest.raises(InvalidDataError, match='shard-0 does not hold exactly'):
    tfds.record_offsets(shards[0], count)


@pytest.mark.parametrize('cut', [1, 4, 5, 100, 110, 130])
def test_a_shard_cut_short(shards, cut):
  with open(shards[0], 'rb') as file:
    data = file.read()
  with open(shards[0], 'wb') as file:
    file.write(data[:-cut])
  with pytest.raises(InvalidDataError, match='shard-0'):
    tfds.record_offsets(shards[0], 3)


@pytest.mark.parametrize('byte', range(8))
def test_a_damaged_length(shards, byte):
  with open(shards[1], 'r+b') as file:
    file.seek(byte)
    old = file.read(1)[0]
    file.seek(byte)
    file.write(bytes([old ^ 1]))
  with pytest.raises(InvalidDataError, match='shard-1'):
    tfds.record_offsets(shards[1], 4)


def test_a_missing_shard(shards, tmp_path):
  with pytest.raises(MissingDataError, match='absent'):
    tfds.TFRecordFiles([Instruction(str(tmp_path / 'absent'), 0, 1, 1)])


def test_a_shard_that_shrinks_later_is_a_bad_record(shards):
  files = tfds.TFRecordFiles([Instruction(shards[0], 0, 3, 3)])
  with open(shards[0], 'r+b') as file:
    file.truncate(40)
  with pytest.raises(BadRecord) as error:
    files[2]
  assert error.value.kind == 'truncated'
  assert error.value.where == f'{shards[0]}, record 2'


def test_a_shard_that_vanishes_later_is_a_bad_record(shards):
  files = tfds.TFRecordFiles([Instruction(shards[0], 0, 3, 3)])
  import os

  os.remove(shards[0])
  with pytest.raises(BadRecord) as error:
    files[0]
  assert error.value.kind == 'unreadable'
