"""The door: rows that have been accepted and wait for stage 0.

At most so many rows are pending at a time, from the moment before they are
encoded until they are answered; who brings more waits, in the order of
arrival, so that one long list does not keep a single request out.
"""

import collections
import threading

from serve_lib.buckets import Key
from serve_lib.chain import ClosedError, OverloadedError, Row
from serve_lib.schedule import Waiting


class Intake:
  """Bounded and thread-safe; its lock guards all that callers share.

  Attributes:
    lock: reentrant.
    arrived: notified when there may be something to do for the worker.
    pending: rows accepted and not answered.
    peak_pending: the most there ever were.
    queue_bytes: host memory of the inputs that wait here.
    coming: rows that callers in the middle of a longer list will bring.
    is_closed: nothing more is accepted.
    is_cancelled: what is pending is not wanted any more.
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
    """More rows are on their way and there is room for them."""
    return self.coming > 0 and self.pending < self._max_pending

  def expect(self, change: int) -> None:
    """Counts rows that are on their way."""
    with self.lock:
      self.coming += change
      if change < 0:
        self.arrived.notify_all()  # nobody need wait for them

  def reserve(
    self, wanted: int, timeout: float | None = None, block: bool = True
  ) -> int:
    """Makes room for rows before they are encoded.

    Args:
      wanted: how many rows there are, at least 1.
      timeout: seconds to wait for room; None for as long as it takes.
      block: False to raise at once if there is no room.

    Returns:
      For how many there is room, at least 1; to be put or released.

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
            f'none was answered in time (timeout={timeout}); send less at a '
            'time, or wait longer'
          )
        if self.is_closed:
          raise ClosedError('the engine is closed; it accepts nothing more')
        granted = min(wanted, self._max_pending - self.pending)
        self.pending += granted
        self.peak_pending = max(self.peak_pending, self.pending)
        return granted
      finally:
        self._line.remove(ticket)
        self._freed.notify_all()  # the next in the line may have room too

  def release(self, rows: int) -> None:
    """Gives room back: rows were answered, or never came."""
    with self.lock:
      self.pending -= rows
      self._freed.notify_all()

  def put(self, rows: list[Row]) -> None:
    """Queues encoded rows.

    Raises:
      ClosedError: the engine has been closed since room was made for them.
    """
    with self.lock:
      if self.is_closed:
        raise ClosedError('the engine was closed while the item was encoded')
      # First: should the inputs be no arrays, nothing has been queued.
      self.queue_bytes += sum(map(_input_bytes, rows))
      for row in rows:
        key = Key(0, row.encoded.variant, row.length)
        self._queues.setdefault(key, collections.deque()).append(row)
      self.arrived.notify_all()

  def waiting(self) -> list[Waiting]:
    """The queues, for `schedule.choose`; call it with the lock held."""
    return [
      Waiting(key, len(queue), queue[0].since)
      for key, queue in self._queues.items()
      if queue
    ]

  def take(self, key: Key, rows: int) -> list[Row]:
    """Takes up to so many of the rows that have waited longest."""
    with self.lock:
      queue = self._queues[key]
      taken = [queue.popleft() for _ in range(min(rows, len(queue)))]
      self.queue_bytes -= sum(map(_input_bytes, taken))
      return taken

  def clear(self) -> list[Row]:
    """Takes everything."""
    with self.lock:
      return [
        row
        for key, queue in self._queues.items()
        for row in self.take(key, len(queue))
      ]

  def close(self, cancel: bool) -> None:
    """Accepts nothing from now on; wakes everybody who waits."""
    with self.lock:
      self.is_closed = True
      self.is_cancelled = self.is_cancelled or cancel
      self.arrived.notify_all()
      self._freed.notify_all()


def _input_bytes(row: Row) -> int:
  return sum(
    int(getattr(array, 'nbytes', 0)) for array in row.encoded.inputs.values()
  )
