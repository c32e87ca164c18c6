"""Image decoding and augmentation: uint8 RGB in, uint8 RGB out."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import cv2
import numpy as np
import PIL.Image
from annotated_types import Interval
from jaxtyping import UInt8

from core.errors import BadRecord, ConfigError
from core.fields import Distinct
from core.files import MAX_PIXELS
from dataset_lib import image_header
from dataset_lib.randaugment import rand_augment
from dataset_lib.source import DatasetInfo, Indexed, require

Rng = np.random.Generator
Encoded = bytes | UInt8[np.ndarray, 'H W C']
Image = UInt8[np.ndarray, 'H W 3']
Reframed = UInt8[np.ndarray, 'h w 3']  # of another height and width

# Grain's threads use every core; OpenCV's would oversubscribe the cores.
cv2.setNumThreads(0)

CENTRAL_SHARE = 224 / 256  # side of the evaluation crop, as is customary
CROP_ATTEMPTS = 10
CROP_RATIOS = (3 / 4, 4 / 3)
_ORIENTATION_TAG = 0x0112
# How orientations 1 to 8 are flipped, after 5 to 8 are transposed.
_FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
# How to decode at 1 / n of the size.
_FLAGS = {1: cv2.IMREAD_COLOR} | {
  n: getattr(cv2, f'IMREAD_REDUCED_COLOR_{n}') for n in (2, 4, 8)
}

MaxPixels = Annotated[int, Interval(ge=1, le=2**30)]  # OpenCV's own limit
ImageSize = Annotated[int, Interval(ge=1, le=4096)]


@dataclasses.dataclass(kw_only=True, eq=False)
class Preparation:
  """How images are decoded, framed and augmented; see `transform`."""

  image_size: ImageSize  # height and width of the result
  # Short side before the central crop; 0 means image_size * 256 / 224.
  resize_small: Annotated[int, Interval(ge=0, le=8192)] = 0
  # Smallest share of the image that an inception crop may cover.
  min_crop_area: Annotated[float, Interval(ge=0.0001, le=1.0)] = 0.08
  augment: Annotated[
    tuple[Literal['inception_crop', 'flip', 'randaugment'], ...], Distinct
  ] = ()
  max_pixels: MaxPixels = MAX_PIXELS  # of an image, before it is resized
  # Of 'randaugment', which follows crop and flip.
  randaugment: Annotated[
    tuple[
      Annotated[int, Interval(ge=1, le=16)],
      Annotated[int, Interval(ge=0, le=30)],
    ],
    'a number of operations in [1, 16] and a magnitude in [0, 30]',
  ] = (2, 15)

  @staticmethod
  def prepared(config: Mapping[str, Any]) -> dict[str, Any]:
    """See `Source`; the short side is that before the central crop."""
    if config.get('resize_small') == 0:
      short_side = round(config['image_size'] / CENTRAL_SHARE)
      return {**config, 'resize_small': short_side}
    return dict(config)

  @property
  def short_side(self) -> int:
    """Short side of an image in evaluation, before its central crop."""
    return self.prepared(vars(self))['resize_small']

  def transform(self, value: Encoded, rng: Rng | None = None) -> Reframed:
    """Returns the image augmented with `rng`, else the evaluation view.

    Without an inception crop the short side is resized and the centre cropped.
    """
    if rng and 'inception_crop' in self.augment:
      image = self._inception_crop(value, rng)
    else:
      image = self._central_crop(to_rgb(value, self.max_pixels))
    is_flipped = rng and 'flip' in self.augment and rng.random() < 0.5
    image = cv2.flip(image, 1) if is_flipped else image
    if rng and 'randaugment' in self.augment:
      image = rand_augment(image, rng, *self.randaugment)
    return image

  def _central_crop(self, image: Image) -> Reframed:
    # Enlarging a line of one pixel to the full short side takes gigabytes.
    longest, size = 4 * min(image.shape[:2]), self.image_size
    height, width = (min(side, longest) for side in image.shape[:2])
    short_side = self.short_side
    image = central_crop(image, height, width)
    scale = short_side / min(image.shape[:2])
    sides = (max(short_side, round(side * scale)) for side in image.shape[:2])
    return central_crop(resize(image, *sides), size, size)

  def _inception_crop(self, image: Encoded, rng: Rng) -> Reframed:
    """Crops a random box, resized to image_size squared.

    A JPEG much larger than that is decoded at 1/2, 1/4 or 1/8 of its size.
    """
    size = jpeg_size(image) if isinstance(image, bytes) else None
    if size is None:
      image = to_rgb(image, self.max_pixels)
      size = image.shape[:2]
    top, left, height, width = inception_box(*size, rng, self.min_crop_area)
    if isinstance(image, bytes):
      by = _reduction(height, width, self.image_size)
      image = decode(image, by, self.max_pixels)
      expected = -(-size[0] // by), -(-size[1] // by)
      message = 'JPEG header and pixels disagree'
      require(image.shape[:2] == expected, 'undecodable', message)
      # Round box edges: at most half a pixel of the reduced image off.
      bottom, right = round((top + height) / by), round((left + width) / by)
      top, left = round(top / by), round(left / by)
      height, width = bottom - top, right - left
    crop = image[top : top + height, left : left + width]
    return resize(crop, self.image_size, self.image_size)


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageOptions(Preparation, Indexed):
  """Base of sources of images: a subclass has `record` and calls `describe`."""

  max_labels = 0  # a subclass may have a field

  @staticmethod
  def sketch(config: Any, classes: int, examples: int) -> Any:
    """See `Source`."""
    shape = config['image_size'], config['image_size'], 3
    info = DatasetInfo(
      'image', shape, 'uint8', config.get('num_classes', classes), (), examples,
      max_labels=config.get('max_labels', 0),
    )  # fmt: skip
    return info, {}

  @staticmethod
  def check_fields(config: Mapping[str, Any]) -> None:
    """See `Source`."""
    size, augment = config['image_size'], config['augment']
    short_side = config.get('resize_small', 0)
    if 0 < short_side < size:
      expected = f'0, or at least image_size = {size}'
      raise ConfigError('dataset.resize_small', short_side, expected)
    if 'inception_crop' in augment[1:]:
      expected = "'inception_crop' in the first place only"
      raise ConfigError('dataset.augment', augment, expected)

  def describe(self, classes: int, names: Sequence[str], examples: int) -> None:
    """Sets `info` of a source of RGB images, and how rows are padded."""
    self.info = DatasetInfo(
      'image', (self.image_size, self.image_size, 3), 'uint8', classes,
      tuple(names), examples, max_labels=self.max_labels,
      label_kind='classes' if self.max_labels else 'class',
      preprocessing={
        'image_size': self.image_size, 'resize_small': self.short_side,
        'crop': 'central',
      },
    )  # fmt: skip
    self.padding = {'label': -1} if self.max_labels else {}


def decode(data: bytes, by: int = 1, max_pixels: int = MAX_PIXELS) -> Image:
  """Decodes a JPEG, PNG, WebP, BMP or GIF file to RGB, upright by its EXIF tag.

  A JPEG is decoded at 1 / `by` of its size. Raises BadRecord if it is
  empty, truncated, not an image, or has more than `max_pixels`.
  """
  require(data, 'empty', 'the file has no bytes')
  # OpenCV before version 5 fills the rest of a cut file with grey.
  is_jpeg, flags = data.startswith(image_header.JPEG_START), _FLAGS[by]
  scans, picture = image_header.count_scans(data), image_header.header(data)
  width, height = picture.size  # OpenCV allocates up to 3 GiB
  pixels = image_header.scanned_pixels(picture, scans)
  scanned = f' in {scans} scans' * (pixels > height * width)
  message = f'{height} x {width} pixels{scanned}, more than {max_pixels}; '
  message += 'dataset.max_pixels allows more'
  require(pixels <= max_pixels, 'too_many_pixels', message)
  # OpenCV reads fewer forms of the tag than `jpeg_size`.
  flags |= cv2.IMREAD_IGNORE_ORIENTATION if is_jpeg else 0
  try:
    image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
  except cv2.error as error:
    raise BadRecord('undecodable', '', str(error).strip()) from error
  require(image is not None, 'undecodable', f'begins {data[:8]!r}')
  turn = _orientation(picture) if is_jpeg else 1
  image = cv2.transpose(image) if turn > 4 else image
  image = cv2.flip(image, _FLIPS[turn]) if turn in _FLIPS else image
  return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)


def jpeg_size(data: bytes) -> tuple[int, int] | None:
  """Returns (height, width) of a JPEG after EXIF rotation; None if unclear."""
  with contextlib.suppress(BadRecord):
    if data.startswith(image_header.JPEG_START):
      image = image_header.header(data)
      return image.size if _orientation(image) > 4 else image.size[::-1]
  return None


def _orientation(image: image_header.Picture) -> int:
  """Returns the EXIF orientation of a JPEG, 1 if it has none."""
  with contextlib.suppress(Exception):  # a damaged tag is none
    exif = PIL.Image.Exif()
    exif.load(image.info.get('exif', b''))
    turn: Any = exif.get(_ORIENTATION_TAG)
    if turn in range(1, 9):
      return int(turn)
  return 1


def to_rgb(value: Any, max_pixels: int = MAX_PIXELS) -> Image:
  """Decodes bytes, repeats a single channel; else BadRecord if no image."""
  if isinstance(value, bytes):
    return decode(value, max_pixels=max_pixels)
  value = np.asarray(value)
  message = f'expected uint8 pixels, got {value.dtype}'
  require(value.dtype == np.uint8, 'wrong_dtype', message)
  is_image = value.ndim == 3 and value.shape[2] in (1, 3) and value.size
  message = f'expected [H, W, 1 or 3] pixels, got {value.shape}'
  require(is_image, 'wrong_shape', message)
  return value if value.shape[2] == 3 else np.repeat(value, 3, axis=2)


def resize(image: Image, height: int, width: int) -> Reframed:
  """Resizes: bilinear, or by area averaging when it shrinks twice or more."""
  if image.shape[:2] == (height, width):
    return image
  # Bilinear reads 2 x 2 pixels: faster, but it aliases beyond a factor of 2.
  shrinks = image.shape[0] >= 2 * height and image.shape[1] >= 2 * width
  method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
  return cv2.resize(image, (width, height), interpolation=method)


def central_crop(image: Image, height: int, width: int) -> Reframed:
  """Crops the central pixels of an image that is at least that large."""
  top = (image.shape[0] - height) // 2
  left = (image.shape[1] - width) // 2
  return image[top : top + height, left : left + width]


def inception_box(
  height: int, width: int, rng: Rng, min_area: float
) -> tuple[int, int, int, int]:
  """Draws a box (top, left, height, width) as in Szegedy et al., 2015, sec. 6.

  Its area is uniform in [min_area, 1] of the image, the logarithm of its ratio
  between 3/4 and 4/3. After 10 that do not fit: the largest central box.
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
  fitting = min(box_height, box_width) // size
  return max(by for by in _FLAGS if by <= max(fitting, 1))
