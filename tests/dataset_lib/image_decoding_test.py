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
