"""What a data set is: its description, its records, its legal fields.

A source gives random access to raw records. Order, augmentation, batching and
bad records are the business of the builder, so a new data set is one module
with `FIELDS`, `check_split` and `build`, and one entry in `builder.SOURCES`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Int64, Shaped

from dataset_lib.errors import BadRecord

MAX_EXAMPLES = 2**31 - 1  # record indices travel as int32
MAX_SEED = 2**32 - 1
DEFAULT_BAD_SHARE = 0.001


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
  """What a task must know to build its model.

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
  """

  info: DatasetInfo

  def __len__(self) -> int:
    """Number of records."""

  def record(self, index: int) -> dict[str, Any]:
    """Raw record number `index`."""

  def where(self, index: int) -> str:
    """File (and place in it) of record `index`, for error messages."""


@runtime_checkable
class VectorSource(Protocol):
  """A source that computes many records at once and cannot hold bad ones."""

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """Records as arrays with a leading batch axis: {input_key, 'label'}."""


@runtime_checkable
class DrawnSource(Protocol):
  """A source that draws its records anew in every epoch, and has no bad ones.

  For masks, crops of texts or swaps that are a function of (seed, epoch,
  index); one ordered pass is epoch 0.
  """

  def draw(
    self,
    seed: int,
    epochs: Int[np.ndarray, ' B'],
    indices: Int[np.ndarray, ' B'],
  ) -> dict[str, np.ndarray]:
    """Arrays with a leading batch axis; there may be no records asked for."""


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Rows of token ids of different lengths, one behind the other.

  Attributes:
    tokens: token ids; row i is `tokens[offsets[i]:offsets[i + 1]]`.
    token_types: segment of each token, 0 or 1.
    offsets: where each row begins, and at the end the number of tokens.
  """

  tokens: Int32[np.ndarray, ' M']
  token_types: Int32[np.ndarray, ' M']
  offsets: Int64[np.ndarray, ' O']

  @property
  def num_rows(self) -> int:
    """Number of rows."""
    return len(self.offsets) - 1

  @property
  def lengths(self) -> Int32[np.ndarray, ' N']:
    """Tokens in each row."""
    return np.diff(self.offsets).astype(np.int32)

  def take(self, rows: Int[np.ndarray, ' R']) -> 'Encoded':
    """The given rows, in the given order."""
    lengths = np.diff(self.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shift = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
    places = np.arange(offsets[-1]) + shift
    return Encoded(self.tokens[places], self.token_types[places], offsets)


class TokenSource:
  """Records that are rows of token ids of different lengths; a VectorSource.

  Nothing is padded in memory: a record takes 8 bytes a token.

  Args:
    info: description; its last length bucket holds every row.
    encoded: the rows.
    labels: class or number of each row.
    pad_id: token id behind the end of a row.
    where: place of a record, for error messages.
    bad_rows: rows of the split that are not among the records, by number.
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
    self._encoded = encoded
    self._labels = labels.astype(info.label_dtype)
    self._pad_id = pad_id
    self._where = where

  def __len__(self) -> int:
    return self.info.num_examples

  def records(self, indices: Int[np.ndarray, ' B']) -> dict[str, np.ndarray]:
    """The given records as a batch of the smallest bucket that holds them."""
    longest = self.lengths[indices].max(initial=1)
    length = min(size for size in self.info.length_buckets if size >= longest)
    return self.padded(indices, length, len(indices))

  def padded(
    self, indices: Int[np.ndarray, ' R'], length: int, rows: int
  ) -> dict[str, np.ndarray]:
    """A batch of `rows` rows padded to `length`, the given records first.

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
    """One record without padding: tokens and types int32 [L], label."""
    start, stop = self._encoded.offsets[index : index + 2]
    return {
      'tokens': self._encoded.tokens[start:stop],
      'token_types': self._encoded.token_types[start:stop],
      'label': self._labels[index].item(),
    }

  def where(self, index: int) -> str:
    """File of the record and its line there."""
    return self._where(index)


def places(records: Source) -> list[str]:
  """Where each record lies; rows of two parts of a split are told apart by it.

  Args:
    records: a source; none are given of one that computes its records.
  """
  if not hasattr(records, 'where'):
    return []
  return [records.where(index) for index in range(len(records))]


def length_buckets(sizes: Sequence[int], max_length: int) -> tuple[int, ...]:
  """Lengths to pad to: the sizes below `max_length`, and `max_length`."""
  return (*(size for size in sizes if size < max_length), max_length)
