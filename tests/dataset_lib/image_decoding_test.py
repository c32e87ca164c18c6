"""Decoding: colours, depths, orientations, and what is no image."""

import io
import struct

import cv2
import numpy as np
import pytest

from dataset_lib import image_ops
from dataset_lib.errors import BadRecord
from tests.dataset_lib.pictures import NOISE, RNG, encode, options, smooth

GREY = np.repeat(NOISE[..., :1], 3, axis=2)
ALPHA = np.dstack([NOISE, np.full((20, 30), 7, np.uint8)])


@pytest.mark.parametrize(
  ('data', 'expected'),
  [
    (encode(NOISE), NOISE),
    (encode(NOISE[..., 0]), GREY),
    (NOISE[..., :1], GREY),
    (encode(NOISE.astype(np.uint16) * 257), NOISE),
    (cv2.imencode('.png', ALPHA[..., [2, 1, 0, 3]])[1].tobytes(), NOISE),
  ],
)
def test_images_become_rgb_of_eight_bits(data, expected):
  np.testing.assert_array_equal(image_ops.to_rgb(data), expected)


def test_jpeg_close_to_its_origin():
  image = smooth(40, 60)
  decoded = image_ops.decode(encode(image, '.jpg'))
  assert np.abs(decoded.astype(int) - image).max() < 12


def test_cmyk_is_converted():
  pillow = pytest.importorskip('PIL.Image', reason='writes the CMYK file')
  red = np.zeros((16, 16, 3), np.uint8)
  red[..., 0] = 255
  file = io.BytesIO()
  pillow.fromarray(red).convert('CMYK').save(file, 'JPEG', quality=95)
  decoded = image_ops.decode(file.getvalue()).astype(int)
  assert np.abs(decoded - red).max() < 12


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
    *(
      (value, 'wrong_dtype')
      for value in (NOISE.astype(np.float32), NOISE.astype(int), 'text', None)
    ),
    *(
      (value, 'wrong_shape')
      for value in (NOISE[..., 0], NOISE[..., :2], NOISE[:0])
    ),
  ],
)
def test_what_is_no_image_array(value, kind):
  with pytest.raises(BadRecord) as error:
    image_ops.to_rgb(value)
  assert error.value.kind == kind


def segment(body):
  """With `body` in an APP1 segment."""
  return b'\xff\xe1' + struct.pack('>H', len(body) + 2) + body


def with_exif(data, orientation, order='<'):
  """With nothing but an orientation tag."""
  tiff = {'<': b'II', '>': b'MM'}[order] + struct.pack(
    order + 'HIHHHIHHI', 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0
  )
  return data[:2] + segment(b'Exif\0\0' + tiff) + data[2:]


UPRIGHT = {
  1: lambda image: image,
  2: lambda image: image[:, ::-1],
  3: lambda image: image[::-1, ::-1],
  4: lambda image: image[::-1],
  5: lambda image: image.transpose(1, 0, 2),
  6: lambda image: np.rot90(image, -1),
  7: lambda image: image[::-1, ::-1].transpose(1, 0, 2),
  8: np.rot90,
}


@pytest.mark.parametrize('order', ['<', '>'])
@pytest.mark.parametrize('orientation', UPRIGHT)
def test_exif_orientation_is_applied(orientation, order):
  plain = encode(smooth(24, 40), '.jpg')
  data = with_exif(plain, orientation, order)
  expected = UPRIGHT[orientation](image_ops.decode(plain))
  np.testing.assert_array_equal(image_ops.decode(data), expected)
  assert image_ops.jpeg_size(data) == expected.shape[:2]
  # The crop decodes by the same path: whole image, its own size.
  cropped = image_ops.inception_crop(data, RNG, options(min_crop_area=1.0))
  assert cropped.shape == (8, 8, 3)


JPEG = encode(NOISE, '.jpg')
VARIANTS = [
  JPEG,
  encode(NOISE, '.jpg', cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
  encode(NOISE, '.jpg', cv2.IMWRITE_JPEG_RST_INTERVAL, 1),
]


@pytest.mark.parametrize(
  'data',
  [
    b'',
    b'\x89PNG\r\n\x1a\n' + bytes(100),
    b'\xff\xd8\xff',
    b'\xff\xd8' + bytes(100),
    JPEG[:2] + segment(b'Exif\0\0II' + b'\xff' * 8) + JPEG[2:],
  ],
)
def test_what_has_no_size(data):
  assert image_ops.jpeg_size(data) is None


def is_truncated(data):
  try:
    image_ops.decode(data)
  except BadRecord as bad:
    return bad.kind == 'truncated'
  return False


@pytest.mark.parametrize('data', VARIANTS)
def test_every_cut_through_the_pixels_is_a_truncation(data):
  assert image_ops.jpeg_size(data) == (20, 30)
  # Bytes behind the end are legal; the end of a thumbnail is not the end.
  assert not is_truncated(data + bytes(1000))
  thumbnail = segment(encode(NOISE[:8, :8], '.jpg'))
  data = data[:2] + thumbnail + data[2:]
  assert not is_truncated(data)
  for cut in range((len(data) + len(thumbnail)) // 2, len(data)):
    assert is_truncated(data[:cut]), cut
