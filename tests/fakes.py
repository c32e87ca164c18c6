"""Fake images and texts that a model can learn, functions of their index."""

import dataclasses
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from dataset_lib import source
from dataset_lib.image_ops import ImageOptions
from dataset_lib.source import (
  DatasetInfo,
  Encoded,
  Size,
  TokenSource,
  TrainTest,
)
from dataset_lib.text_rows import DEFAULT_BUCKETS, Buckets, MaxLength

SPLITS = ('train', 'test')
NOISE = 64  # peak-to-peak noise of fake images, of 256
CLS, SEP, FIRST_TOKEN = 1, 2, 3  # ids of fake texts; 0 is [PAD]
MIN_LENGTH = 4
SIGNAL = 0.5  # share of a fake text's tokens that depend on the class


@dataclasses.dataclass(kw_only=True, eq=False)
class FakeImages(ImageOptions):
  """Noise around a colour of the class, which a model can learn."""

  split: TrainTest
  num_classes: Annotated[int, Interval(ge=2, le=1_000_000)] = 10
  train_examples: Size = 4096
  test_examples: Size = 512
  resize_small: int = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    self.resize_small = self.image_size
    names = [f'fake_{label}' for label in range(self.num_classes)]
    size = getattr(self, f'{self.split}_examples')
    self.info = self.image_info(self.num_classes, names, size)

  def __len__(self) -> int:
    return self.info.num_examples

  def record(self, index: int) -> dict[str, Any]:
    label = index % self.num_classes
    colour = np.random.default_rng([label]).integers(256 - NOISE, size=3)
    rng = np.random.default_rng([SPLITS.index(self.split), index])
    noise = rng.integers(NOISE, size=self.info.input_shape, dtype=np.uint8)
    return {'image': noise + colour.astype(np.uint8), 'label': label}


@dataclasses.dataclass(kw_only=True, eq=False)
class FakeText(TokenSource):
  """Rows of token ids of all lengths up to `max_length`, mostly short ones.

  Half of the tokens come from a part of the vocabulary that depends on the
  class, or with `num_classes` 1, a regression, on the score in [0, 5]. Ids 0, 1
  and 2 are [PAD], [CLS] and [SEP]; the second half of a row is its second
  segment. There is no tokenizer.
  """

  split: TrainTest
  max_length: MaxLength = 128
  length_buckets: Buckets = DEFAULT_BUCKETS
  vocab_size: Annotated[int, Interval(ge=32, le=2**24)] = 128
  num_classes: Annotated[int, Interval(ge=1, le=16)] = 2
  train_examples: Annotated[int, Interval(ge=1, le=2**22)] = 4096
  test_examples: Annotated[int, Interval(ge=1, le=2**22)] = 512

  def __post_init__(self) -> None:
    rng = np.random.default_rng([SPLITS.index(self.split)])
    size = getattr(self, f'{self.split}_examples')
    # The square of a uniform number: short rows are more frequent.
    spread = rng.random(size) ** 2 * (self.max_length - MIN_LENGTH + 1)
    lengths = MIN_LENGTH + spread.astype(np.int64)
    names = tuple(f'fake_{label}' for label in range(self.num_classes))
    if self.num_classes == 1:
      names, labels = (), rng.uniform(0.0, 5.0, size).astype(np.float32)
    else:
      labels = rng.integers(self.num_classes, size=size).astype(np.int32)
    buckets = source.length_buckets(self.length_buckets, self.max_length)
    info = DatasetInfo(
      'tokens',
      (self.max_length,),
      'int32',
      self.num_classes,
      names,
      size,
      self.vocab_size,
      str(labels.dtype),
      buckets,
    )
    encoded = self._rows(rng, lengths, labels)
    super().__init__(
      info, encoded, labels, 0, lambda index: f'fake_text/{self.split}'
    )

  def _rows(self, rng, lengths, labels):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count, words = int(offsets[-1]), self.vocab_size - FIRST_TOKEN
    tokens = rng.integers(words, size=count)
    signal = rng.random(count) < SIGNAL
    if self.num_classes == 1:
      # The higher the score, the more tokens are of the upper half.
      upper = rng.random(count) < np.repeat(labels / 5.0, lengths)
      wanted = tokens // 2 + np.where(upper, words // 2, 0)
    else:
      part = words // self.num_classes
      wanted = tokens % part + np.repeat(labels, lengths) * part
    tokens = np.where(signal, wanted, tokens) + FIRST_TOKEN
    tokens[offsets[:-1]] = CLS
    tokens[offsets[1:] - 1] = SEP
    place = np.arange(count) - np.repeat(offsets[:-1], lengths)
    types = place >= np.repeat(lengths, lengths) // 2
    return Encoded(tokens.astype(np.int32), types.astype(np.int32), offsets)
