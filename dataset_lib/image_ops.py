"""Image decoding and augmentation with OpenCV: uint8 RGB in, uint8 RGB out.

Values stay in [0, 255]; the task normalises them on the device. Every random
number comes from a generator that is a function of (seed, epoch, index), so an
augmented image is the same on every run, host and thread.

An operation is a function (image, rng, options) -> image with one entry in
OPS; `dataset.augment` names the ones to apply, in order.
"""

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import cv2
import numpy as np
from annotated_types import Interval, Predicate
from jaxtyping import UInt8

from dataset_lib.errors import BadRecord, ConfigError
from dataset_lib.fields import Distinct
from dataset_lib.source import DatasetInfo

Encoded = bytes | UInt8[np.ndarray, 'H W C']
Image = UInt8[np.ndarray, 'H W 3']
Reframed = UInt8[np.ndarray, 'h w 3']  # of another height and width

# Grain's threads already use every core; OpenCV's own would fight them.
cv2.setNumThreads(0)

CENTRAL_SHARE = 224 / 256  # side of the evaluation crop, as is customary
CROP_ATTEMPTS = 10
CROP_RATIOS = (3 / 4, 4 / 3)
_JPEG_START, _JPEG_END, _JPEG_SCAN = b'\xff\xd8', b'\xff\xd9', b'\xff\xda'
_EXIF_MARKER, _EXIF, _ORIENTATION_TAG = 0xE1, b'Exif\0\0', 0x0112
# SOF0-SOF15 without DHT (C4), JPG (C8) and DAC (CC): they hold the size.
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}

ImageSize = Annotated[int, Interval(ge=1, le=4096)]


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageOptions:
  """Fields of every source of images.

  Attributes:
    image_size: height and width of the result.
    resize_small: short side before the central crop; 0 means
      image_size * 256 / 224.
    min_crop_area: smallest share of the image an inception crop may cover.
    augment: names of training operations out of OPS, in order.
  """

  image_size: ImageSize
  resize_small: Annotated[int, Interval(ge=0, le=8192)] = 0
  min_crop_area: Annotated[float, Interval(ge=0.0001, le=1.0)] = 0.08
  augment: Annotated[
    tuple[str, ...],
    Predicate(lambda names: {*names} <= {*OPS} and Distinct.func(names)),
    'a tuple of distinct names out of inception_crop, flip',
  ] = ()

  @staticmethod
  def check_fields(config: Mapping[str, Any]) -> None:
    """Raises ConfigError where the values do not fit together."""
    size, augment = config['image_size'], config['augment']
    short_side = config.get('resize_small', 0)
    if 0 < short_side < size:
      expected = f'0, or at least image_size = {size}'
      raise ConfigError('dataset.resize_small', short_side, expected)
    if 'inception_crop' in augment[1:]:
      expected = "'inception_crop' in the first place only"
      raise ConfigError('dataset.augment', augment, expected)

  def image_info(
    self, num_classes: int, class_names: Sequence[str], num_examples: int
  ) -> DatasetInfo:
    """Returns the description of a source of RGB images."""
    return DatasetInfo(
      input_key='image',
      input_shape=(self.image_size, self.image_size, 3),
      input_dtype='uint8',
      num_classes=num_classes,
      class_names=tuple(class_names),
      num_examples=num_examples,
    )

  def transform(
    self, value: Encoded, rng: np.random.Generator | None
  ) -> Reframed:
    """Returns the image as trained on, or as evaluated without `rng`."""
    if rng is None:
      return evaluation_image(value, self)
    return training_image(value, rng, self)


def decode(data: bytes, reduction: int = 1) -> Image:
  """Decodes a JPEG, PNG, WebP or BMP file to RGB, upright by its EXIF tag.

  Greyscale is repeated over the channels, CMYK converted, 16 bits scaled to 8,
  an alpha channel dropped. A JPEG is decoded at 1 / `reduction` of its size.

  Raises:
    BadRecord: empty, truncated, or not an image.
  """
  if not data:
    raise BadRecord('empty', '', 'the file has no bytes')
  # Bytes after the end are legal, and an embedded thumbnail has an end of its
  # own. OpenCV before version 5 fills the rest of a cut file with grey.
  is_odd = data.startswith(_JPEG_START) and not data.endswith(_JPEG_END)
  if is_odd and data.rfind(_JPEG_END) <= data.rfind(_JPEG_SCAN):
    raise BadRecord('truncated', '', f'JPEG ends early, at {len(data)} bytes')
  flags = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
  }[reduction]
  try:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
  except cv2.error as error:
    raise BadRecord('undecodable', '', str(error).strip()) from error
  if image is None:
    raise BadRecord(
      'undecodable', '', f'no image OpenCV can decode, begins {data[:8]!r}'
    )
  return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)


def jpeg_size(data: bytes) -> tuple[int, int] | None:
  """Returns (height, width) of a JPEG after EXIF rotation; None if unclear.

  Read by hand (ITU-T T.81): libraries take 20 to 50 microseconds, as long as
  decoding a small image.
  """
  offset, orientation = 2, 1
  try:
    while data.startswith(_JPEG_START):
      prefix, marker, length = struct.unpack_from('>BBH', data, offset)
      if prefix != 0xFF or length < 2:
        return None
      if marker in _FRAME_MARKERS:
        size = struct.unpack_from('>HH', data, offset + 5)
        size = size[::-1] if orientation in range(5, 9) else size
        return size if all(size) else None
      if marker == _EXIF_MARKER and data.startswith(_EXIF, offset + 4):
        orientation = _orientation(data[offset + 10 : offset + 2 + length])
      offset += 2 + length
  except struct.error:
    pass
  return None


def _orientation(tiff: bytes) -> int:
  """Returns the orientation tag of a TIFF header, 1 if there is none."""
  order = '<' if tiff.startswith(b'II') else '>'
  (directory,) = struct.unpack_from(order + 'I', tiff, 4)
  (count,) = struct.unpack_from(order + 'H', tiff, directory)
  for start in range(directory + 2, directory + 2 + 12 * count, 12):
    if struct.unpack_from(order + 'H', tiff, start)[0] == _ORIENTATION_TAG:
      return struct.unpack_from(order + 'H', tiff, start + 8)[0]
  return 1


def to_rgb(value: Any) -> Image:
  """Decodes bytes; checks an array and repeats a single channel.

  Raises:
    BadRecord: not decodable, or not a uint8 array [H, W, 1 or 3].
  """
  if isinstance(value, bytes):
    return decode(value)
  if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
    dtype = getattr(value, 'dtype', type(value).__name__)
    raise BadRecord('wrong_dtype', '', f'expected uint8 pixels, got {dtype}')
  if value.ndim != 3 or value.shape[2] not in (1, 3) or not value.size:
    raise BadRecord(
      'wrong_shape', '', f'expected [H, W, 1 or 3] pixels, got {value.shape}'
    )
  return value if value.shape[2] == 3 else np.repeat(value, 3, axis=2)


def resize(image: Image, height: int, width: int) -> Reframed:
  """Resizes: bilinear, or by area averaging when it shrinks twice or more.

  Bilinear reads 2 x 2 source pixels, so it aliases beyond a factor of 2; up to
  there it is several times faster than averaging.
  """
  if image.shape[:2] == (height, width):
    return image
  shrinks = image.shape[0] >= 2 * height and image.shape[1] >= 2 * width
  method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
  return cv2.resize(image, (width, height), interpolation=method)


def resize_small(image: Image, short_side: int) -> Reframed:
  """Resizes so that the short side is `short_side`, keeping the ratio."""
  height, width = image.shape[:2]
  scale = short_side / min(height, width)
  return resize(
    image,
    max(short_side, round(height * scale)),
    max(short_side, round(width * scale)),
  )


def central_crop(image: Image, size: int) -> Reframed:
  """Crops the central `size` x `size` pixels of an image no smaller."""
  top = (image.shape[0] - size) // 2
  left = (image.shape[1] - size) // 2
  return image[top : top + size, left : left + size]


def inception_box(
  height: int, width: int, rng: np.random.Generator, min_area: float
) -> tuple[int, int, int, int]:
  """Draws a box (top, left, height, width) as in Szegedy et al., 2015, sec. 6.

  Its area is uniform in [min_area, 1] of the image, its ratio between 3/4 and
  4/3 (uniform in the logarithm). After 10 boxes that do not fit: the largest
  central box of a legal ratio.
  """
  low, high = (math.log(ratio) for ratio in CROP_RATIOS)
  for _ in range(CROP_ATTEMPTS):
    area = height * width * rng.uniform(min_area, 1.0)
    ratio = math.exp(rng.uniform(low, high))
    box_width = round(math.sqrt(area * ratio))
    box_height = round(math.sqrt(area / ratio))
    if 0 < box_width <= width and 0 < box_height <= height:
      top = int(rng.integers(height - box_height + 1))
      left = int(rng.integers(width - box_width + 1))
      return top, left, box_height, box_width
  box_width = min(width, max(1, math.floor(height * CROP_RATIOS[1])))
  box_height = min(height, max(1, math.floor(width / CROP_RATIOS[0])))
  top, left = (height - box_height) // 2, (width - box_width) // 2
  return top, left, box_height, box_width


def _reduction(box_height: int, box_width: int, size: int) -> int:
  """Returns the strongest JPEG reduction that keeps the box >= `size`."""
  for reduction in (8, 4, 2):
    if min(box_height, box_width) >= reduction * size:
      return reduction
  return 1


def inception_crop(
  image: Encoded, rng: np.random.Generator, options: ImageOptions
) -> Reframed:
  """Crops a box of random size and ratio, resized to image_size squared.

  Comes first in `augment`, as it sees the encoded bytes: a JPEG much larger
  than the target is decoded at 1/2, 1/4 or 1/8 of its size.
  """
  size = jpeg_size(image) if isinstance(image, bytes) else None
  if size is None:
    image = to_rgb(image)
    size = image.shape[:2]
  top, left, height, width = inception_box(*size, rng, options.min_crop_area)
  if isinstance(image, bytes):
    by = _reduction(height, width, options.image_size)
    image = decode(image, by)
    if image.shape[:2] != (-(-size[0] // by), -(-size[1] // by)):
      raise BadRecord('undecodable', '', 'JPEG header and pixels disagree')
    # To the nearest edges: at most half a pixel of the reduced image off.
    bottom, right = round((top + height) / by), round((left + width) / by)
    top, left = round(top / by), round(left / by)
    height, width = bottom - top, right - left
  crop = image[top : top + height, left : left + width]
  return resize(crop, options.image_size, options.image_size)


def flip(
  image: Image, rng: np.random.Generator, options: ImageOptions
) -> Image:
  """Mirrors left and right with probability one half."""
  del options
  return cv2.flip(image, 1) if rng.random() < 0.5 else image


OPS: Mapping[str, Callable[..., Image]] = {
  'inception_crop': inception_crop,
  'flip': flip,
}


def _without_ends(image: Image) -> Reframed:
  """Crops an image more than 4 times as long as wide to its central part.

  The ends would be cropped away anyway, and enlarging a line of one pixel to
  the full short side would take gigabytes.
  """
  longest = 4 * min(image.shape[:2])
  height, width = (min(side, longest) for side in image.shape[:2])
  top = (image.shape[0] - height) // 2
  left = (image.shape[1] - width) // 2
  return image[top : top + height, left : left + width]


def evaluation_image(value: Encoded, options: ImageOptions) -> Reframed:
  """Decodes, resizes the short side, takes the central crop."""
  short_side = options.resize_small or round(options.image_size / CENTRAL_SHARE)
  image = resize_small(_without_ends(to_rgb(value)), short_side)
  return central_crop(image, options.image_size)


def training_image(
  value: Encoded, rng: np.random.Generator, options: ImageOptions
) -> Reframed:
  """Applies the operations of `options.augment` in order.

  Without an inception crop the image is framed as for evaluation.
  """
  image: Any = value
  if 'inception_crop' not in options.augment:
    image = evaluation_image(value, options)
  for name in options.augment:
    image = OPS[name](image, rng, options)
  return image
