"""Decoding: colours, depths, orientations, and what is no image."""

import io
import struct

import cv2
import numpy as np
import pytest

from dataset_lib import image_ops
from dataset_lib.errors import BadRecord
from tests.dataset_lib.pictures import NOISE, RNG, encode, options, smooth


def test_decodes_rgb_in_this_order():
  np.testing.assert_array_equal(image_ops.decode(encode(NOISE)), NOISE)


def test_jpeg_close_to_its_origin():
  image = smooth(40, 60)
  decoded = image_ops.decode(encode(image, '.jpg'))
  assert np.abs(decoded.astype(int) - image).max() < 12


def test_greyscale_is_repeated():
  grey = NOISE[..., 0]
  decoded = image_ops.decode(encode(grey))
  for channel in range(3):
    np.testing.assert_array_equal(decoded[..., channel], grey)
  decoded = image_ops.decode(encode(smooth(16, 16)[..., 0], '.jpg'))
  assert decoded.shape == (16, 16, 3)


def test_sixteen_bits_are_scaled_to_eight():
  deep = NOISE.astype(np.uint16) * 257
  np.testing.assert_array_equal(image_ops.decode(encode(deep)), NOISE)


def test_alpha_is_dropped():
  bgra = np.dstack([NOISE[..., ::-1], np.full((20, 30), 7, np.uint8)])
  data = cv2.imencode('.png', bgra)[1].tobytes()
  np.testing.assert_array_equal(image_ops.decode(data), NOISE)


def test_cmyk_is_converted():
  pillow = pytest.importorskip('PIL.Image', reason='writes the CMYK file')
  red = np.zeros((16, 16, 3), np.uint8)
  red[..., 0] = 255
  file = io.BytesIO()
  pillow.fromarray(red).convert('CMYK').save(file, 'JPEG', quality=95)
  decoded = image_ops.decode(file.getvalue()).astype(int)
  assert np.abs(decoded - red).max() < 12


@pytest.mark.parametrize(
  ('orientation', 'upright'),
  [
    (1, lambda image: image),
    (2, lambda image: image[:, ::-1]),
    (3, lambda image: image[::-1, ::-1]),
    (4, lambda image: image[::-1]),
    (5, lambda image: image.transpose(1, 0, 2)),
    (6, lambda image: np.rot90(image, -1)),
    (7, lambda image: image[::-1, ::-1].transpose(1, 0, 2)),
    (8, lambda image: np.rot90(image)),
  ],
)
def test_exif_orientation_is_applied(orientation, upright):
  data = encode(smooth(24, 40), '.jpg')
  tiff = b'II' + struct.pack(
    '<HIHHHIHHI', 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0
  )
  body = b'Exif\0\0' + tiff
  segment = b'\xff\xe1' + struct.pack('>H', len(body) + 2) + body
  rotated = image_ops.decode(data[:2] + segment + data[2:])
  np.testing.assert_array_equal(rotated, upright(image_ops.decode(data)))
  # The crop decodes by the same path: whole image, its own size.
  cropped = image_ops.inception_crop(
    data[:2] + segment + data[2:], RNG, options(min_crop_area=1.0)
  )
  assert cropped.shape == (8, 8, 3)


@pytest.mark.parametrize(
  ('data', 'kind'),
  [
    (b'', 'empty'),
    (b'this is a text file', 'undecodable'),
    (encode(NOISE, '.jpg')[:-1], 'truncated'),
    (encode(NOISE, '.jpg')[:300], 'truncated'),
    (encode(NOISE, '.jpg')[:10], 'truncated'),
    (encode(NOISE)[:-40], 'undecodable'),
    (encode(NOISE)[:40], 'undecodable'),
    (b'\xff\xd8\xff\xd9', 'undecodable'),
  ],
)
def test_what_cannot_be_decoded(data, kind):
  for read in (image_ops.decode, image_ops.to_rgb):
    with pytest.raises(BadRecord) as error:
      read(data)
    assert error.value.kind == kind
  with pytest.raises(BadRecord):
    image_ops.inception_crop(data, RNG, options())


@pytest.mark.parametrize(
  ('value', 'kind'),
  [
    (NOISE.astype(np.float32), 'wrong_dtype'),
    (NOISE.astype(np.int32), 'wrong_dtype'),
    ('text', 'wrong_dtype'),
    (None, 'wrong_dtype'),
    (NOISE[..., 0], 'wrong_shape'),
    (NOISE[..., :2], 'wrong_shape'),
    (NOISE[:0], 'wrong_shape'),
  ],
)
def test_what_is_no_image_array(value, kind):
  with pytest.raises(BadRecord) as error:
    image_ops.to_rgb(value)
  assert error.value.kind == kind


def test_a_single_channel_array_is_repeated():
  rgb = image_ops.to_rgb(NOISE[..., :1])
  np.testing.assert_array_equal(rgb, np.repeat(NOISE[..., :1], 3, axis=2))


def encoded(height=30, width=50, *options):
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
  assert image_ops.jpeg_size(encoded(31, 47, *options)) == (31, 47)


@pytest.mark.parametrize('order', ['<', '>'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_size_after_rotation_is_what_opencv_decodes(orientation, order):
  data = with_exif(encoded(31, 47), orientation, order)
  image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
  assert image_ops.jpeg_size(data) == image.shape[:2]
  assert (image.shape[0] == 47) == (orientation >= 5)


def test_size_of_what_is_no_jpeg():
  assert image_ops.jpeg_size(b'') is None
  assert image_ops.jpeg_size(b'\x89PNG\r\n\x1a\n' + bytes(100)) is None
  assert image_ops.jpeg_size(b'\xff\xd8\xff') is None
  assert image_ops.jpeg_size(b'\xff\xd8' + bytes(100)) is None


def test_a_damaged_exif_segment_gives_no_size():
  data = encoded()
  body = b'Exif\0\0II' + b'\xff' * 8
  segment = b'\xff\xe1' + struct.pack('>H', len(body) + 2) + body
  assert image_ops.jpeg_size(data[:2] + segment + data[2:]) is None


def is_truncated(data):
  try:
    image_ops.decode(data)
  except BadRecord as bad:
    return bad.kind == 'truncated'
  return False


@pytest.mark.parametrize('options', [(), (PROGRESSIVE,)])
def test_every_cut_through_the_pixels_is_a_truncation(options):
  data = encoded(30, 50, *options)
  assert not is_truncated(data)
  for cut in range(len(data) // 2, len(data)):
    assert is_truncated(data[:cut]), cut


def test_bytes_after_the_end_are_legal():
  assert not is_truncated(encoded() + bytes(1000))


def test_the_end_of_a_thumbnail_is_not_the_end():
  thumbnail = encoded(8, 8)
  segment = b'\xff\xe1' + struct.pack('>H', len(thumbnail) + 2) + thumbnail
  data = encoded()
  data = data[:2] + segment + data[2:]
  assert not is_truncated(data)
  assert is_truncated(data[: len(data) // 2 + len(thumbnail)])
