"""Batches of a source: checks records, pads rows, replaces bad records."""

import contextlib
import numbers
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from dataset_lib import source
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  FaultCounts,
  TooManyBadRecordsError,
)
from dataset_lib.order import Order, Places, record_rng
from dataset_lib.source import DatasetInfo, require

Batch = dict[str, Shaped[np.ndarray, '...']]  # leading axis: rows

ROWS_PER_BLOCK = 32
_MAX_REPLACEMENTS = 64
_ADVICE = (
  'Repair or remove these records; for training, dataset.max_bad_share sets '
  'the tolerated share. Evaluation tolerates none.'
)


class BadRecords:
  """Thread-safe count of distinct bad records by kind.

  A share of the records of the split is tolerated, and a record counts once
  however often it is read: the verdict then does not depend on the number of
  epochs, of threads or of hosts. Share 0 stops at the first one.
  """

  def __init__(self, num_examples: int, max_share: float):
    self._num_examples, self._max_share = num_examples, max_share
    self._rows: set[int] = set()
    self._counts = FaultCounts()
    self._lock = threading.Lock()

  def add(self, bad: BadRecord, where: str, row: int) -> None:
    """Counts record `row` of file `where`.

    Raises:
      TooManyBadRecordsError: the tolerated share is exceeded.
    """
    tolerated = int(self._num_examples * self._max_share)
    with self._lock:
      if row not in self._rows:
        self._rows.add(row)
        self._counts.add(bad.kind, file=where, row=row, message=bad.message)
      if len(self._rows) <= tolerated:
        return
    lines = [
      f'{len(self._rows)} of {self._num_examples} records are bad, tolerated '
      f'are {tolerated} (share {self._max_share}):'
    ]
    for kind, entry in self.summary().items():
      lines.append(f'  {kind}: {entry["count"]}')
      for first in entry['first']:
        place = f'{first["file"]} (row {first["row"]})'
        lines.append(f'    {place}: {first["message"]}')
    raise TooManyBadRecordsError('\n'.join([*lines, _ADVICE]))

  def summary(self) -> dict[str, dict[str, Any]]:
    """Returns {kind: {'count', 'first': [{'file', 'row', 'message'}]}}."""
    with self._lock:
      return self._counts.summary()


class Dataset:
  """Global batches of one split; made by `builder.build`.

  Grain's threads read blocks rather than single rows, which keeps its cost per
  element off the rows.

  Attributes:
    records: the source.
    info: its shapes, classes and size.
    steps_per_epoch: full batches in the split for training (at least 1), all
      batches with the padded last one for evaluation.
  """

  def __init__(
    self,
    records: Any,
    order: Order,
    rows: range,
    train: bool,
    num_threads: int,
    prefetch: int,
  ):
    self.records = records
    self.info: DatasetInfo = records.info
    self.steps_per_epoch = order.steps_per_epoch
    self._order, self._rows = order, rows
    reads_many = hasattr(records, 'records') or hasattr(records, 'draw')
    limit = len(rows) if reads_many else ROWS_PER_BLOCK
    self._block_rows = min(len(rows), limit)
    self._per_batch = -(-len(rows) // self._block_rows)
    ahead = max(prefetch * self._per_batch, num_threads)
    self._reading = dict(num_threads=num_threads, prefetch_buffer_size=ahead)
    self._augments = train and getattr(records, 'augment', True)
    # Rows of text are read, and found bad, before the first batch.
    bad_rows = getattr(records, 'bad_rows', ())
    max_share = getattr(records, 'max_bad_share', 0.0) if train else 0.0
    self._bad_records = BadRecords(len(records) + len(bad_rows), max_share)
    for row, bad in bad_rows:
      self._bad_records.add(bad, bad.where, row)

  @property
  def bad_records(self) -> dict[str, dict[str, Any]]:
    """{kind: {'count': n, 'first': [{'file', 'row', 'message'}, ...]}}."""
    return self._bad_records.summary()

  def places(self) -> set[str]:
    """Returns file and line of each record; see `source.places`."""
    return set(source.places(self.records))

  def batches(self, start_step: int = 0) -> Iterator[Batch]:
    """Yields this host's rows of every global batch from `start_step` on.

    Any step is reached at once, without replay.

    Returns:
      A generator of {input_key, 'label', 'mask', 'index'} with leading axis
      batch_size / host_count: infinite for training, one pass for evaluation
      with the last batch padded (mask 0, index -1). Rows of text also have
      'token_types' and 'length', and batches differ in their padded length.
      `close()` stops its threads, as does its end or garbage collection.

    Raises:
      ConfigError: start_step is not an integer of at least 0.
      TooManyBadRecordsError: while iterating, when the tolerance is exceeded.
    """
    if not isinstance(start_step, numbers.Integral) or start_step < 0:
      raise ConfigError('start_step', start_step, 'an integer of at least 0')
    stop = sys.maxsize
    if not self._order.shuffle:
      stop = self.steps_per_epoch * self._per_batch
    return self._iterate(int(start_step) * self._per_batch, stop)

  def _iterate(self, first: int, stop: int) -> Iterator[Batch]:
    # Imported here so that validating a configuration stays cheap.
    import grain

    if first >= stop:
      return
    blocks = grain.MapDataset.range(first, stop).map(self._block)
    stream = blocks.to_iter_dataset(grain.ReadOptions(**self._reading))
    if self._per_batch > 1:
      stream = stream.batch(self._per_batch, batch_fn=_concatenate)
    with contextlib.closing(iter(stream)) as batches:
      yield from batches

  def _block(self, number: int) -> Batch:
    """Returns a block of rows, counted from that of step 0 on."""
    step, part = divmod(int(number), self._per_batch)
    first = part * self._block_rows
    rows = self._rows[first : first + self._block_rows]
    places = self._order.batch(step, rows)
    records, indices = self.records, places.indices
    if places.length:
      arrays = records.records(indices, places.length)
    elif hasattr(records, 'draw'):
      arrays = records.draw(self._order.seed, places.epochs, indices)
    elif hasattr(records, 'records'):
      arrays = records.records(indices)
    else:
      indices, arrays = self._one_by_one(places)
    return padded(arrays, indices, len(rows), getattr(records, 'padding', {}))

  def _one_by_one(self, places: Places) -> tuple[np.ndarray, Batch]:
    """Returns checked records, bad ones replaced, and their indices."""
    info, indices = self.info, np.array(places.indices)
    inputs = np.zeros((len(indices), *info.input_shape), info.input_dtype)
    labels = np.zeros(len(indices), info.label_dtype)
    for row, epoch in enumerate(places.epochs):
      key = int(epoch), int(indices[row])
      indices[row], inputs[row], labels[row] = self._good_record(*key)
    return indices, {info.input_key: inputs, 'label': labels}

  def _good_record(self, epoch: int, index: int) -> tuple[int, Any, int]:
    """Returns the record, or for a bad one a deterministic other record."""
    candidate = index
    for attempt in range(_MAX_REPLACEMENTS):
      try:
        return candidate, *self._read(epoch, candidate)
      except BadRecord as bad:
        place = bad.where or source.where(self.records, candidate)
        self._bad_records.add(bad, place, candidate)
        candidate = self._order.replacement(epoch, index, attempt)
    raise TooManyBadRecordsError(
      f'{_MAX_REPLACEMENTS} records in a row were bad, in place of record '
      f'{index}; the first of each kind: {self.bad_records}'
    )

  def _read(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
    record = self.records.record(index)
    label = check_label(record['label'], self.info.num_classes)
    value = record[self.info.input_key]
    if hasattr(self.records, 'transform'):
      key = self._order.seed, epoch, index
      rng = record_rng(*key) if self._augments else None
      value = self.records.transform(value, rng)
    check_input(value, self.info)
    return value, label


def padded(
  arrays: Mapping[str, np.ndarray],
  indices: Int[np.ndarray, ' R'],
  rows: int,
  padding: Mapping[str, int] = types.MappingProxyType({}),
) -> Batch:
  """Returns `rows` rows: the records, then rows with mask 0 and index -1.

  `padding` has what fills an array there, where it is not 0.
  """
  real = len(indices)
  mask, index = np.ones(real, np.float32), indices.astype(np.int32)
  batch = {**arrays, 'mask': mask, 'index': index}
  fill = {**padding, 'index': -1}
  for key, values in batch.items() if real < rows else ():
    shape = rows, *values.shape[1:]
    batch[key] = np.full(shape, fill.get(key, 0), values.dtype)
    batch[key][:real] = values
  return batch


def _concatenate(blocks: Sequence[Batch]) -> Batch:
  return {
    key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]
  }


def check_label(label: Any, num_classes: int) -> int:
  """Returns the label; BadRecord if not an integer in [0, num_classes - 1]."""
  is_integer = isinstance(label, (int, np.integer))
  is_integer = is_integer and not isinstance(label, bool)
  require(is_integer, 'wrong_dtype', f'label {label!r} is not an integer')
  message = f'label {label} not in [0, {num_classes - 1}]'
  require(0 <= label < num_classes, 'label_out_of_range', message)
  return int(label)


def check_input(value: np.ndarray, info: DatasetInfo) -> None:
  """Raises BadRecord for a wrong shape or dtype, or an unknown token id."""
  for kind, expected, given in (
    ('wrong_dtype', info.input_dtype, value.dtype),
    ('wrong_shape', info.input_shape, value.shape),
  ):
    require(given == expected, kind, f'expected {expected}, got {given}')
  if info.vocab_size:
    low, high, limit = value.min(), value.max(), info.vocab_size - 1
    message = f'token ids {low}..{high} not in [0, {limit}]'
    require(0 <= low <= high <= limit, 'token_out_of_range', message)
