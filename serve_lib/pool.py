"""Rows that wait: accepted ones on the host, others between two stages."""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from serve_lib.chain import ClosedError, OverloadedError, Row
from serve_lib.grid import Group
from serve_lib.programs import Programs


class RequestQueue:
  """Accepted rows by group, bounded and thread-safe.

  A row is `pending` from `reserve`, before it is encoded, until it is answered.
  Callers that wait for room are served in order. The reentrant `lock` guards
  all that callers and worker share; `arrived` tells the worker of work.
  """

  def __init__(self, max_pending: int):
    self.lock = threading.RLock()
    self.arrived = threading.Condition(self.lock)
    self._freed = threading.Condition(self.lock)
    self._line: collections.deque[object] = collections.deque()
    self._max_pending, self._coming = max_pending, 0
    self.groups: dict[Group, collections.deque[Row]] = {}
    self.pending = self.peak_pending = 0
    self.is_closed = self.is_cancelled = False

  def rows(self) -> list[Row]:
    """Returns all rows."""
    with self.lock:
      return [row for queue in self.groups.values() for row in queue]

  @property
  def is_expecting(self) -> bool:
    """True if a caller is about to add rows and there is room for them."""
    return self._coming > 0 and self.pending < self._max_pending

  def expect(self, change: int) -> None:
    """Changes the number of rows that callers amid a list will still add."""
    with self.lock:
      self._coming += change
      if change < 0:
        self.arrived.notify_all()

  def reserve(self, wanted: int, timeout: float | None) -> int:
    """Reserves room for 1 to `wanted` rows; returns for how many."""
    ticket = object()

    def admitted() -> bool:
      is_next = self._line[0] is ticket and self.pending < self._max_pending
      return self.is_closed or is_next

    with self.lock:
      self._line.append(ticket)
      try:
        if not self._freed.wait_for(admitted, timeout):
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

  def put(self, rows: Sequence[Row]) -> None:
    """Queues encoded rows, unless the engine was closed meanwhile."""
    with self.lock:
      if self.is_closed:
        raise ClosedError('the engine was closed while the item was encoded')
      for row in rows:
        group = Group(0, row.encoded.variant, row.length)
        self.groups.setdefault(group, collections.deque()).append(row)
      self.arrived.notify_all()

  def take(self, group: Group, limit: int) -> list[Row]:
    """Removes and returns up to `limit` rows."""
    with self.lock:
      queue = self.groups[group]
      taken = [queue.popleft() for _ in range(min(limit, len(queue)))]
      if not queue:
        del self.groups[group]
      return taken

  def clear(self) -> list[Row]:
    """Removes and returns all rows."""
    with self.lock:
      rows = self.rows()
      self.groups.clear()
      return rows

  def close(self, cancel: bool) -> None:
    """Accepts no rows from now on; wakes all waiting threads."""
    with self.lock:
      self.is_closed = True
      self.is_cancelled = self.is_cancelled or cancel
      self.arrived.notify_all()
      self._freed.notify_all()


@dataclasses.dataclass
class Batch:
  """Rows that are, or will be, run together."""

  group: Group
  size: int  # batch bucket
  rows: list[Row]
  slots: Int[np.ndarray, ' b']  # of the rows in the carry; others repeat a row
  carry: Any = None
  outputs: Any = None  # of the stage while it runs


class Pool:
  """Rows between stages, on the device, compacted; used by one thread.

  Every group has at most one open batch, of the full size. Rows that continue
  are copied into its next free slots, once. `ready` has at most a full batch
  for each batch in flight, which bounds the memory.
  """

  def __init__(self, programs: Programs):
    self._programs, self._grid = programs, programs.grid
    self._open: dict[Group, Batch] = {}
    self.ready: collections.deque[Batch] = collections.deque()
    self.peak_bytes = 0

  @property
  def groups(self) -> dict[Group, list[Row]]:
    """Rows in open batches, oldest first."""
    return {group: one.rows for group, one in list(self._open.items())}

  @property
  def bytes(self) -> int:
    """Device memory of the open batches, free slots included."""
    return sum(map(self._programs.batch_bytes, list(self._open)))

  def add(self, batch: Batch, is_alone: bool) -> None:
    """Adds the rows of a batch that continue.

    Without a copy if they fill the batch, or if no smaller one holds them and
    no other rows could join (`is_alone`).
    """
    group, count, capacity = batch.group, len(batch.rows), self._grid.capacity
    one, rest = self._open.get(group), None
    if one is None:
      is_smallest = self._grid.fit_rows(count) == batch.size
      if count == capacity or (is_alone and is_smallest):
        self.ready.append(batch)
        return
      self._open[group] = one = self._start(batch, 0)
    else:
      room = capacity - len(one.rows)
      one.carry = self._join(batch, one, room)
      # Before the rows are added: if it fails, `take` still finds them all.
      rest = self._start(batch, room) if count > room else None
      one.rows = one.rows + batch.rows[:room]
      one.slots = np.arange(len(one.rows), dtype=np.int32)
    self.peak_bytes = max(self.peak_bytes, self.bytes)
    if len(one.rows) == capacity:
      self.ready.append(self._open.pop(group))
    if rest is not None:
      self._open[group] = rest

  def take(self, group: Group) -> Batch:
    """Removes and returns the open batch of a group, for `shrink`."""
    return self._open.pop(group)

  def shrink(self, batch: Batch) -> None:
    """Slices a batch to the smallest size that holds its rows."""
    size = self._grid.fit_rows(len(batch.rows))
    if size < batch.size:
      batch.carry = self._programs.copy('cut', batch.group, size, batch.carry)
      batch.size = size

  def clear(self) -> list[Row]:
    """Removes and returns all rows."""
    batches = [*self._open.values(), *self.ready]
    self._open.clear()
    self.ready.clear()
    return [row for batch in batches for row in batch.rows]

  def _start(self, batch: Batch, first: int) -> Batch:
    """Starts an open batch with the rows of `batch` from `first` on."""
    group, capacity = batch.group, self._grid.capacity
    slots, rows = batch.slots[first:], batch.rows[first:]
    # Free slots hold a row that has left, if there is one: a chain may stop
    # early when all rows are done.
    left = np.setdiff1d(np.arange(batch.size), batch.slots)
    source = np.full(capacity, (*left, *slots)[0], np.int32)
    source[: len(slots)] = slots
    carry = self._programs.copy('open', group, batch.size, batch.carry, source)
    places = np.arange(len(rows), dtype=np.int32)
    return Batch(group, capacity, rows, places, carry)

  def _join(self, batch: Batch, one: Batch, room: int) -> Any:
    """Returns the carry of `one` with up to `room` rows of `batch` added."""
    slots, carries = batch.slots[:room], (one.carry, batch.carry)
    # The program drops rows whose place is outside of the open batch.
    places = np.full(batch.size, self._grid.capacity, np.int32)
    places[slots] = len(one.rows) + np.arange(len(slots))
    return self._programs.copy(
      'join', batch.group, batch.size, *carries, places
    )
