"""Rows that wait: accepted ones for stage 0, others between two stages.

`Intake` queues encoded rows on the host. `Pool` holds rows between stages on
the device, compacted: for every key at most one open batch of the full size.
Rows that continue are copied into its next free slots, once. A full batch runs
as it is; one that runs earlier is sliced to the next batch bucket. Free slots
repeat another row, so that padding is always legal.
"""

import collections
import dataclasses
import threading
from typing import Any

import numpy as np
from jaxtyping import Int

from serve_lib.chain import ClosedError, OverloadedError, Row
from serve_lib.programs import Programs
from serve_lib.schedule import Grid, Key, Waiting


class Intake:
  """Queues of accepted rows, bounded and thread-safe.

  A row is pending from `reserve`, before it is encoded, until it is answered.
  Callers that wait for room are served in order, so that a long list does not
  keep a single request out.

  Attributes:
    lock: reentrant; guards all state that callers and worker share.
    arrived: notified when the worker may have work.
    pending: rows accepted and not answered.
    peak_pending: largest value of `pending`.
    queue_bytes: host memory of the queued inputs.
    coming: rows that callers in the middle of a list will still add.
    is_closed: no more rows are accepted.
    is_cancelled: pending rows are to be dropped.
  """

  def __init__(self, max_pending: int):
    self.lock = threading.RLock()
    self.arrived = threading.Condition(self.lock)
    self._freed = threading.Condition(self.lock)
    self._line: collections.deque[object] = collections.deque()
    self._queues: dict[Key, collections.deque[Row]] = {}
    self._max_pending = max_pending
    self.pending = self.peak_pending = self.queue_bytes = self.coming = 0
    self.is_closed = self.is_cancelled = False

  @property
  def rows(self) -> int:
    """Rows that wait for stage 0."""
    with self.lock:
      return sum(map(len, self._queues.values()))

  @property
  def is_expecting(self) -> bool:
    """True if a caller is about to add rows and there is room for them."""
    return self.coming > 0 and self.pending < self._max_pending

  def expect(self, change: int) -> None:
    """Changes the number of rows that are about to be added."""
    with self.lock:
      self.coming += change
      if change < 0:
        self.arrived.notify_all()

  def reserve(
    self, wanted: int, timeout: float | None = None, block: bool = True
  ) -> int:
    """Reserves room for up to `wanted` rows; returns for how many, at least 1.

    Waits at most `timeout` seconds, not at all if `block` is False.

    Raises:
      OverloadedError: there was no room in time.
      ClosedError: the engine is or was closed meanwhile.
    """
    ticket = object()

    def admitted() -> bool:
      is_next = self._line[0] is ticket and self.pending < self._max_pending
      return self.is_closed or is_next

    with self.lock:
      self._line.append(ticket)
      try:
        if not self._freed.wait_for(admitted, timeout if block else 0):
          raise OverloadedError(
            f'engine.max_pending: {self._max_pending} rows are pending and '
            f'none was answered in time (timeout={timeout}); send fewer at a '
            'time, or wait longer'
          )
        if self.is_closed:
          raise ClosedError('the engine is closed; it accepts no items')
        granted = min(wanted, self._max_pending - self.pending)
        self.pending += granted
        self.peak_pending = max(self.peak_pending, self.pending)
        return granted
      finally:
        self._line.remove(ticket)
        self._freed.notify_all()  # the next caller may have room too

  def release(self, rows: int) -> None:
    """Frees the room of rows that were answered or not put."""
    with self.lock:
      self.pending -= rows
      self._freed.notify_all()

  def put(self, rows: list[Row]) -> None:
    """Queues encoded rows.

    Raises:
      ClosedError: the engine was closed after room was reserved for them.
    """
    with self.lock:
      if self.is_closed:
        raise ClosedError('the engine was closed while the item was encoded')
      # First, as it fails on inputs that are no arrays.
      self.queue_bytes += sum(map(_input_bytes, rows))
      for row in rows:
        key = Key(0, row.encoded.variant, row.length)
        self._queues.setdefault(key, collections.deque()).append(row)
      self.arrived.notify_all()

  def waiting(self) -> list[Waiting]:
    """Returns the queues for `schedule.choose`; call it with the lock held."""
    return [
      Waiting(key, len(queue), queue[0].since)
      for key, queue in self._queues.items()
      if queue
    ]

  def take(self, key: Key, rows: int) -> list[Row]:
    """Removes and returns up to `rows` rows, oldest first."""
    with self.lock:
      queue = self._queues[key]
      taken = [queue.popleft() for _ in range(min(rows, len(queue)))]
      self.queue_bytes -= sum(map(_input_bytes, taken))
      return taken

  def clear(self) -> list[Row]:
    """Removes and returns all rows."""
    with self.lock:
      queues = [(key, len(queue)) for key, queue in self._queues.items()]
      return [row for key, count in queues for row in self.take(key, count)]

  def close(self, cancel: bool) -> None:
    """Accepts no rows from now on; wakes all waiting threads."""
    with self.lock:
      self.is_closed = True
      self.is_cancelled = self.is_cancelled or cancel
      self.arrived.notify_all()
      self._freed.notify_all()


def _input_bytes(row: Row) -> int:
  arrays = row.encoded.inputs.values()
  return sum(int(getattr(array, 'nbytes', 0)) for array in arrays)


@dataclasses.dataclass
class Batch:
  """Rows that are, or will be, run together.

  Attributes:
    key: their next stage, its variant and length.
    size: the batch bucket.
    rows: the rows, without padding.
    slots: index of each row in the batch.
    carry: device arrays, rows first; None before stage 0.
  """

  key: Key
  size: int
  rows: list[Row]
  slots: Int[np.ndarray, ' b']
  carry: Any = None


@dataclasses.dataclass
class _Open:
  """The open batch of a key, filled from slot 0 on."""

  carry: Any
  rows: list[Row]


class Pool:
  """The open batches of all keys; used by one thread.

  Attributes:
    peak_bytes: largest value of `bytes`.
  """

  def __init__(self, programs: Programs, grid: Grid):
    self._programs = programs
    self._grid = grid
    self._open: dict[Key, _Open] = {}
    self.peak_bytes = 0

  @property
  def rows(self) -> int:
    """Rows in the pool."""
    return sum(len(one.rows) for one in list(self._open.values()))

  @property
  def bytes(self) -> int:
    """Device memory of the open batches, free slots included."""
    return sum(map(self._programs.batch_bytes, list(self._open)))

  def waiting(self) -> list[Waiting]:
    """Returns the open batches for `schedule.choose`."""
    return [
      Waiting(key, len(one.rows), one.rows[0].since)
      for key, one in self._open.items()
    ]

  def __contains__(self, key: Key) -> bool:
    return key in self._open

  def add(self, batch: Batch) -> Batch | None:
    """Copies the rows of a batch into the open batch of its key.

    Returns:
      The open batch if it is full now, removed from the pool.
    """
    key, capacity = batch.key, self._grid.capacity
    one, rest = self._open.get(key), None
    if one is None:
      self._open[key] = one = self._start(batch, 0)
    else:
      room = capacity - len(one.rows)
      one.carry = self._join(batch, one, room)
      # Before the rows are added: if it fails, `discard` still finds them all.
      rest = self._start(batch, room) if len(batch.rows) > room else None
      one.rows = one.rows + batch.rows[:room]
    self.peak_bytes = max(self.peak_bytes, self.bytes)
    if len(one.rows) < capacity:
      return None
    del self._open[key]
    if rest is not None:
      self._open[key] = rest
    return self._whole(key, one)

  def take(self, key: Key) -> Batch:
    """Removes the rows of a key, as the smallest batch that holds them."""
    one = self._open[key]
    batch = self._whole(key, one)
    size = self._grid.fit_rows(len(one.rows))
    if size < batch.size:
      batch.carry = self._programs.copy('cut', key, size, one.carry)
      batch.size = size
    del self._open[key]
    return batch

  def discard(self, key: Key) -> list[Row]:
    """Removes and returns the rows of a key."""
    one = self._open.pop(key, None)
    return [] if one is None else one.rows

  def clear(self) -> list[Row]:
    """Removes and returns all rows."""
    return [row for key in list(self._open) for row in self.discard(key)]

  def _start(self, batch: Batch, first: int) -> _Open:
    """Starts an open batch with the rows of `batch` from `first` on."""
    slots = batch.slots[first:]
    # Free slots hold a row that has left, if there is one: a chain may stop
    # early when all rows are done.
    done = np.setdiff1d(np.arange(batch.size), batch.slots)
    filler = done[0] if len(done) else slots[0]
    source = np.full(self._grid.capacity, filler, np.int32)
    source[: len(slots)] = slots
    carry = self._programs.copy(
      'open', batch.key, batch.size, batch.carry, source
    )
    return _Open(carry, batch.rows[first:])

  def _join(self, batch: Batch, one: _Open, room: int) -> Any:
    """Returns the carry of `one` with up to `room` rows of `batch` added."""
    slots = batch.slots[:room]
    # The program drops rows whose place is outside of the open batch.
    places = np.full(batch.size, self._grid.capacity, np.int32)
    start = len(one.rows)
    places[slots] = np.arange(start, start + len(slots))
    return self._programs.copy(
      'join', batch.key, batch.size, one.carry, batch.carry, places
    )

  def _whole(self, key: Key, one: _Open) -> Batch:
    slots = np.arange(len(one.rows), dtype=np.int32)
    return Batch(key, self._grid.capacity, one.rows, slots, one.carry)
