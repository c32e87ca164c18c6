"""Files that others made to do harm are refused by name, and leave no trace."""

import contextlib
import gzip
import os
import struct
import threading
import zlib

import pytest

from dataset_lib import data_files, image_ops, text_rows
from dataset_lib.errors import BadRecord, InvalidDataError
from serve_lib.chain import InputError
from serve_lib.items import images
from tests.dataset_lib import image_folder_test

SIDE = 20_000


def chunk(kind, data):
  """A part of a PNG file."""
  check = struct.pack('>I', zlib.crc32(kind + data))
  return struct.pack('>I', len(data)) + kind + data + check


def png_bomb():
  """A PNG of some 50 kB with 20,000 x 20,000 black pixels."""
  header = struct.pack('>IIBBBBB', SIDE, SIDE, 1, 0, 0, 0, 0)
  packer = zlib.compressobj(9)
  row = bytes(1 + SIDE // 8)
  pixels = b''.join(packer.compress(row) for _ in range(SIDE))
  pixels += packer.flush()
  parts = chunk(b'IHDR', header) + chunk(b'IDAT', pixels) + chunk(b'IEND', b'')
  return b'\x89PNG\r\n\x1a\n' + parts


def write_pipe(path):
  os.mkfifo(path)


def write_bomb(path):
  path.write_bytes(png_bomb())


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
  options = image_ops.ImageOptions(image_size=8)
  reader = images((8, 8, 3), options.transform, 1)
  with within(60), pytest.raises(InputError):
    reader.read({'image': str(path)}, '')


def test_a_record_has_a_limit():
  with pytest.raises(BadRecord) as caught:
    data_files.check_size(data_files.MAX_BYTES + 1)
  assert caught.value.kind == 'too_large'
  data_files.check_size(data_files.MAX_BYTES)


def test_texts_that_unpack_without_end(tmp_path, monkeypatch):
  monkeypatch.setattr(text_rows, 'MAX_TEXT', 10_000)
  path = tmp_path / 'train.tsv.gz'
  path.write_bytes(gzip.compress(b'a\tb\n' * 2_500))
  assert len(text_rows.read_lines(path)) == 2_500
  path.write_bytes(gzip.compress(b'a\tb\n' * 2_501))
  with pytest.raises(InvalidDataError, match=r'10000 bytes, unpacked'):
    text_rows.read_lines(path)


def test_a_link_out_of_a_folder(tmp_path):
  (tmp_path / 'root').mkdir()
  (tmp_path / 'secret.txt').write_text('secret')
  link = tmp_path / 'root' / 'text.txt'
  link.symlink_to('../secret.txt')
  with pytest.raises(InvalidDataError, match='outside of'):
    data_files.check_inside(link, tmp_path / 'root')
  inside = tmp_path / 'root' / 'real.txt'
  inside.write_text('text')
  data_files.check_inside(inside, tmp_path / 'root')
