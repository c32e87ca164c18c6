"""RandAugment (Cubuk et al., 2020, arXiv:1909.13719) of uint8 RGB images.

Operations and magnitudes are as in big_vision: posterizing gets weaker with the
magnitude, and solarizing does nothing from 10 on. Distances are shares of the
image, equal to big_vision's pixels at 224 x 224.
"""

from collections.abc import Callable

import numpy as np
import PIL.Image
from jaxtyping import UInt8
from PIL import ImageEnhance, ImageOps

Image = UInt8[np.ndarray, 'H W 3']
Picture = PIL.Image.Image
# A picture, magnitude / 10, and the random numbers of the image.
Operation = Callable[[Picture, float, np.random.Generator], Picture]

GREY = (128, 128, 128)  # of pixels from outside of the image
_THRESHOLD = 128  # of solarize_add, which brightens darker pixels
_TRANSLATE, _CUTOUT = 100 / 224, 40 / 224  # shares of the image at magnitude 10


def _sign(rng: np.random.Generator) -> int:
  return 1 if rng.random() < 0.5 else -1


def _affine(shear=(0.0, 0.0), move=(0.0, 0.0)) -> Operation:
  """Shears or moves x and y in a random direction; moves are image shares."""

  def apply(image, level, rng):
    level, method = _sign(rng) * level, PIL.Image.Transform.AFFINE
    x_row = 1, shear[0] * level, move[0] * level * image.width
    y_row = shear[1] * level, 1, move[1] * level * image.height
    return image.transform(image.size, method, x_row + y_row, fillcolor=GREY)

  return apply


def _solarize_add(image, level, rng):
  value, added = np.arange(256), int(110 * level)
  brighter = np.where(value < _THRESHOLD, np.minimum(value + added, 255), value)
  return image.point(brighter.tolist() * 3)


def _cutout(image, level, rng):
  x, y = int(rng.integers(image.width)), int(rng.integers(image.height))
  half = [round(_CUTOUT * level * side) for side in image.size]
  image = image.copy()
  image.paste(GREY, (x - half[0], y - half[1], x + half[0], y + half[1]))
  return image


def _enhanced(kind: Callable[[Picture], ImageEnhance._Enhance]) -> Operation:
  return lambda image, level, rng: kind(image).enhance(0.1 + 1.8 * level)


OPERATIONS: dict[str, Operation] = {
  'autocontrast': lambda image, level, rng: ImageOps.autocontrast(image),
  'equalize': lambda image, level, rng: ImageOps.equalize(image),
  'invert': lambda image, level, rng: ImageOps.invert(image),
  'rotate': lambda image, level, rng: image.rotate(
    _sign(rng) * 30 * level, fillcolor=GREY
  ),
  # At least 1 bit: big_vision's 0, below magnitude 3, is a black image.
  'posterize': lambda image, level, rng: ImageOps.posterize(
    image, min(max(int(4 * level), 1), 8)
  ),
  'solarize': lambda image, level, rng: ImageOps.solarize(
    image, int(256 * level)
  ),
  'color': _enhanced(ImageEnhance.Color),
  'contrast': _enhanced(ImageEnhance.Contrast),
  'brightness': _enhanced(ImageEnhance.Brightness),
  'sharpness': _enhanced(ImageEnhance.Sharpness),
  'shear_x': _affine(shear=(0.3, 0.0)),
  'shear_y': _affine(shear=(0.0, 0.3)),
  'translate_x': _affine(move=(_TRANSLATE, 0.0)),
  'translate_y': _affine(move=(0.0, _TRANSLATE)),
  'cutout': _cutout,
  'solarize_add': _solarize_add,
}


def rand_augment(
  image: Image, rng: np.random.Generator, operations: int, magnitude: int
) -> Image:
  """Applies operations, drawn with replacement, of one magnitude in [0, 30]."""
  picture, table = PIL.Image.fromarray(image), tuple(OPERATIONS.values())
  for number in rng.integers(len(table), size=operations):
    picture = table[number](picture, magnitude / 10, rng)
  return np.asarray(picture)
