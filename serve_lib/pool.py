"""Rows that wait: in the queue, or between two stages."""

import bisect
import collections
import concurrent.futures
import dataclasses
import itertools
import operator
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from serve_lib.chain import ClosedError, Group, OverloadedError, Row
from serve_lib.turns import Clock, Flow

SMALL = 8  # rows of a flow that overtakes the rest of a larger one
# Tokens of a batch, in those that take as long as reading all weights.
EFFICIENT = 8
PAUSE = 1.0  # seconds without small flows until large ones fill batches


class RequestQueue:
  """Accepted rows by group, bounded and thread-safe.

  A row is `pending` from `reserve`, before it is encoded, until it is answered.
  Callers get room in order, rows of several flows take turns by a `Clock`. The
  reentrant `lock` guards all that callers and worker share.
  """

  def __init__(self, max_pending: int):
    self.lock = threading.RLock()
    self._changed = threading.Condition(self.lock)
    self.changes = 0  # calls of `wake`
    self._freed = threading.Condition(self.lock)
    self._line: collections.deque[object] = collections.deque()
    self._max_pending, self._coming = max_pending, 0
    self._clock = Clock()
    self._came = {False: -PAUSE, True: -PAUSE}  # rows of large, small flows
    self.groups: dict[Group, list[Row]] = {}  # each in the order of turns
    self.has_cancelled = False  # rows that `purge` removes
    self.pending = self.peak_pending = 0
    self.is_closed = self.is_cancelled = False

  def rows(self, clear: bool = False) -> list[Row]:
    """Returns all rows, with `clear` removes them too."""
    with self.lock:
      rows = [row for queue in self.groups.values() for row in queue]
      if clear:
        self.groups.clear()
      return rows

  @property
  def is_expecting(self) -> bool:
    """True if callers have announced rows and there is room for one."""
    return self._coming > 0 and self.pending < self._max_pending

  @property
  def is_shared(self) -> bool:
    """True if small flows and large ones have come lately."""
    return time.monotonic() < min(self._came.values()) + PAUSE

  def wake(self, all_threads: bool = False) -> None:
    """Wakes a thread of the worker to look for work."""
    with self.lock:
      self.changes += 1
      self._changed.notify(2**30 if all_threads else 1)

  def wait(self, seen: int, timeout: float | None) -> None:
    """Waits until `changes` is no longer what was seen."""
    with self.lock:
      self._changed.wait_for(lambda: self.changes != seen, timeout)

  def expect(self, change: int) -> None:
    """Adds `change` to the number of rows that callers have announced."""
    with self.lock:
      self._coming += change
      if change < 0:
        self.wake()

  def reserve(self, wanted: int, timeout: float | None) -> int:
    """Reserves room for 1 to `wanted` rows; returns the number reserved."""
    ticket = object()

    def admitted() -> bool:
      is_next = self._line[0] is ticket and self.pending < self._max_pending
      return self.is_closed or is_next

    with self.lock:
      self._line.append(ticket)
      try:
        if not self._freed.wait_for(admitted, timeout):
          raise OverloadedError(
            f'engine.max_pending: {self._max_pending} rows are pending, and '
            f'none was answered in {timeout} s; send fewer, or wait longer'
          )
        if self.is_closed:
          raise ClosedError('the engine is closed; it accepts no items')
        granted = min(wanted, self._max_pending - self.pending)
        self.pending += granted
        self.peak_pending = max(self.peak_pending, self.pending)
        return granted
      finally:
        self._line.remove(ticket)
        if self._line:
          self._freed.notify_all()  # the next caller may have room too

  def release(self, future: concurrent.futures.Future) -> None:
    """Frees the room of a row that was answered or cancelled."""
    is_cancelled = future.cancelled()
    if is_cancelled:
      future.set_running_or_notify_cancel()  # for `concurrent.futures.wait`
    with self.lock:
      self.pending -= 1
      if is_cancelled:
        self.has_cancelled = True
        self.wake()
      if self._line:
        self._freed.notify_all()

  def put(self, rows: Sequence[Row], expected: int, flow: Flow) -> None:
    """Queues encoded rows; adds `expected` to the announced rows."""
    with self.lock:
      if self.is_closed:
        raise ClosedError('the engine was closed while the item was encoded')
      is_small = flow.rows <= SMALL
      self._came[is_small] = time.monotonic()
      turn = self._clock.start(flow, len(rows), SMALL * is_small)
      for number, row in enumerate(rows):
        row.turn, row.flow = turn + number, flow
        group = Group(0, row.encoded.variant, row.length)
        queue = self.groups.setdefault(group, [])
        bisect.insort(queue, row, key=operator.attrgetter('turn'))
      self._coming += expected
      self.wake()

  def purge(self) -> None:
    """Removes cancelled rows; the caller holds the lock."""
    self.has_cancelled = False
    groups = {group: wanted(rows) for group, rows in self.groups.items()}
    self.groups = {group: rows for group, rows in groups.items() if rows}

  def take(self, group: Group, limit: int) -> list[Row]:
    """Removes and returns up to `limit` rows; the caller holds the lock."""
    flows = {id(row.flow) for row in self.rows()}
    queue = self.groups[group]
    taken, queue[:limit] = queue[:limit], []
    if not queue:
      del self.groups[group]
    if taken:
      self._clock.serve(taken[-1].turn, len(taken) / len(flows))
    return taken

  def close(self, cancel: bool) -> None:
    """Accepts no rows from now on; wakes all waiting threads."""
    with self.lock:
      self.is_closed = True
      self.is_cancelled = self.is_cancelled or cancel
      self.wake(all_threads=True)
      self._freed.notify_all()


def wanted(rows: Sequence[Row]) -> list[Row]:
  """Returns the rows that were not cancelled."""
  return [row for row in rows if not row.future.cancelled()]


@dataclasses.dataclass(eq=False)
class Batch:
  """Rows that are, or will be, run together."""

  group: Group
  size: int  # batch bucket
  rows: list[Row]
  slots: Int[np.ndarray, ' b']  # index of each row in the carry; rest unused
  carry: Any = None
  outputs: Any = None  # of the stage, on the host; or its error
  bytes: int = 0  # of the carry, in an open batch

  def count_bytes(self) -> None:
    """Sets `bytes`."""
    self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.carry))


class Pool:
  """Rows between stages, on the device; used by one thread at a time.

  Every group has at most one open batch. The first join copies it to the full
  size; rows of joining batches are copied into its unused slots. `ready` holds
  at most one full batch per batch in flight.
  """

  def __init__(self, programs: Any, requests: RequestQueue):
    self._programs, self._grid = programs, programs.grid
    self._requests = requests
    self.open: dict[Group, Batch] = {}
    self.ready: collections.deque[Batch] = collections.deque()
    self.peak_bytes = self.copies = 0
    self._row_bytes = 0.0  # of the largest row so far

  def most(self, length: int) -> int:
    """Returns the rows of a length that may share a batch.

    Small requests wait for the batch that is being computed. So while there are
    any, batches are only as large as is efficient.
    """
    capacity, padding = self._grid.capacity, self._programs.padding
    if not padding or not self._requests.is_shared:
      return capacity
    return min(max(EFFICIENT * padding // length, 1), capacity)

  @property
  def groups(self) -> dict[Group, list[Row]]:
    """Rows in open batches, oldest first."""
    return {group: one.rows for group, one in list(self.open.items())}

  @property
  def bytes(self) -> int:
    """Memory of the open batches."""
    return sum(batch.bytes for batch in list(self.open.values()))

  @property
  def widest_bytes(self) -> int:
    """Most memory of the open batches that one finished batch can create.

    Without a compiled grid, that of a full batch of the largest rows so far.
    """
    measured = int(self._row_bytes * self._grid.capacity)
    return self._programs.widest_bytes or measured

  def add(self, batch: Batch) -> None:
    """Adds the remaining rows of a batch; its carry must not be shared.

    After an error `batch.rows` lists every row that is lost.
    """
    one, rest = self.open.get(batch.group, batch), None
    if one is not batch:
      one, rest = self.merge(one, batch)
    one.count_bytes()
    self._row_bytes = max(self._row_bytes, one.bytes / one.size)
    self.open[one.group] = one
    self.peak_bytes = max(self.peak_bytes, self.bytes)
    if len(one.rows) == self._grid.capacity:
      self.ready.append(self.open.pop(one.group))
    if rest is not None and rest.rows:
      rest.count_bytes()
      self.open[rest.group] = rest

  def merge(self, one: Batch, other: Batch) -> tuple[Batch, Batch | None]:
    """Copies rows into free slots of `one`; returns it, and the rest if any."""
    self._widen(one)
    capacity = self._grid.capacity
    free = np.setdiff1d(np.arange(capacity), one.slots)[: len(other.rows)]
    count = len(free)
    # The scatter of 'join' ignores an index >= capacity.
    places = np.full(other.size, capacity, np.int32)
    places[other.slots[:count]] = free
    key = 'join', one.group, (other.size, capacity)
    self.copies += 1
    try:
      one.carry = self._programs.copy(*key, one.carry, other.carry, places)
    except Exception:
      other.rows += self.open.pop(one.group).rows  # their carry is consumed
      raise
    one.rows = one.rows + other.rows[:count]
    one.slots = np.append(one.slots, free)
    rest = other.rows[count:], other.slots[count:]
    return one, Batch(other.group, other.size, *rest, other.carry)

  def shrink(self, batch: Batch) -> None:
    """Copies a batch to the smallest size that holds its rows."""
    size = self._grid.fit_rows(len(batch.rows))
    if size < batch.size:
      self._widen(batch)  # there are programs from and to the full size
      self.copy(batch, size)

  def copy(self, batch: Batch, size: int = 0) -> None:
    """Copies the rows into the first of `size` slots, by default of all."""
    size = size or self._slots(batch)
    # Unused slots repeat one, usually of a finished row: a chain may stop early
    # when all rows are done.
    left = np.setdiff1d(np.arange(batch.size), batch.slots)
    source = np.full(size, (*left, *batch.slots)[0], np.int32)
    source[: len(batch.rows)] = batch.slots
    self.copies += 1
    batch.carry = self._programs.copy(
      'gather', batch.group, (batch.size, size), batch.carry, source
    )
    batch.size, batch.slots = size, np.arange(len(batch.rows), dtype=np.int32)

  def purge(self) -> None:
    """Removes cancelled rows."""
    for batch in (*self.open.values(), *self.ready):
      kept = [not row.future.cancelled() for row in batch.rows]
      batch.slots = batch.slots[np.array(kept, bool)]
      batch.rows = [*itertools.compress(batch.rows, kept)]
    self.open = {key: one for key, one in self.open.items() if one.rows}
    self.ready = collections.deque(one for one in self.ready if one.rows)

  def clear(self) -> list[Row]:
    """Removes and returns all rows."""
    batches = [*self.open.values(), *self.ready]
    self.open.clear()
    self.ready.clear()
    return [row for batch in batches for row in batch.rows]

  def _slots(self, batch: Batch) -> int:
    """Returns the size from and to which batches are copied."""
    return self._grid.capacity

  def _widen(self, batch: Batch) -> None:
    if batch.size < self._slots(batch):
      self.copy(batch)


class HostPool(Pool):
  """Rows between stages in the memory of the host, in batches of any size."""

  def merge(self, one: Batch, other: Batch) -> tuple[Batch, Batch | None]:
    """Returns a batch of the rows of two; see `Pool`.

    If they are too many, `one`, which has waited for longer, is ready to run.
    """
    length = max(one.group, other.group).length
    if len(one.rows) + len(other.rows) > self.most(length):
      self.ready.append(one)
      return other, None
    return self.gathered([one, other]), None

  def gathered(self, batches: Sequence[Batch]) -> Batch:
    """Returns a batch of the rows of several, padded to the longest."""
    rows = [row for one in batches for row in one.rows]
    self.copies += 1
    carries = [one.carry for one in batches]
    carry = self._programs.merge(carries, [one.slots for one in batches])
    group = max(one.group for one in batches)
    for row in rows:
      row.length = group.length
    slots = np.arange(len(rows), dtype=np.int32)
    return Batch(group, len(rows), rows, slots, carry)

  def _slots(self, batch: Batch) -> int:
    return len(batch.rows)
