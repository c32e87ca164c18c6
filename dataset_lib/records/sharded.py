"""Random access to the records of TFRecord and ArrayRecord shards.

The index of a TFRecord file, 8 bytes a record, is made by a scan and kept in
`$XDG_CACHE_HOME/adaptive_computation` (default `~/.cache`) until size or time
of the file change. Memory grows with the shards, not the records. The scan
verifies the checksums of lengths, reading a record that of its data.
"""

import array
import bisect
import concurrent.futures
import hashlib
import itertools
import os
import pathlib
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import filelock
import google_crc32c
import numpy as np
from jaxtyping import Int64

from core import files
from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.source import require

Kind = Literal['array_record', 'tfrecord']
_LENGTH, _CHECKSUM = struct.Struct('<Q'), struct.Struct('<I')
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size  # of TFRecord; then the data
_FRAME_BYTES = _HEADER_BYTES + _CHECKSUM.size
# Of an index: the file's time in ns, then `record_offsets`.
_WORD = np.dtype('<i8')
_THREADS = 32  # shards opened at once; network file systems answer slowly


class Shard(NamedTuple):
  """Records [skip, skip + take) of a file; named as in TFDS."""

  filename: str
  skip: int
  take: int
  examples_in_shard: int  # of the file


class RecordFiles:
  """The records of some shards, by index, from several threads.

  Raises MissingDataError or InvalidDataError for missing or damaged shards.
  """

  def __init__(self, shards: Sequence[Any], kind: Kind, parse: Any = bytes):
    self._shards, self._parse = shards, parse
    self._starts = [0, *itertools.accumulate(shard.take for shard in shards)]
    self.files = sorted({shard.filename for shard in shards})
    for file in self.files:
      files.check_regular(file, os.path.dirname(file))
    if kind == 'tfrecord':
      with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        counts = [shard.examples_in_shard for shard in shards]
        paths = [shard.filename for shard in shards]
        self._indexes = list(pool.map(tfrecord_index, paths, counts))
      self._read: Any = self._read_tfrecord
    else:
      from array_record.python import array_record_data_source as array_record

      self._read = array_record.ArrayRecordDataSource(shards).__getitem__

  def __len__(self) -> int:
    return self._starts[-1]

  def __getitem__(self, index: int) -> Any:
    """Returns a record, parsed; raises BadRecord if it cannot be read."""
    from google.protobuf import message

    try:
      data = self._read(index)
    except BadRecord as bad:
      raise BadRecord(bad.kind, self.where(index), bad.message) from bad
    except (OSError, RuntimeError, ValueError, IndexError) as error:
      raise BadRecord('unreadable', self.where(index), str(error)) from error
    files.check_size(len(data), where=self.where(index))
    try:
      return self._parse(data)
    except (message.DecodeError, KeyError, ValueError) as error:
      raise BadRecord('unparsable', self.where(index), str(error)) from error

  def where(self, index: int) -> str:
    """Returns the file of a record and its row there."""
    number, row = self._locate(index)
    return f'{self._shards[number].filename}, record {row}'

  def _locate(self, index: int) -> tuple[int, int]:
    """Returns (number of the shard, row in its file) of a record."""
    number = bisect.bisect_right(self._starts, index) - 1
    return number, index - self._starts[number] + self._shards[number].skip

  def _read_tfrecord(self, index: int) -> bytes:
    number, row = self._locate(index)
    shard, path = self._shards[number], self._indexes[number]
    data = _read_row(shard.filename, path, row)
    if data is None:  # a damaged index, or a damaged record, which raises
      tfrecord_index(shard.filename, shard.examples_in_shard, again=True)
      data = _read_row(shard.filename, path, row)
    if data is None:
      raise OSError('the file changes while it is read')
    return data


def checked(data: bytes) -> bytes:
  """Returns data with its checksum, as both parts of a TFRecord have it."""
  crc = google_crc32c.value(data)
  masked = (crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8
  return data + _CHECKSUM.pack(masked & 0xFFFFFFFF)


def framed(data: bytes) -> bytes:
  """Returns a record as a TFRecord file has it."""
  return checked(_LENGTH.pack(len(data))) + checked(data)


def _read_row(file: str, index: pathlib.Path, row: int) -> bytes | None:
  """Returns a record, None if its length is not that of the index.

  Raises BadRecord 'wrong_checksum', OSError for other damage.
  """
  # Both files are opened per read: a data set may have more shards than a
  # process may have open files, and a file's position is not thread-safe.
  start, end = np.fromfile(index, _WORD, 2, offset=(1 + row) * _WORD.itemsize)
  size = int(end - start) - _FRAME_BYTES
  with open(file, 'rb', buffering=0) as opened:
    opened.seek(start)
    header = opened.read(_HEADER_BYTES)
    length = size.to_bytes(_LENGTH.size, 'little', signed=True)
    if header and header != checked(length):
      return None
    files.check_size(size)
    block = opened.read(size + _CHECKSUM.size)
  data = block[:size]
  if len(block) < size + _CHECKSUM.size:
    raise OSError(f'cut short: expected {size} bytes, got {len(data)}')
  require(checked(data) == block, 'wrong_checksum', 'its data were changed')
  return data


def count_records(paths: Sequence[str], kind: Kind) -> list[int]:
  """Returns the number of records of each file; makes missing indexes."""
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    if kind == 'array_record':
      return list(pool.map(_count_array_record, paths))
    indexes = pool.map(tfrecord_index, paths)
    return [path.stat().st_size // _WORD.itemsize - 2 for path in indexes]


def _count_array_record(file: str) -> int:
  from array_record.python import array_record_module

  try:
    reader = array_record_module.ArrayRecordReader(file)
    count = reader.num_records()
    reader.close()
  except (RuntimeError, ValueError) as error:
    raise InvalidDataError(f'{file} is damaged: {error}') from error
  return count


def tfrecord_index(
  file: str, num_records: int | None = None, again: bool = False
) -> pathlib.Path:
  """Returns the index of a TFRecord file, made if missing or out of date.

  Several processes make it once; `again` makes it in any case. Raises
  InvalidDataError as `record_offsets`, MissingDataError if the file cannot be
  read or the cache folder not be written.
  """
  path, stat = _index_path(file), os.stat(file)
  if not again and _is_index(path, stat, num_records):
    return path
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f'{path}.lock'):
      if again or not _is_index(path, stat, num_records):
        offsets = record_offsets(file, num_records)
        time = _WORD.type(stat.st_mtime_ns)
        temporary = path.with_suffix('.tmp')
        np.append(time, offsets).tofile(temporary)
        temporary.replace(path)  # no fsync: readers notice damage
  except OSError as error:
    problem = f'cannot make the index {path} of {file}: {error}'
    advice = 'set XDG_CACHE_HOME to a folder that can be written'
    raise MissingDataError(f'{problem}; {advice}') from error
  return path


def _index_path(file: str) -> pathlib.Path:
  name = hashlib.sha256(os.path.realpath(file).encode()).hexdigest()[:32]
  # Older versions kept unverified ones in 'offsets'.
  return files.cache_folder('verified_offsets') / name


def _is_index(path: pathlib.Path, stat: Any, num_records: int | None) -> bool:
  """Returns True if time, size and count equal the file's, unscanned."""
  try:
    index = np.memmap(path, _WORD, 'r')
  except (OSError, ValueError):  # missing, empty, or not a number of words
    return False
  ends = [*index[:2].tolist(), index[-1]]
  expected = [stat.st_mtime_ns, 0, stat.st_size]
  return num_records in (None, len(index) - 2) and ends == expected


def record_offsets(
  filename: str, num_records: int | None = None
) -> Int64[np.ndarray, ' M']:
  """Returns the offsets of a TFRecord file's records, and at the end its size.

  Raises InvalidDataError unless it holds whole records, `num_records` of them.
  """
  size, offsets = os.path.getsize(filename), array.array('q', [0])
  with open(filename, 'rb') as file:
    while offsets[-1] + _HEADER_BYTES <= size:
      file.seek(offsets[-1])
      header = file.read(_HEADER_BYTES)
      if header != checked(header[: _LENGTH.size]):
        break
      [length] = _LENGTH.unpack_from(header)
      offsets.append(min(offsets[-1] + length + _FRAME_BYTES, size + 1))
  if offsets[-1] != size or num_records not in (None, len(offsets) - 1):
    held = 'whole records' if num_records is None else f'{num_records} records'
    problem = f'does not hold exactly {held} in its {size} bytes'
    raise InvalidDataError(f'{filename} {problem}; copy it again')
  return np.array(offsets, np.int64)
