"""Fills batches from a source: validates, augments, replaces bad records.

A `Reader` is a random-access source for Grain whose element k is a block of
rows of one global batch. Blocks rather than single rows keep Grain's cost per
element off the rows; rows are written straight into the block's arrays. A
`LengthReader` gives whole batches of token rows, padded as far as each needs.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from dataset_lib.bad_records import BadRecords
from dataset_lib.errors import BadRecord, TooManyBadRecordsError
from dataset_lib.length_order import LengthOrder
from dataset_lib.order import Order
from dataset_lib.source import (
  DatasetInfo,
  DrawnSource,
  Source,
  TokenSource,
  VectorSource,
)

Batch = dict[str, Shaped[np.ndarray, '...']]  # leading axis: rows
# (raw input, (seed, epoch, index)) -> array of the input's shape
Transform = Callable[[Any, tuple[int, int, int]], np.ndarray]

ROWS_PER_BLOCK = 32
_MAX_REPLACEMENTS = 64


def empty_batch(info: DatasetInfo, rows: int) -> Batch:
  """Padding: zeros, mask 0 and index -1; reading overwrites real rows."""
  return {
    info.input_key: np.zeros((rows, *info.input_shape), info.input_dtype),
    'label': np.zeros(rows, info.label_dtype),
    'mask': np.zeros(rows, np.float32),
    'index': np.full(rows, -1, np.int32),
  }


def concatenate(blocks: Sequence[Batch]) -> Batch:
  """Joins blocks of rows to one batch."""
  return {
    key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]
  }


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How a host's rows of every global batch are cut into blocks.

  Attributes:
    batch_size: rows of the global batch.
    rows: the rows of this host.
    rows_per_block: rows that one thread reads at a time.
  """

  batch_size: int
  rows: range
  rows_per_block: int

  @property
  def per_batch(self) -> int:
    """Blocks in a host's part of a batch."""
    return -(-len(self.rows) // self.rows_per_block)

  def positions(self, block: int) -> range:
    """Positions in the stream of block number `block`, counted from step 0."""
    step, part = divmod(block, self.per_batch)
    start = part * self.rows_per_block
    rows = self.rows[start : start + self.rows_per_block]
    first = step * self.batch_size
    return range(first + rows.start, first + rows.stop)


class Reader:
  """Random access to blocks of rows; Grain calls it from its threads.

  Args:
    source: raw records.
    transform: what happens to a raw input; its randomness is to be a function
      of (seed, epoch, index).
    order: which record stands at which position.
    blocks: the rows of this host.
    bad_records: counts what cannot be used.
    first_block: number of the block that element 0 is.
    num_blocks: length; None for an infinite stream.
  """

  def __init__(
    self,
    source: Source,
    transform: Transform,
    order: Order,
    blocks: Blocks,
    bad_records: BadRecords,
    first_block: int = 0,
    num_blocks: int | None = None,
  ):
    self._source = source
    self._transform = transform
    self._order = order
    self._blocks = blocks
    self._bad_records = bad_records
    self._first_block = first_block
    self._num_blocks = sys.maxsize if num_blocks is None else num_blocks

  def __len__(self) -> int:
    return self._num_blocks

  def __getitem__(self, element: int) -> Batch:
    positions = self._blocks.positions(self._first_block + int(element))
    places = [self._order.place(position) for position in positions]
    if isinstance(self._source, VectorSource | DrawnSource):
      return self._at_once(places)
    batch = empty_batch(self._source.info, len(places))
    for row, place in enumerate(places):
      if place is not None:
        self._fill_row(batch, row, *place)
    return batch

  def _at_once(self, places: Sequence[tuple[int, int] | None]) -> Batch:
    """A block of a source that gives many records in one call."""
    real = [place for place in places if place is not None]
    epochs, indices = np.array(real, np.int64).reshape(-1, 2).T
    records: Any = self._source
    if isinstance(records, DrawnSource):
      arrays = records.draw(self._order.seed, epochs, indices)
    else:
      arrays = records.records(indices)
    return padded(arrays, indices, len(places))

  def _fill_row(self, batch: Batch, row: int, epoch: int, index: int) -> None:
    read, value, label = self._good_record(epoch, index)
    batch[self._source.info.input_key][row] = value
    batch['label'][row] = label
    batch['mask'][row] = 1
    batch['index'][row] = read

  def _good_record(self, epoch: int, index: int) -> tuple[int, np.ndarray, int]:
    """The record, or for a bad one a deterministic other record."""
    candidate = index
    for attempt in range(_MAX_REPLACEMENTS):
      try:
        return candidate, *self._read(epoch, candidate)
      except BadRecord as bad:
        where = bad.where or self._source.where(candidate)
        self._bad_records.add(bad, where, candidate)
      candidate = self._order.replacement(epoch, index, attempt)
    raise TooManyBadRecordsError(
      f'{_MAX_REPLACEMENTS} records in a row were bad, in place of record '
      f'{index}; the first of each kind: {self._bad_records.summary()}'
    )

  def _read(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
    info = self._source.info
    record = self._source.record(index)
    label = check_label(record['label'], info.num_classes)
    key = self._order.seed, epoch, index
    value = self._transform(record[info.input_key], key)
    check_input(value, info)
    return value, label


class LengthReader:
  """Random access to a host's rows of batches that differ in length.

  Args:
    source: rows of tokens.
    order: which records, and which length, a batch has.
    rows: the rows of every global batch that this host reads.
    first_step: number of the batch that element 0 is.
    num_steps: length; None for an infinite stream.
  """

  def __init__(
    self,
    source: TokenSource,
    order: LengthOrder,
    rows: range,
    first_step: int = 0,
    num_steps: int | None = None,
  ):
    self._source = source
    self._order = order
    self._rows = rows
    self._first_step = first_step
    self._num_steps = sys.maxsize if num_steps is None else num_steps

  def __len__(self) -> int:
    return self._num_steps

  def __getitem__(self, element: int) -> Batch:
    # The length is that of the whole batch: all hosts pad to the same one.
    indices, length = self._order.batch(self._first_step + int(element))
    mine = indices[self._rows.start : self._rows.stop]
    rows, real = len(self._rows), len(mine)
    batch = self._source.padded(mine, length, rows)
    batch['mask'] = np.zeros(rows, np.float32)
    batch['mask'][:real] = 1
    batch['index'] = np.full(rows, -1, np.int32)
    batch['index'][:real] = mine
    return batch


def padded(
  arrays: Mapping[str, np.ndarray],
  indices: Int[np.ndarray, ' R'],
  rows: int,
) -> Batch:
  """A batch of `rows` rows: the given records, then zeros, mask 0, index -1.

  Args:
    arrays: the records, leading axis R.
    indices: their numbers.
    rows: at least R.
  """
  real = len(indices)
  batch = {
    key: np.zeros((rows, *values.shape[1:]), values.dtype)
    for key, values in arrays.items()
  }
  batch['mask'] = np.zeros(rows, np.float32)
  batch['index'] = np.full(rows, -1, np.int32)
  for key, values in {**arrays, 'mask': 1, 'index': indices}.items():
    batch[key][:real] = values
  return batch


def check_label(label: Any, num_classes: int) -> int:
  """The label as an int.

  Raises:
    BadRecord: not an integer, or outside [0, num_classes - 1]; -1 would train
      silently and num_classes would give NaN.
  """
  if not isinstance(label, (int, np.integer)) or isinstance(label, bool):
    raise BadRecord('wrong_dtype', '', f'label {label!r} is not an integer')
  if not 0 <= label < num_classes:
    raise BadRecord(
      'label_out_of_range', '', f'label {label} not in [0, {num_classes - 1}]'
    )
  return int(label)


def check_input(value: np.ndarray, info: DatasetInfo) -> None:
  """Checks one transformed input.

  Raises:
    BadRecord: wrong shape or dtype, or token ids outside the vocabulary.
  """
  if value.dtype != info.input_dtype:
    raise BadRecord(
      'wrong_dtype', '', f'expected {info.input_dtype}, got {value.dtype}'
    )
  if value.shape != info.input_shape:
    raise BadRecord(
      'wrong_shape', '', f'expected {info.input_shape}, got {value.shape}'
    )
  low, high = (value.min(), value.max()) if info.vocab_size else (0, -1)
  if low < 0 or high >= info.vocab_size:
    message = f'token ids {low}..{high} not in [0, {info.vocab_size - 1}]'
    raise BadRecord('token_out_of_range', '', message)
