"""Fake images for tests and benchmarks, used only where asked for by name.

Noise around a colour that belongs to the class, so a model can learn them; a
record is a pure function of (split, index). The name `fake_images` and the
class names say what they are: nothing falls back to them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataset_lib import fields, image_ops, source

SPLITS = ('train', 'test')
NOISE = 64  # peak-to-peak, of 256

FIELDS = {
  **image_ops.FIELDS,
  'num_classes': fields.integer(2, 1_000_000, default=10),
  'train_examples': fields.integer(1, source.MAX_EXAMPLES, default=4096),
  'test_examples': fields.integer(1, source.MAX_EXAMPLES, default=512),
}
del FIELDS['resize_small']  # the images are made at image_size


class FakeImagesSource:
  """Fake images of one split.

  Args:
    split: 'train' or 'test'.
    image_size: side of the images.
    num_classes: number of labels; record i has label i % num_classes.
    num_examples: records in the split.
  """

  def __init__(
    self, split: str, image_size: int, num_classes: int, num_examples: int
  ):
    self._split = split
    self.info = source.DatasetInfo(
      input_key='image',
      input_shape=(image_size, image_size, 3),
      input_dtype='uint8',
      num_classes=num_classes,
      class_names=tuple(f'fake_{label}' for label in range(num_classes)),
      num_examples=num_examples,
    )

  def __len__(self) -> int:
    return self.info.num_examples

  def record(self, index: int) -> dict[str, Any]:
    """{'image': uint8 [image_size, image_size, 3], 'label': int}."""
    label = index % self.info.num_classes
    colour = np.random.default_rng([label]).integers(256 - NOISE, size=3)
    rng = np.random.default_rng([SPLITS.index(self._split), index])
    noise = rng.integers(NOISE, size=self.info.input_shape, dtype=np.uint8)
    return {'image': noise + colour.astype(np.uint8), 'label': label}

  def where(self, index: int) -> str:
    """Fake records lie in no file; the name of the stream stands in."""
    return f'fake_images/{self._split}'


def check_split(split: str) -> None:
  """Raises ConfigError unless the split is 'train' or 'test'."""
  fields.check_one_of('split', split, SPLITS)


def build(config: Mapping[str, Any], split: str) -> FakeImagesSource:
  """The source of one split; `config` has every field of FIELDS."""
  return FakeImagesSource(
    split,
    config['image_size'],
    config['num_classes'],
    config[f'{split}_examples'],
  )
