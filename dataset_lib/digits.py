"""Scikit-learn's bundled handwritten digits: 1,797 real images of 8 x 8 pixels.

Needs no download. The set has no official split, so a fifth of every class,
chosen once and for all by a fixed seed, is the test split.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from dataset_lib import fields, image_ops, source

SPLITS = ('train', 'test')
TEST_SHARE = 0.2
_SPLIT_SEED = 0
_MAX_PIXEL = 16  # the pixels are 0 .. 16

FIELDS = {
  **image_ops.FIELDS,
  'image_size': fields.integer(1, 4096, default=8),
}
# Whole images are shown: a central crop would cut strokes off.
del FIELDS['resize_small']


@functools.cache
def _load() -> tuple[UInt8[np.ndarray, 'N 8 8'], Int[np.ndarray, ' N']]:
  """Pixels in [0, 255] and labels of all digits."""
  # Imported here because it takes about a second.
  from sklearn import datasets

  digits = datasets.load_digits()
  pixels = np.round(digits.images * (255 / _MAX_PIXEL)).astype(np.uint8)
  return pixels, digits.target.astype(np.int32)


def stratified_rows(
  labels: Int[np.ndarray, ' N'], split: str
) -> Int[np.ndarray, ' M']:
  """Rows of one split, ascending; TEST_SHARE of every class is test."""
  rng = np.random.default_rng(_SPLIT_SEED)
  chosen = []
  for label in np.unique(labels):
    rows = rng.permutation(np.flatnonzero(labels == label))
    cut = round(len(rows) * TEST_SHARE)
    chosen.append(rows[:cut] if split == 'test' else rows[cut:])
  return np.sort(np.concatenate(chosen))


class DigitsSource:
  """Digits of one split as uint8 RGB images [8, 8, 3].

  Args:
    split: 'train' or 'test'.
    image_size: side of the batches' images, for `info`.
  """

  def __init__(self, split: str, image_size: int):
    pixels, labels = _load()
    self._rows = stratified_rows(labels, split)
    self._pixels = pixels[self._rows]
    self._labels = labels[self._rows]
    self.info = source.DatasetInfo(
      input_key='image',
      input_shape=(image_size, image_size, 3),
      input_dtype='uint8',
      num_classes=10,
      class_names=tuple('0123456789'),
      num_examples=len(self._rows),
    )

  def __len__(self) -> int:
    return len(self._rows)

  def record(self, index: int) -> dict[str, Any]:
    """{'image': uint8 [8, 8, 3], 'label': int}."""
    image = np.repeat(self._pixels[index][:, :, None], 3, axis=2)
    return {'image': image, 'label': int(self._labels[index])}

  def where(self, index: int) -> str:
    """Row in scikit-learn's table."""
    return f'sklearn digits, row {self._rows[index]}'


def check_split(split: str) -> None:
  """Raises ConfigError unless the split is 'train' or 'test'."""
  fields.check_one_of('split', split, SPLITS)


def build(config: Mapping[str, Any], split: str) -> DigitsSource:
  """The source of one split; `config` has every field of FIELDS."""
  return DigitsSource(split, config['image_size'])
