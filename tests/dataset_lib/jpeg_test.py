"""JPEG headers and ends, against images made here."""

import struct

import cv2
import numpy as np
import pytest

from dataset_lib import jpeg


def encode(height=30, width=50, *options):
  image = np.random.default_rng(0).integers(256, size=(height, width, 3))
  flags = [flag for option in options for flag in option]
  done, data = cv2.imencode('.jpg', image.astype(np.uint8), flags)
  assert done
  return data.tobytes()


def exif(orientation, order='<'):
  """An APP1 segment with nothing but an orientation tag."""
  mark = {'<': b'II', '>': b'MM'}[order]
  tiff = mark + struct.pack(
    order + 'HIHHHIHHI', 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0
  )
  body = b'Exif\0\0' + tiff
  return b'\xff\xe1' + struct.pack('>H', len(body) + 2) + body


def with_exif(data, orientation, order='<'):
  return data[:2] + exif(orientation, order) + data[2:]


PROGRESSIVE = (cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
RESTARTS = (cv2.IMWRITE_JPEG_RST_INTERVAL, 1)


@pytest.mark.parametrize('options', [(), (PROGRESSIVE,), (RESTARTS,)])
def test_size_without_decoding(options):
  assert jpeg.upright_size(encode(31, 47, *options)) == (31, 47)


@pytest.mark.parametrize('order', ['<', '>'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_size_after_rotation_is_what_opencv_decodes(orientation, order):
  data = with_exif(encode(31, 47), orientation, order)
  image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
  assert jpeg.upright_size(data) == image.shape[:2]
  assert (image.shape[0] == 47) == (orientation >= 5)


def test_size_of_what_is_no_jpeg():
  assert jpeg.upright_size(b'') is None
  assert jpeg.upright_size(b'\x89PNG\r\n\x1a\n' + bytes(100)) is None
  assert jpeg.upright_size(b'\xff\xd8\xff') is None
  assert jpeg.upright_size(b'\xff\xd8' + bytes(100)) is None


def test_a_damaged_exif_segment_gives_no_size():
  data = encode()
  body = b'Exif\0\0II' + b'\xff' * 8
  segment = b'\xff\xe1' + struct.pack('>H', len(body) + 2) + body
  assert jpeg.upright_size(data[:2] + segment + data[2:]) is None


@pytest.mark.parametrize('options', [(), (PROGRESSIVE,)])
def test_every_cut_through_the_pixels_is_a_truncation(options):
  data = encode(30, 50, *options)
  assert not jpeg.is_truncated(data)
  for cut in range(len(data) // 2, len(data)):
    assert jpeg.is_truncated(data[:cut]), cut


def test_bytes_after_the_end_are_legal():
  assert not jpeg.is_truncated(encode() + bytes(1000))


def test_the_end_of_a_thumbnail_is_not_the_end():
  thumbnail = encode(8, 8)
  segment = b'\xff\xe1' + struct.pack('>H', len(thumbnail) + 2) + thumbnail
  data = encode()
  data = data[:2] + segment + data[2:]
  assert not jpeg.is_truncated(data)
  assert jpeg.is_truncated(data[: len(data) // 2 + len(thumbnail)])


def test_other_formats_are_not_judged():
  assert not jpeg.is_truncated(b'\x89PNG')
  assert not jpeg.is_truncated(b'')
