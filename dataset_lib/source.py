"""Random access to the records of one split, and their description.

A data set is a dataclass whose annotated fields are its configuration, `split`
among them, and which has `info`, `__len__` and `record`:

  @dataclasses.dataclass(kw_only=True)
  class Squares:
    split: Literal['train', 'test']
    size: Annotated[int, Interval(ge=1, le=100)] = 10

    def __post_init__(self):
      self.info = DatasetInfo('tokens', (1,), 'int32', 2, (), self.size)

A configuration names it as 'package.module:Squares', or by a short name in
`builder.SOURCES`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
from annotated_types import Interval
from jaxtyping import Int, Int32, Int64, Shaped

from dataset_lib.errors import BadRecord

MAX_EXAMPLES = 2**31 - 1  # record indices are int32
MAX_SEED = 2**32 - 1

# Types of fields that several data sets have.
TrainTest = Literal['train', 'test']
Seed = Annotated[int, Interval(ge=0, le=MAX_SEED)]
Size = Annotated[int, Interval(ge=1, le=MAX_EXAMPLES)]
BadShare = Annotated[float, Interval(ge=0.0, le=0.5)]
DEFAULT_BAD_SHARE = 0.001


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
  """Shapes and classes that a task builds its model from.

  Attributes:
    input_key: 'image' or 'tokens'.
    input_shape: shape of one example, (height, width, 3) or (length,).
    input_dtype: 'uint8' for images, 'int32' for tokens.
    num_classes: number of labels; labels are 0 .. num_classes - 1. 1 for a
      regression.
    class_names: name of each label, or ().
    num_examples: number of records in the split.
    vocab_size: number of token ids; 0 for images.
    label_dtype: 'int32', or 'float32' for a regression.
    length_buckets: lengths that batches are padded to, ascending, the last
      one being that of `input_shape`; () where all examples have one shape.
  """

  input_key: str
  input_shape: tuple[int, ...]
  input_dtype: str
  num_classes: int
  class_names: tuple[str, ...]
  num_examples: int
  vocab_size: int = 0
  label_dtype: str = 'int32'
  length_buckets: tuple[int, ...] = ()


@runtime_checkable
class Source(Protocol):
  """Random access to the raw records of one split.

  `record` returns {input_key: value, 'label': int}; an image is either encoded
  bytes or a uint8 array [H, W, 3] or [H, W, 1], tokens are int32 [L]. It may
  raise BadRecord, and is called from several threads at once.

  A source may also have `where(index)`, the file and line of a record;
  `transform(value, rng)`, which makes an input of a raw value, `rng` None
  without augmentation; `check_fields(config)`, a static check of fields against
  each other; and `max_bad_share`, the tolerated share in training.
  """

  info: DatasetInfo

  def __len__(self) -> int:
    """Returns the number of records."""

  def record(self, index: int) -> dict[str, Any]:
    """Returns the raw record number `index`."""


@runtime_checkable
class VectorSource(Protocol):
  """A source that computes many records at once and has no bad ones."""

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Returns records as arrays with a leading batch axis."""


@runtime_checkable
class DrawnSource(Protocol):
  """A source that draws its records again in every epoch; none is bad."""

  def draw(
    self,
    seed: int,
    epochs: Int[np.ndarray, ' B'],
    indices: Int[np.ndarray, ' B'],
  ) -> dict[str, np.ndarray]:
    """Returns arrays with a leading batch axis; B may be 0."""


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Rows of token ids of different lengths, concatenated.

  Row i is `tokens[offsets[i]:offsets[i + 1]]`; `token_types` is the segment of
  each token, 0 or 1.
  """

  tokens: Int32[np.ndarray, ' M']
  token_types: Int32[np.ndarray, ' M']
  offsets: Int64[np.ndarray, ' O']

  @property
  def lengths(self) -> Int32[np.ndarray, ' N']:
    """Tokens in each row."""
    return np.diff(self.offsets).astype(np.int32)


def pad_rows(
  rows: Sequence[Any],
  shape: tuple[int, int],
  fill: int = 0,
  dtype: Any = np.int32,
) -> Int[np.ndarray, 'R L']:
  """Pads rows of numbers at their ends, and appends rows, up to `shape`."""
  padded = np.full(shape, fill, dtype)
  for target, row in zip(padded, rows, strict=False):
    target[: len(row)] = row
  return padded


class TokenSource:
  """Records that are rows of token ids of different lengths; a VectorSource.

  Args:
    info: description; its last length bucket holds every row.
    encoded: the rows, kept without padding: a record takes 8 bytes a token.
    labels: class or number of each row.
    pad_id: token id of padding.
    where: returns the place of a record, for error messages.
    bad_rows: (number, error) of rows of the split that are not records.
  """

  def __init__(
    self,
    info: DatasetInfo,
    encoded: Encoded,
    labels: Shaped[np.ndarray, ' N'],
    pad_id: int,
    where: Callable[[int], str],
    bad_rows: Sequence[tuple[int, BadRecord]] = (),
  ):
    self.info = info
    self.bad_rows = tuple(bad_rows)
    self.lengths = encoded.lengths
    self.where = where
    self._encoded = encoded
    self._labels = labels.astype(info.label_dtype)
    self._pad_id = pad_id

  def __len__(self) -> int:
    return self.info.num_examples

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Returns the records padded to the smallest bucket that holds them."""
    longest = self.lengths[indices].max(initial=1)
    length = min(size for size in self.info.length_buckets if size >= longest)
    return self.padded(indices, length, len(indices))

  def padded(
    self, indices: Int[np.ndarray, ' R'], length: int, rows: int
  ) -> dict[str, np.ndarray]:
    """Returns a batch of `rows` rows padded to `length`, the records first.

    Returns:
      {'tokens': int32 [rows, length], 'token_types': the same, 'length':
      int32 [rows], 'label': `label_dtype` [rows]}; rows without a record have
      length 1 and nothing but padding.
    """
    real = len(indices)
    lengths = np.ones(rows, np.int32)
    lengths[:real] = self.lengths[indices]
    column = np.arange(length)
    valid = column < lengths[:real, None]
    places = (self._encoded.offsets[indices][:, None] + column)[valid]
    tokens = np.full((rows, length), self._pad_id, np.int32)
    tokens[:real][valid] = self._encoded.tokens[places]
    token_types = np.zeros((rows, length), np.int32)
    token_types[:real][valid] = self._encoded.token_types[places]
    label = np.zeros(rows, self.info.label_dtype)
    label[:real] = self._labels[indices]
    return {
      'tokens': tokens,
      'token_types': token_types,
      'length': lengths,
      'label': label,
    }

  def record(self, index: int) -> dict[str, Any]:
    """Returns one record without padding: tokens and types int32 [L], label."""
    start, stop = self._encoded.offsets[index : index + 2]
    return {
      'tokens': self._encoded.tokens[start:stop],
      'token_types': self._encoded.token_types[start:stop],
      'label': self._labels[index].item(),
    }


def where(records: Source, index: int) -> str:
  """Returns the place of a record; that of a computed one is its split."""
  if hasattr(records, 'where'):
    return records.where(index)
  return f'{type(records).__name__}/{getattr(records, "split", "")}'


def places(records: Source) -> list[str]:
  """Returns the place of each record, which tells rows of two splits apart."""
  return [where(records, index) for index in range(len(records))]


def length_buckets(sizes: Sequence[int], max_length: int) -> tuple[int, ...]:
  """Returns the sizes below `max_length`, and `max_length`."""
  return (*(size for size in sizes if size < max_length), max_length)
