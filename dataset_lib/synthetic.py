"""Data sets that need no files: parity, digits, and fakes for tests.

A computed record is a function of its index. The fakes are used only where
named; no data set falls back to them.
"""

import dataclasses
import functools
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from jaxtyping import Float, Int, UInt8

from dataset_lib import source
from dataset_lib.image_ops import ImageOptions, ImageSize
from dataset_lib.order import record_bits
from dataset_lib.source import (
  DatasetInfo,
  Encoded,
  Seed,
  Size,
  TokenSource,
  TrainTest,
)
from dataset_lib.text_rows import DEFAULT_BUCKETS, Buckets, MaxLength

SPLITS = ('train', 'test')
SYMBOLS = (1, -1, 0)  # SYMBOLS[token id] is the symbol
ONE = SYMBOLS.index(1)
NOISE = 64  # peak-to-peak noise of fake images, of 256
CLS, SEP, FIRST_TOKEN = 1, 2, 3  # ids of fake texts; 0 is [PAD]
MIN_LENGTH = 4
SIGNAL = 0.5  # share of a fake text's tokens that depend on the class
TEST_SHARE = 0.2  # of the digits of a class
_MAX_PIXEL = 16  # digits have pixels 0 .. 16
_SPLIT_SEED = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class Parity:
  """Parity of the number of 1s in a sequence (AdaTape, section 3.2).

  Symbols are drawn uniformly from {1, -1, 0}, as token ids: id 0 is the symbol
  1, id 1 is -1, id 2 is 0. The label is the number of 1s modulo 2. Train and
  test draw from separate streams; short sequences recur by chance, as there are
  only 3 ** length of them. `data_seed` selects the streams, independent of the
  run's seed, so that runs with different seeds share one test set.
  """

  split: TrainTest
  length: Annotated[int, Interval(ge=1, le=65536)]
  data_seed: Seed = 0
  train_examples: Size = 2**20
  test_examples: Size = 4096

  def __post_init__(self) -> None:
    self.info = DatasetInfo(
      input_key='tokens',
      input_shape=(self.length,),
      input_dtype='int32',
      num_classes=2,
      class_names=('even', 'odd'),
      num_examples=getattr(self, f'{self.split}_examples'),
      vocab_size=len(SYMBOLS),
    )

  def __len__(self) -> int:
    return self.info.num_examples

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Returns tokens int32 [B, length] and labels int32 [B]."""
    key = self.data_seed, SPLITS.index(self.split)
    bits = record_bits(indices, self.length, *key)
    # The upper 32 bits times 3 / 2**32 are uniform over {0, 1, 2} to 2**-32.
    tokens = ((bits >> np.uint64(32)) * np.uint64(3)) >> np.uint64(32)
    tokens = tokens.astype(np.int32)
    labels = np.count_nonzero(tokens == ONE, axis=1) % 2
    return {'tokens': tokens, 'label': labels.astype(np.int32)}

  def record(self, index: int) -> dict[str, Any]:
    """Returns tokens int32 [length] and label of record `index`."""
    batch = self.records(np.array([index]))
    return {'tokens': batch['tokens'][0], 'label': int(batch['label'][0])}


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
  """Returns the rows of one split, ascending."""
  rng = np.random.default_rng(_SPLIT_SEED)
  chosen = []
  for label in np.unique(labels):
    rows = rng.permutation(np.flatnonzero(labels == label))
    cut = round(len(rows) * TEST_SHARE)
    chosen.append(rows[:cut] if split == 'test' else rows[cut:])
  return np.sort(np.concatenate(chosen))


@dataclasses.dataclass(kw_only=True, eq=False)
class Digits(ImageOptions):
  """Scikit-learn's handwritten digits of one split, uint8 RGB [8, 8, 3].

  1,797 real images without a download. They have no official split, so a fifth
  of every class, chosen once by a fixed seed, is the test split.
  """

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
    """Returns {'image': uint8 [image_size, image_size, 3], 'label': int}."""
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
    info = DatasetInfo(
      input_key='tokens',
      input_shape=(self.max_length,),
      input_dtype='int32',
      num_classes=self.num_classes,
      class_names=names,
      num_examples=size,
      vocab_size=self.vocab_size,
      label_dtype=str(labels.dtype),
      length_buckets=source.length_buckets(
        self.length_buckets, self.max_length
      ),
    )
    encoded = self._rows(rng, lengths, labels)
    super().__init__(
      info, encoded, labels, 0, lambda index: f'fake_text/{self.split}'
    )

  def _rows(
    self,
    rng: np.random.Generator,
    lengths: Int[np.ndarray, ' N'],
    labels: Int[np.ndarray, ' N'] | Float[np.ndarray, ' N'],
  ) -> Encoded:
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
