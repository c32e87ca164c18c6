"""TFRecord files and their indexes: damaged, changed, large; without TFDS."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import pathlib
import struct
import tracemalloc

import pytest

from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.records import sharded
from tests.dataset_lib import example_files
from tests.dataset_lib.batches import build

SHARD = b''.join(map(sharded.framed, (b'a0', b'', b'a2' * 50)))


DAMAGED = [(SHARD[:-cut], 3) for cut in (1, 4, 5, 100, 110, 130)]
DAMAGED += [(SHARD, 2), (SHARD, 4), (bytes(len(SHARD)), 8), (bytes(9999), None)]


@pytest.mark.parametrize(('data', 'count'), DAMAGED)
def test_a_damaged_shard_is_named(tmp_path, data, count):
  path = tmp_path / 'shard-0'
  path.write_bytes(SHARD)
  offsets = sharded.record_offsets(str(path), 3)
  assert offsets.tolist() == [0, 18, 34, len(SHARD)]
  path.write_bytes(data)
  with pytest.raises(InvalidDataError, match='shard-0'):
    sharded.record_offsets(str(path), count)


def shards_of(folder, count=3, rows=4):
  """Writes shards; returns the paths and the records."""
  records = [
    [f'{shard}.{row}'.encode() * (row + 1) for row in range(rows)]
    for shard in range(count)
  ]
  files = [folder / f'train-{number}.tfrecord' for number in range(count)]
  for file, rows_of_file in zip(files, records, strict=True):
    example_files.write(file, rows_of_file)
  return list(map(str, files)), records


def opened(files, kind='tfrecord'):
  counts = sharded.count_records(files, kind)
  sizes = zip(files, counts, strict=True)
  shards = [sharded.Shard(file, 0, count, count) for file, count in sizes]
  return sharded.RecordFiles(shards, kind)


def contents(files):
  records = opened(files)
  return [records[index] for index in range(len(records))]


@pytest.fixture
def scans(monkeypatch):
  """The files that are scanned, in order."""
  seen, scan = [], sharded.record_offsets

  def spy(file, *arguments):
    seen.append(file)
    return scan(file, *arguments)

  monkeypatch.setattr(sharded, 'record_offsets', spy)
  return seen


def test_an_index_is_made_once(tmp_path, scans):
  files, records = shards_of(tmp_path)
  expected = list(itertools.chain(*records))
  for parts in ([files], [files], [files[:1], files[1:]]):
    assert [record for part in parts for record in contents(part)] == expected
    assert sorted(scans) == files
  assert len(list(tmp_path.glob('*'))) == 3  # nothing beside the data


def test_a_changed_shard_is_indexed_again(tmp_path, scans):
  files, records = shards_of(tmp_path)
  contents(files)
  example_files.write(tmp_path / 'train-1.tfrecord', [b'new', b'rows'])
  assert contents(files) == [*records[0], b'new', b'rows', *records[2]]
  # Of equal size, at another time.
  shard = tmp_path / 'train-2.tfrecord'
  example_files.write(shard, records[2][::-1])
  os.utime(shard, ns=(5, 5))
  assert contents(files)[-4:] == records[2][::-1]
  assert scans[3:] == [files[1], files[2]]


def broken(data):
  """Indexes that differ from `data`, which has 4 records."""
  for size in (0, 7, 8, 16, 40, len(data) - 8, len(data) - 1):
    yield data[:size]
  yield data + bytes(8)
  yield bytes(len(data))
  for word in range(len(data) // 8):
    for byte in (0, 3, 7):
      place = 8 * word + byte
      yield data[:place] + bytes([data[place] ^ 129]) + data[place + 1 :]


def test_a_damaged_index_is_made_again(tmp_path, scans):
  files, records = shards_of(tmp_path, 1)
  path = sharded.tfrecord_index(files[0])
  data = path.read_bytes()
  damaged = list(broken(data))
  assert len(data) == 8 * 6
  assert len(damaged) == 27
  for number, other in enumerate(damaged, 1):
    path.write_bytes(other)
    assert contents(files) == records[0]
    assert len(scans) == 1 + number
    assert path.read_bytes() == data


def test_a_record_damaged_later_is_bad_alone(tmp_path, scans):
  files, records = shards_of(tmp_path, 1)
  readable, time = opened(files), os.stat(files[0]).st_mtime_ns
  path = pathlib.Path(files[0])
  data = path.read_bytes()
  path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
  os.utime(files[0], ns=(time, time))
  with pytest.raises(BadRecord, match=r'record 0.*does not hold exactly 4'):
    readable[0]
  assert [readable[row] for row in (1, 2, 3)] == records[0][1:]


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_no_changed_bit_is_read(kind, tmp_path):
  path = tmp_path / f'train-0.{kind}'
  expected = [b'0' * 40, b'1' * 40]
  example_files.write(path, expected)
  data, kinds = bytearray(path.read_bytes()), set()
  for bit in range(0, 8 * len(data), 1 if kind == 'tfrecord' else 9973):
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    data[bit // 8] ^= 1 << bit % 8
    good = 0
    with contextlib.suppress(InvalidDataError):
      records = opened([str(path)], kind)
      for row, record in enumerate(expected):
        try:
          assert records[row] == record, bit
          good += 1
        except BadRecord as bad:
          kinds.add(bad.kind)
    assert good < 2 or kind == 'array_record', bit
  assert kinds == ({'wrong_checksum'} if kind == 'tfrecord' else set())


def test_a_checksum_is_that_of_tensorflow():
  # 8a9136aa, of 32 zeros in RFC 3720, masked.
  assert sharded.checked(bytes(32))[32:].hex() == 'faffd70f'


def test_an_index_is_made_once_by_several_at_once(tmp_path, scans):
  files, _ = shards_of(tmp_path, 1)
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    paths = set(pool.map(sharded.tfrecord_index, files * 40))
  assert len(paths) == len(scans) == 1
  names = {path.name for path in paths.pop().parent.iterdir()}
  assert len(names) == 2  # the index and its lock


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
  files, _ = shards_of(tmp_path, 1)
  monkeypatch.setenv('XDG_CACHE_HOME', files[0])  # a file
  with pytest.raises(MissingDataError, match='set XDG_CACHE_HOME to a folder'):
    contents(files)


def traced_peak(config):
  """Returns the bytes that opening a data set and its order takes."""
  for is_measured in (False, True):  # once more: imports take memory too
    if is_measured:
      tracemalloc.start()
    build(config, batch_size=4096)._order.batch(10**6, range(0, 64))
  return tracemalloc.get_traced_memory()[1]


def test_opening_300_million_records_takes_little_memory(tmp_path, scans):
  rows, bytes_each, count = 300_000, 100, 1000
  for number in range(count):
    file = tmp_path / f'train-{number:05}-of-{count:05}.tfrecord'
    # Files of zeros, which the disk does not store.
    file.touch()
    os.truncate(file, rows * bytes_each)
    index = sharded._index_path(str(file))
    index.parent.mkdir(parents=True, exist_ok=True)
    with index.open('wb') as opened_index:
      opened_index.write(struct.pack('<qq', file.stat().st_mtime_ns, 0))
      opened_index.seek(8 * (rows + 1))
      opened_index.write(struct.pack('<q', rows * bytes_each))
  size = dict(num_classes=18_291, image_size=8)
  config = dict(name='records', directory=str(tmp_path), **size)
  data = build(config, batch_size=4096)
  assert len(data.source) == rows * count
  indices = {*data._order.batch(10**6, range(0, 64)).indices.tolist()}
  assert len(indices) == 64
  assert max(indices) > 2**27  # of all records
  # In a process of its own, as threads of other tests allocate too.
  fresh = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(1, fresh) as pool:
    peak = pool.submit(traced_peak, config).result()
  assert peak < 4 * 2**20  # the offsets would take 2.4 GB
  assert not scans
