"""Data sets that need no files: parity, and scikit-learn's digits."""

import dataclasses
import functools
import string
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from jaxtyping import Int, Int32, UInt8

from core.errors import ConfigError
from dataset_lib.image_ops import ImageOptions, ImageSize
from dataset_lib.order import integers, record_bits
from dataset_lib.source import Batched, DatasetInfo, Seed, Size, TrainTest

SYMBOLS = (1, -1, 0)  # SYMBOLS[token id] is the symbol
ONE = SYMBOLS.index(1)
NAMES = (*map(str, SYMBOLS), *string.ascii_letters)  # by token id
TEST_SHARE = 0.2  # of the digits of a class
_MAX_PIXEL = 16  # digits have pixels 0 .. 16
_SPLIT_SEED = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class Parity(Batched):
  """Parity of the number of 1s in a sequence (AdaTape, section 3.2).

  Symbols are uniform, as ids in `SYMBOLS`. Splits may share short sequences.
  With `letters`, rows differ in difficulty k, uniform in 1 .. length: k places
  hold 1, and the others different letters, ids from `len(SYMBOLS)`.
  """

  split: TrainTest
  length: Annotated[int, Interval(ge=1, le=65536)]
  letters: Annotated[int, Interval(ge=0, le=52)] = 0  # or at least length - 1
  data_seed: Seed = 0
  train_examples: Size = 2**20
  test_examples: Size = 4096

  def __post_init__(self) -> None:
    size = getattr(self, f'{self.split}_examples')
    names, symbols = ('even', 'odd'), len(SYMBOLS) + self.letters
    self.info = DatasetInfo(
      'tokens', (self.length,), 'int32', 2, names, size, symbols,
      label_kind='class',
    )  # fmt: skip

  @staticmethod
  def check_fields(config: Mapping[str, Any]) -> None:
    """See `Source`: a row has different letters."""
    length, letters = config['length'], config['letters']
    if 0 < letters < length - 1:
      expected = f'0, or at least {length - 1} for {length} symbols'
      raise ConfigError('dataset.letters', letters, expected)

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Returns tokens int32 [B, length], labels and 'difficulty' int32 [B]."""
    key = self.data_seed, int(self.split == 'test')
    extra = {}
    if self.letters:
      tokens, extra['difficulty'] = self._with_letters(indices, key)
    else:
      bits = record_bits(indices, self.length, *key)
      tokens = integers(bits, 0, len(SYMBOLS) - 1).astype(np.int32)
    labels = np.count_nonzero(tokens == ONE, axis=1) % 2
    return {'tokens': tokens, 'label': labels.astype(np.int32), **extra}

  def _with_letters(
    self, indices: Int[np.ndarray, ' B'], key: tuple[int, int]
  ) -> tuple[Int32[np.ndarray, 'B L'], Int32[np.ndarray, ' B']]:
    """Returns tokens, and the number of places that hold 1."""
    sizes = [1, self.length, self.letters]
    bits = record_bits(indices, sum(sizes), *key)
    count, places, order = np.split(bits, np.cumsum(sizes)[:-1], axis=1)
    difficulty = integers(count, 1, self.length).astype(np.int32)
    letters = len(SYMBOLS) + order.argsort(axis=1)
    # Place 0 always holds a 1, so `length - 1` letters are enough.
    letters = np.pad(letters, ((0, 0), (1, 0)))[:, : self.length]
    is_one = np.arange(self.length) < difficulty
    tokens = np.where(is_one, ONE, letters)
    tokens = np.take_along_axis(tokens, places.argsort(axis=1), axis=1)
    return tokens.astype(np.int32), difficulty[:, 0]


@functools.cache
def _load_digits() -> tuple[UInt8[np.ndarray, 'N 8 8'], Int[np.ndarray, ' N']]:
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
  """Scikit-learn's 1,797 handwritten digits, uint8 RGB [8, 8, 3].

  A fifth of every class, chosen once by a fixed seed, is the test split.
  """

  split: TrainTest
  image_size: ImageSize = 8
  # Whole images are resized: a central crop would cut strokes off.
  resize_small: int = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    self.resize_small = self.image_size
    self._pixels, self._labels = _load_digits()
    self._rows = stratified_rows(self._labels, self.split)
    self.describe(10, '0123456789', len(self._rows))

  def record(self, index: int) -> dict[str, Any]:
    """Returns {'image': uint8 [8, 8, 3], 'label': int}."""
    row = self._rows[index]
    image = np.repeat(self._pixels[row][:, :, None], 3, axis=2)
    return {'image': image, 'label': int(self._labels[row])}

  def where(self, index: int) -> str:
    """Returns the row in scikit-learn's table."""
    return f'sklearn digits, row {self._rows[index]}'
