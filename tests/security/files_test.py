"""Files that were made to do harm are refused by name, and not waited for."""

import contextlib
import gzip
import os
import struct
import threading
import tracemalloc
import zlib

import PIL.Image
import pytest

from core import files
from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib import builder, tables
from dataset_lib.records import sharded
from serve_lib.chain import InputError
from serve_lib.items import ImageReader
from tests.dataset_lib import (
  corpora,
  example_files,
  image_folder_test,
  word_rows,
)

SIDE = 20_000


def write_pipe(path):
  os.mkfifo(path)


def write_bomb(path):
  """Writes a PNG of 20,000 x 20,000 pixels by its header."""
  PIL.Image.new('1', (8, 8)).save(path)
  png = bytearray(path.read_bytes())
  png[16:24] = struct.pack('>II', SIDE, SIDE)
  png[29:33] = struct.pack('>I', zlib.crc32(png[12:29]))
  path.write_bytes(png)


def write_sparse(path):
  with path.open('wb') as file:
    file.truncate(3 * 2**30)


def write_loop(path):
  path.symlink_to(path.name)


HARMFUL = {
  'not_a_file': write_pipe, 'too_many_pixels': write_bomb,
  'too_large': write_sparse, 'unreadable': write_loop,
}  # fmt: skip


@contextlib.contextmanager
def within(seconds):
  """Fails, rather than hangs, if reading waits for a pipe's writer."""
  timer = threading.Timer(seconds, os._exit, (9,))
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


@pytest.mark.parametrize('kind', HARMFUL)
def test_a_folder_counts_a_bad_row(kind, tmp_path):
  for name in ('cat', 'dog'):
    image_folder_test.write_image(tmp_path / 'train' / name / '1.png')
  HARMFUL[kind](tmp_path / 'train' / 'cat' / '0.png')
  source = image_folder_test.source(tmp_path)
  with within(60), pytest.raises(BadRecord) as caught:
    source.transform(source.record(0)['image'])
  assert caught.value.kind == kind


@pytest.mark.parametrize('kind', HARMFUL)
def test_serving_refuses_the_item(kind, tmp_path):
  path = tmp_path / '0.png'
  HARMFUL[kind](path)
  reader = ImageReader(1, 8, 0)
  with within(60), pytest.raises(InputError):
    reader.read({'image': str(path)}, '')


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_a_record_has_a_limit(kind, tmp_path, monkeypatch):
  pytest.importorskip('tensorflow_datasets')
  small, large = example_files.jpeg(0), bytes(5_000)
  records = [example_files.example(one, [1]) for one in (small, large)]
  example_files.write(tmp_path / f'train-0.{kind}', records)
  source = records_of(tmp_path)
  monkeypatch.setattr(files, 'MAX_BYTES', 4_000)
  assert source.record(0)['image'] == small
  with pytest.raises(BadRecord) as caught:
    source.record(1)
  assert caught.value.kind == 'too_large'
  assert 'record 1' in caught.value.where


def test_a_sparse_record_is_not_read(tmp_path):
  """A record of 3 GB that takes no space on the disk, in a small process."""
  pytest.importorskip('tensorflow_datasets')
  size, path = 3 * 2**30, tmp_path / 'train-0.tfrecord'
  with path.open('wb') as file:
    file.write(sharded.checked(struct.pack('<Q', size)))
    file.truncate(size + 16)
  source = records_of(tmp_path)
  tracemalloc.start()
  try:
    with pytest.raises(BadRecord, match='at most'):
      source.record(0)
    assert tracemalloc.get_traced_memory()[1] < 2 * files.MAX_BYTES
  finally:
    tracemalloc.stop()


def records_of(folder):
  given = dict(directory=str(folder), num_classes=5, image_size=8)
  return builder.build_source(dict(name='records', **given), 'train')


@pytest.mark.parametrize('write', [write_pipe, write_loop])
def test_record_files_are_regular(write, tmp_path):
  pytest.importorskip('tensorflow_datasets')
  write(tmp_path / 'train-0.tfrecord')
  with within(60), pytest.raises((InvalidDataError, MissingDataError)):
    records_of(tmp_path)


def test_a_corpus_does_not_wait_for_a_pipe(tmp_path):
  texts = corpora.documents(5)
  corpora.write(tmp_path / 'in', texts)
  write_pipe(tmp_path / 'in' / 'pipe.txt')
  with within(60):
    _, manifest = corpora.prepare(tmp_path, texts)
  assert manifest['faults']['unreadable_file']['count'] == 1


def test_texts_that_unpack_without_end(tmp_path, monkeypatch):
  monkeypatch.setattr(tables, 'MAX_TEXT', 10_000)
  path = tmp_path / 'train.tsv.gz'
  path.write_bytes(gzip.compress(b'a\tb\n' * 2_500))
  assert len([*tables.read_lines(path)]) == 2_500
  path.write_bytes(gzip.compress(b'a\tb\n' * 2_501))
  with pytest.raises(InvalidDataError, match=r'10000 bytes, unpacked'):
    [*tables.read_lines(path)]


def link_out(path):
  """Moves a file out of its folder, and leaves a link in its place."""
  path.rename(path.parent.parent / path.name)
  path.symlink_to(f'../{path.name}')


def test_a_link_out_of_a_folder_of_texts(root):
  rows, path = ['sentence\tlabel', 'w1\t1'], root / 'SST-2' / 'train.tsv'
  word_rows.write(path, rows)
  given = word_rows.config(root, 'sst2')
  assert len(word_rows.opened(given)) == 1
  for _ in range(2):  # out of the task's folder, out of the data's
    link_out(path)
    path = path.parent.parent / path.name
  with pytest.raises(InvalidDataError, match='outside of'):
    word_rows.opened(given)


def test_a_link_out_of_a_corpus(tmp_path):
  texts = corpora.documents(5)
  link_out(corpora.write(tmp_path / 'in', texts) / 'texts.txt')
  with pytest.raises(InvalidDataError, match='outside of'):
    corpora.prepare(tmp_path, texts, input=(str(tmp_path / 'in'),))


def test_a_link_out_of_record_files(tmp_path):
  pytest.importorskip('tensorflow_datasets')
  path = tmp_path / 'in' / 'train-0.tfrecord'
  example_files.write(path, [example_files.example(b'x', [1])])
  link_out(path)
  with pytest.raises(InvalidDataError, match='outside of'):
    records_of(path.parent)
