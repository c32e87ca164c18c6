"""TFRecord files at random, against files written byte by byte here."""

import dataclasses
import os
import pathlib
import struct

import pytest

from dataset_lib import builder, tfds
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
)


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


def cut(by):
  return lambda data: data[:-by]


def flip(byte):
  return lambda data: data[:byte] + bytes([data[byte] ^ 1]) + data[byte + 1 :]


@pytest.mark.parametrize(
  ('damage', 'count'),
  [
    (bytes, 2),
    (bytes, 4),
    *((cut(by), 3) for by in (1, 4, 5, 100, 110, 130)),
    *((flip(byte), 3) for byte in range(8)),  # of a length
  ],
)
def test_a_damaged_shard_is_named(shards, damage, count):
  path = pathlib.Path(shards[0])
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(InvalidDataError, match='shard-0'):
    tfds.record_offsets(shards[0], count)


def test_a_missing_shard(shards, tmp_path):
  with pytest.raises(MissingDataError, match='absent'):
    tfds.TFRecordFiles([Instruction(str(tmp_path / 'absent'), 0, 1, 1)])


@pytest.mark.parametrize(
  ('change', 'kind'),
  [
    (lambda path: os.truncate(path, 40), 'truncated'),
    (os.remove, 'unreadable'),
  ],
)
def test_a_shard_that_changes_later_has_bad_records(shards, change, kind):
  files = tfds.TFRecordFiles([Instruction(shards[0], 0, 3, 3)])
  change(shards[0])
  with pytest.raises(BadRecord) as error:
    files[2]
  assert error.value.kind == kind
  assert error.value.where == f'{shards[0]}, record 2'


@pytest.mark.parametrize(
  'name', ['huggingface:x', 'kaggle:x', '../x', 'x/a=1', 'X', 'x;y', 'x/..']
)
def test_names_that_lead_elsewhere(name):
  with pytest.raises(ConfigError) as error:
    builder.validate(dict(name='tfds', builder=name, image_size=8))
  assert error.value.field == 'dataset.builder'


@pytest.mark.parametrize(
  'name', ['cifar10', 'a_b/c-d.e', 'x:1.2.3', 'x/y:1.2.3']
)
def test_names_of_builders(name):
  given = dict(name='tfds', builder=name, image_size=8)
  assert builder.validate(given)['builder'] == name
