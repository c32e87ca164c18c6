"""Decoding: colours, depths, orientations, and what is no image."""

import io

import cv2
import numpy as np
import PIL.Image
import pytest

from dataset_lib import image_ops
from dataset_lib.errors import BadRecord
from tests.dataset_lib.pictures import NOISE, RNG, cropping, encode, smooth

GREY = np.repeat(NOISE[..., :1], 3, axis=2)
ALPHA = np.dstack([NOISE, np.full((20, 30), 7, np.uint8)])
JPEG = encode(NOISE, '.jpg')


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


def by_pillow(image, **options):
  file = io.BytesIO()
  image.save(file, 'JPEG', quality=95, **options)
  return file.getvalue()


def test_jpegs_are_close_to_their_origin():
  image = PIL.Image.fromarray(smooth(40, 60))
  for mode in ('RGB', 'CMYK'):
    decoded = image_ops.decode(by_pillow(image.convert(mode))).astype(int)
    assert np.abs(decoded - smooth(40, 60)).max() < 12


@pytest.mark.parametrize(
  ('data', 'kind'),
  [
    (b'', 'empty'),
    (b'this is a text file', 'undecodable'),
    *((JPEG[:end], 'truncated') for end in (-1, 300, 10)),
    *((encode(NOISE)[:end], 'undecodable') for end in (-40, 40)),
    (b'\xff\xd8\xff\xd9', 'undecodable'),
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
def test_what_is_no_image(data, kind):
  with pytest.raises(BadRecord) as error:
    image_ops.to_rgb(data)
  assert error.value.kind == kind
  if isinstance(data, bytes):
    with pytest.raises(BadRecord):
      cropping().transform(data, RNG)


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


@pytest.mark.parametrize('orientation', UPRIGHT)
def test_exif_orientation_is_applied(orientation):
  image, exif = PIL.Image.fromarray(smooth(24, 40)), PIL.Image.Exif()
  exif[0x0112] = orientation
  data = by_pillow(image, exif=exif)
  expected = UPRIGHT[orientation](image_ops.decode(by_pillow(image)))
  np.testing.assert_array_equal(image_ops.decode(data), expected)
  assert image_ops.jpeg_size(data) == expected.shape[:2]
  # The crop decodes by the same path: whole image, its own size.
  cropped = cropping(min_crop_area=1.0).transform(data, RNG)
  assert cropped.shape == (8, 8, 3)


DAMAGED_EXIF = b'\xff\xe1\x00\x10Exif\0\0II' + b'\xff' * 6


@pytest.mark.parametrize(
  'data', [b'', encode(NOISE), b'\xff\xd8\xff', b'\xff\xd8' + bytes(100)]
)
def test_what_has_no_size(data):
  assert image_ops.jpeg_size(data) is None


def is_truncated(data):
  try:
    image_ops.decode(data)
  except BadRecord as bad:
    return bad.kind == 'truncated'
  return False


@pytest.mark.parametrize(
  'data',
  [
    JPEG,
    JPEG[:2] + DAMAGED_EXIF + JPEG[2:],
    encode(NOISE, '.jpg', cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    encode(NOISE, '.jpg', cv2.IMWRITE_JPEG_RST_INTERVAL, 1),
  ],
)
def test_every_cut_through_the_pixels_is_a_truncation(data):
  assert image_ops.jpeg_size(data) in ((20, 30), None)
  # Bytes after the end are legal; the end of a thumbnail is not the end.
  assert not is_truncated(data + bytes(1000))
  thumbnail = encode(NOISE[:8, :8], '.jpg')
  size = (len(thumbnail) + 2).to_bytes(2, 'big')
  data = data[:2] + b'\xff\xe1' + size + thumbnail + data[2:]
  assert not is_truncated(data)
  for cut in range((len(data) + len(thumbnail)) // 2, len(data)):
    assert is_truncated(data[:cut]), cut
