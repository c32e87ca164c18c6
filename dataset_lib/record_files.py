"""Random access to the serialized records of TFDS's shards.

ArrayRecord files have an index. TFRecord files have none: their record lengths
are walked once, on opening, and the offsets kept in memory (8 bytes a record);
nothing is ever written beside the user's data.
"""

import bisect
import itertools
import os
import struct
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError

_HEADER = struct.Struct('<QI')  # length of the data, checksum of the length
_FOOTER_BYTES = 4  # checksum of the data


@runtime_checkable
class FileInstruction(Protocol):
  """Part of a shard, as TFDS describes it: `take` records after `skip`."""

  filename: str
  skip: int
  take: int
  examples_in_shard: int


@runtime_checkable
class RecordFiles(Protocol):
  """Serialized records by index."""

  def __getitem__(self, index: int) -> bytes:
    """Bytes of a record; BadRecord when they cannot be read."""

  def where(self, index: int) -> str:
    """File of a record and its row there."""


class _Shards:
  """Finds the shard of a record.

  Args:
    instructions: parts of shards, in order.
  """

  def __init__(self, instructions: Sequence[FileInstruction]):
    self._shards = list(instructions)
    takes = [shard.take for shard in self._shards]
    self._starts = list(itertools.accumulate(takes, initial=0))
    for shard in self._shards:
      if not os.path.exists(shard.filename):
        raise MissingDataError(f'missing shard {shard.filename}; copy it again')

  def locate(self, index: int) -> tuple[int, int]:
    """(number of the shard, row in its file) of record `index`."""
    number = bisect.bisect_right(self._starts, index) - 1
    row = index - self._starts[number] + self._shards[number].skip
    return number, row

  def where(self, index: int) -> str:
    """File of a record and its row there."""
    number, row = self.locate(index)
    return f'{self._shards[number].filename}, record {row}'


class ArrayRecordFiles(_Shards):
  """Records of ArrayRecord shards.

  Args:
    instructions: parts of shards, in order.
  """

  def __init__(self, instructions: Sequence[FileInstruction]):
    super().__init__(instructions)
    # Imported here: only users of TFDS pay for it.
    from array_record.python import array_record_data_source

    self._records = array_record_data_source.ArrayRecordDataSource(self._shards)

  def __getitem__(self, index: int) -> bytes:
    try:
      return self._records[index]
    except (OSError, RuntimeError, ValueError, IndexError) as error:
      raise BadRecord('unreadable', self.where(index), str(error)) from error


class TFRecordFiles(_Shards):
  """Records of TFRecord shards, by offsets found once.

  Args:
    instructions: parts of shards, in order.

  Raises:
    InvalidDataError: a shard is cut short, or holds another number of records
      than its data set's description says.
  """

  def __init__(self, instructions: Sequence[FileInstruction]):
    super().__init__(instructions)
    self._offsets = [
      record_offsets(shard.filename, shard.examples_in_shard)
      for shard in self._shards
    ]

  def __getitem__(self, index: int) -> bytes:
    number, row = self.locate(index)
    start, end = self._offsets[number][row : row + 2]
    size = int(end - start) - _HEADER.size - _FOOTER_BYTES
    try:
      # Opened per read: a data set may have more shards than a process may
      # have open files, and a file object's position is not thread-safe.
      with open(self._shards[number].filename, 'rb', buffering=0) as file:
        file.seek(int(start) + _HEADER.size)
        data = file.read(size)
    except OSError as error:
      raise BadRecord('unreadable', self.where(index), str(error)) from error
    if len(data) != size:
      message = f'expected {size} bytes, got {len(data)}'
      raise BadRecord('truncated', self.where(index), message)
    return data


def record_offsets(filename: str, num_records: int) -> Int64[np.ndarray, ' M']:
  """Offsets of a TFRecord file's records, and at the end its size.

  A damaged length leads the walk astray, so that it does not end exactly at
  the end of the file after `num_records` records.

  Raises:
    InvalidDataError: the file does not hold exactly `num_records` records.
  """
  size = os.path.getsize(filename)
  offsets = np.zeros(num_records + 1, np.int64)
  offset = 0
  with open(filename, 'rb') as file:
    for row in range(num_records):
      file.seek(offset)
      header = file.read(_HEADER.size)
      if len(header) < _HEADER.size:
        break
      length, _ = _HEADER.unpack(header)
      offset += _HEADER.size + length + _FOOTER_BYTES
      if offset > size:
        break
      offsets[row + 1] = offset
    else:
      if offset == size:
        return offsets
  raise InvalidDataError(
    f'{filename} does not hold exactly {num_records} records in its {size} '
    'bytes; it is damaged or cut short, copy or prepare it again'
  )
