"""Fills batches from a source: checks records, pads rows, replaces bad records.

A `Reader` is a random-access source for Grain whose element k is a block of
rows of one global batch. Blocks rather than single rows keep Grain's cost per
element off the rows; rows are written straight into the block's arrays.

The tolerance for bad records is a share of the records of the split, and a
record counts once however often it is read: the verdict then does not depend on
the number of epochs, of threads or of hosts.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from dataset_lib import source
from dataset_lib.errors import BadRecord, TooManyBadRecordsError
from dataset_lib.order import Places
from dataset_lib.source import (
  DatasetInfo,
  DrawnSource,
  TokenSource,
  VectorSource,
)

Batch = dict[str, Shaped[np.ndarray, '...']]  # leading axis: rows
# (raw input, (seed, epoch, index)) -> array of the input's shape
Transform = Callable[[Any, tuple[int, int, int]], np.ndarray]

ROWS_PER_BLOCK = 32
SHOWN_PER_KIND = 5
_MAX_REPLACEMENTS = 64


class BadRecords:
  """Thread-safe count of distinct bad records by kind.

  A share `max_share` of `num_examples` is tolerated; 0 stops at the first one.
  """

  def __init__(self, num_examples: int, max_share: float):
    self._num_examples = num_examples
    self._max_share = max_share
    self._tolerated = int(num_examples * max_share)
    self._rows: set[int] = set()
    self._kinds: dict[str, dict[str, Any]] = {}
    self._lock = threading.Lock()

  def add(self, bad: BadRecord, where: str, row: int) -> None:
    """Counts record `row` of file `where`.

    Raises:
      TooManyBadRecordsError: the tolerated share is exceeded.
    """
    with self._lock:
      if row not in self._rows:
        self._rows.add(row)
        kind = self._kinds.setdefault(bad.kind, {'count': 0, 'first': []})
        kind['count'] += 1
        if len(kind['first']) < SHOWN_PER_KIND:
          kind['first'].append(
            {'file': where, 'row': row, 'message': bad.message}
          )
      if len(self._rows) > self._tolerated:
        raise TooManyBadRecordsError(self._complaint())

  def summary(self) -> dict[str, dict[str, Any]]:
    """Returns {kind: {'count', 'first': [{'file', 'row', 'message'}]}}."""
    with self._lock:
      return {
        kind: {'count': entry['count'], 'first': list(entry['first'])}
        for kind, entry in self._kinds.items()
      }

  def _complaint(self) -> str:
    lines = [
      f'{len(self._rows)} of {self._num_examples} records are bad, tolerated '
      f'are {self._tolerated} (share {self._max_share}):'
    ]
    for kind, entry in self._kinds.items():
      lines.append(f'  {kind}: {entry["count"]}')
      lines += [
        f'    {first["file"]} (row {first["row"]}): {first["message"]}'
        for first in entry['first']
      ]
    lines.append(
      'Repair or remove these records; for training, dataset.max_bad_share '
      'sets the tolerated share. Evaluation tolerates none.'
    )
    return '\n'.join(lines)


class Reader:
  """Random access to blocks of rows; Grain calls it from its threads.

  `dataset` is a `builder.Dataset`. Element 0 is block number `first_block`;
  `num_blocks` None is an infinite stream.
  """

  def __init__(
    self,
    dataset: Any,
    bad_records: BadRecords,
    first_block: int = 0,
    num_blocks: int | None = None,
  ):
    self._source, self._transform = dataset.records, dataset.transform
    self._order, self._rows = dataset.order, dataset.rows
    self._block, self._per_batch = dataset.block, dataset.blocks_per_batch
    self._bad_records = bad_records
    self._first_block = first_block
    self._num_blocks = sys.maxsize if num_blocks is None else num_blocks

  def __len__(self) -> int:
    return self._num_blocks

  def __getitem__(self, element: int) -> Batch:
    number = self._first_block + int(element)
    step, part = divmod(number, self._per_batch)
    rows = self._rows[part * self._block : (part + 1) * self._block]
    places = self._order.batch(step, rows)
    indices, count = places.indices, len(rows)
    if isinstance(self._source, TokenSource):
      arrays = self._source.padded(indices, places.length, count)
      return arrays | _mask_and_index(indices, count)
    if isinstance(self._source, DrawnSource):
      seed = self._order.seed
      return padded(
        self._source.draw(seed, places.epochs, indices), indices, count
      )
    if isinstance(self._source, VectorSource):
      return padded(self._source.records(indices), indices, count)
    return self._one_by_one(places, count)

  def _one_by_one(self, places: Places, count: int) -> Batch:
    """Returns a block of checked records, bad ones replaced."""
    info, indices = self._source.info, np.array(places.indices)
    inputs = np.zeros((count, *info.input_shape), info.input_dtype)
    labels = np.zeros(count, info.label_dtype)
    for row, epoch in enumerate(places.epochs):
      key = int(epoch), int(indices[row])
      indices[row], inputs[row], labels[row] = self._good_record(*key)
    arrays = {info.input_key: inputs, 'label': labels}
    return arrays | _mask_and_index(indices, count)

  def _good_record(self, epoch: int, index: int) -> tuple[int, Any, int]:
    """Returns the record, or for a bad one a deterministic other record."""
    candidate = index
    for attempt in range(_MAX_REPLACEMENTS):
      try:
        return candidate, *self._read(epoch, candidate)
      except BadRecord as bad:
        place = bad.where or source.where(self._source, candidate)
        self._bad_records.add(bad, place, candidate)
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


def padded(
  arrays: Mapping[str, np.ndarray],
  indices: Int[np.ndarray, ' R'],
  rows: int,
) -> Batch:
  """Returns `rows` rows: the records, then zeros with mask 0, index -1."""
  batch = {
    key: np.zeros((rows, *values.shape[1:]), values.dtype)
    for key, values in arrays.items()
  }
  for key, values in arrays.items():
    batch[key][: len(indices)] = values
  return batch | _mask_and_index(indices, rows)


def _mask_and_index(indices: Int[np.ndarray, ' R'], rows: int) -> Batch:
  mask, index = np.zeros(rows, np.float32), np.full(rows, -1, np.int32)
  mask[: len(indices)] = 1
  index[: len(indices)] = indices
  return {'mask': mask, 'index': index}


def concatenate(blocks: Sequence[Batch]) -> Batch:
  """Joins blocks of rows to one batch."""
  return {
    key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]
  }


def check_label(label: Any, num_classes: int) -> int:
  """Returns the label; BadRecord if not an integer in [0, num_classes - 1]."""
  if not isinstance(label, (int, np.integer)) or isinstance(label, bool):
    raise BadRecord('wrong_dtype', '', f'label {label!r} is not an integer')
  if not 0 <= label < num_classes:
    raise BadRecord(
      'label_out_of_range', '', f'label {label} not in [0, {num_classes - 1}]'
    )
  return int(label)


def check_input(value: np.ndarray, info: DatasetInfo) -> None:
  """Raises BadRecord for a wrong shape or dtype, or an unknown token id."""
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
