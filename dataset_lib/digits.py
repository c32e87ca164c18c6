"""Scikit-learn's bundled handwritten digits: 1,797 real images of 8 x 8 pixels.

Needs no download. The set has no official split, so a fifth of every class,
chosen once by a fixed seed, is the test split.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from dataset_lib.image_ops import ImageOptions, ImageSize
from dataset_lib.source import TrainTest

TEST_SHARE = 0.2
_SPLIT_SEED = 0
_MAX_PIXEL = 16  # the pixels are 0 .. 16


@functools.cache
def _load() -> tuple[UInt8[np.ndarray, 'N 8 8'], Int[np.ndarray, ' N']]:
  """Returns pixels in [0, 255] and labels of all digits."""
  # Imported here because it takes about a second.
  from sklearn import datasets

  digits = datasets.load_digits()
  pixels = np.round(digits.images * (255 / _MAX_PIXEL)).astype(np.uint8)
  return pixels, digits.target.astype(np.int32)


def stratified_rows(
  labels: Int[np.ndarray, ' N'], split: str
) -> Int[np.ndarray, ' M']:
  """Returns the rows of one split, ascending; TEST_SHARE of a class is test."""
  rng = np.random.default_rng(_SPLIT_SEED)
  chosen = []
  for label in np.unique(labels):
    rows = rng.permutation(np.flatnonzero(labels == label))
    cut = round(len(rows) * TEST_SHARE)
    chosen.append(rows[:cut] if split == 'test' else rows[cut:])
  return np.sort(np.concatenate(chosen))


@dataclasses.dataclass(kw_only=True, eq=False)
class Digits(ImageOptions):
  """Digits of one split as uint8 RGB images [8, 8, 3]."""

  split: TrainTest
  image_size: ImageSize = 8
  # Whole images are resized: a central crop would cut strokes off.
  resize_small: int = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    self.resize_small = self.image_size
    pixels, labels = _load()
    self._rows = stratified_rows(labels, self.split)
    self._pixels, self._labels = pixels[self._rows], labels[self._rows]
    self.info = self.image_info(10, tuple('0123456789'), len(self._rows))

  def __len__(self) -> int:
    return len(self._rows)

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': uint8 [8, 8, 3], 'label': int}."""
    image = np.repeat(self._pixels[index][:, :, None], 3, axis=2)
    return {'image': image, 'label': int(self._labels[index])}

  def where(self, index: int) -> str:
    """Returns the row in scikit-learn's table."""
    return f'sklearn digits, row {self._rows[index]}'
