"""Fake images, texts and faults that need no files."""

import dataclasses
import errno
import os
import time
from typing import Annotated

import numpy as np
from annotated_types import Interval

from dataset_lib import source
from dataset_lib.image_ops import ImageOptions
from dataset_lib.source import DatasetInfo, Size
from dataset_lib.synthetic import Parity
from dataset_lib.text_rows import (
  Buckets,
  MaxLength,
  TokenSource,
  length_buckets,
)
from dataset_lib.tokenizer import Encoded
from train_lib import run_directory

SPLITS = ('train', 'test')
NOISE = 64  # peak-to-peak, of 256


@dataclasses.dataclass(kw_only=True, eq=False)
class FakeImages(ImageOptions):
  """Noise around a colour of the class, which a model can learn."""

  split: source.TrainTest
  num_classes: Annotated[int, Interval(ge=2, le=1_000_000)] = 10
  train_examples: Size = 4096
  test_examples: Size = 512
  resize_small: int = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    self.resize_small = self.image_size
    names = [f'fake_{label}' for label in range(self.num_classes)]
    size = getattr(self, f'{self.split}_examples')
    self.describe(self.num_classes, names, size)

  def record(self, index: int) -> dict:
    label = index % self.num_classes
    colour = np.random.default_rng([label]).integers(256 - NOISE, size=3)
    rng = np.random.default_rng([SPLITS.index(self.split), index])
    noise = rng.integers(NOISE, size=self.info.input_shape, dtype=np.uint8)
    return {'image': noise + colour.astype(np.uint8), 'label': label}


def full(run, step, values):
  """Fails as the log does on a full disk."""
  with run_directory.writing(run.workdir / run_directory.METRICS):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclasses.dataclass(kw_only=True, eq=False)
class FaultyParity(Parity):
  """Parity whose reading meets the fault `FAULT` of the environment."""

  def __post_init__(self) -> None:
    super().__post_init__()
    self.batches = 0

  def records(self, indices):
    fault, self.batches = os.environ.get('FAULT'), self.batches + 1
    if fault == 'slow' and self.split == 'test':
      time.sleep(0.2)
    if fault == 'no_log' and self.split == 'train' and self.batches == 20:
      run_directory.RunDirectory.log = full
    if fault == 'slow_train' and self.split == 'train':
      time.sleep(0.1)
    if self.split == 'train' and self.batches == 20:
      if fault == 'stuck':
        time.sleep(1000)
      if fault == 'exception':
        raise RuntimeError('the disk of the data fell off')
      if fault == 'exit':
        os._exit(9)
    return super().records(indices)


@dataclasses.dataclass(kw_only=True, eq=False)
class FakeText(TokenSource):
  """Rows of random token ids of all lengths, mostly short ones; 0 is [PAD]."""

  split: source.TrainTest
  max_length: MaxLength = 128
  length_buckets: Buckets = (32, 64, 128)
  train_examples: Size = 4096
  test_examples: Size = 512

  def __post_init__(self) -> None:
    rng = np.random.default_rng([SPLITS.index(self.split)])
    size = getattr(self, f'{self.split}_examples')
    # The square of a uniform number: short rows are more frequent.
    spread = rng.random(size) ** 2 * (self.max_length - 3)
    offsets = np.cumsum([0, *(4 + spread.astype(np.int64))])
    tokens = rng.integers(1, 128, offsets[-1]).astype(np.int32)
    buckets = length_buckets(self.length_buckets, self.max_length)
    info = DatasetInfo(
      'tokens', (self.max_length,), 'int32', 2, ('a', 'b'), size, 128,
      length_buckets=buckets,
    )  # fmt: skip
    super().__init__(
      info, Encoded(tokens, tokens % 2, offsets), rng.integers(2, size=size), 0
    )
