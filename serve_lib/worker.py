"""The threads that choose batches, run them and answer rows.

Each thread chooses a batch, runs it and answers its rows; all but running is
done by one thread at a time. With two batches at once on a CPU, element-wise
operations of one are computed during products of the other. Each batch needs a
thread, as XLA's CPU client runs the calls of one thread one after the other.
"""

import collections
import dataclasses
import logging
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from serve_lib.chain import (
  WEIGHTS,
  ClosedError,
  Failure,
  Group,
  Policy,
  Row,
)
from serve_lib.monitor import Monitor, shielded
from serve_lib.pool import Batch, Pool, RequestQueue


@dataclasses.dataclass(eq=False)
class Worker:
  """Runs rows through the chain; see `Engine` for the arguments."""

  policy: Policy
  programs: Any  # `Programs` or `OnnxStages`
  requests: RequestQueue
  monitor: Monitor
  max_wait: float
  ahead: int
  streams: int
  max_pool_bytes: int

  def __post_init__(self):
    self.pool = Pool(self.programs)
    self.num_threads = self.streams if self.streams > 1 else 1 + self.ahead
    self._turn = threading.Lock()  # guards all that the threads share
    self._flights: list[Batch] = []  # dispatched
    self._chosen: collections.deque[Batch] = collections.deque()  # not yet run
    self._retried: collections.deque[Row] = collections.deque()

  def run(self) -> None:
    """Serves until the engine is closed; called by each of `num_threads`."""
    try:
      while self._step():
        pass
    except BaseException as error:
      # Log text, because a stored traceback would keep the rows alive.
      text = traceback.format_exc()
      logging.getLogger(__name__).error('a defect of the engine\n%s', text)
      self.requests.close(cancel=True)
      with self._turn:
        self._clear(error, 'engine')

  def _step(self) -> bool:
    """Runs a batch, or waits for one; returns False at the end.

    No local reference to a batch survives a call.
    """
    seen = self.requests.changes
    with self._turn:
      batch = self._take()
      if batch is None:
        waiting = self._waiting()
        closed = self.requests.is_closed and not waiting
        if closed and not self._flights:
          self.requests.wake()  # the other threads end too
          return False
        patience = self._patience(waiting)
    if batch is None:
      self.requests.wait(seen, patience)
      return True
    try:
      batch.carry, outputs = self.programs.run(
        batch.group, batch.size, batch.carry, batch.rows[0].alone
      )
      batch.outputs = {k: np.asarray(one) for k, one in outputs.items()}
    except Exception as error:
      batch.outputs = error
    with self._turn:
      self._finish(batch)
      self._flights = [one for one in self._flights if one is not batch]
    return True

  def _take(self) -> Batch | None:
    """Returns a batch to run now, and wakes a thread if there are others."""
    if self.requests.is_cancelled:
      closed = ClosedError('the engine was closed before the answer')
      self._clear(closed, 'close')
    while not self._chosen:  # a batch that cannot be padded is not chosen
      with self.requests.lock:
        batches = self._next()
      if not batches:
        return None
      for one in batches:
        self._dispatch(one)
    batch = self._chosen.popleft()
    others = self._chosen, self._retried, self.pool.ready, self.pool.open
    if self.num_threads > 1 and (any(others) or self.requests.groups):
      self.requests.wake()
    return batch

  def _waiting(self) -> dict[Group, Sequence[Row]]:
    return {**self.requests.groups, **self.pool.groups}

  def _patience(self, waiting: Mapping[Group, Sequence[Row]]) -> float | None:
    """Returns seconds until a row has waited for `max_wait`, None for never."""
    now = time.monotonic() - self.max_wait
    left = [rows[0].since - now for rows in waiting.values()]
    return min((one + 1e-3 for one in left if one > 0), default=None)

  def _next(self) -> list[Batch]:
    """Returns the batches to run next; none to wait. Needs the lock."""
    if len(self._flights) >= self.num_threads:
      return []
    if self._retried:
      return [self._alone(self._retried.popleft())]
    if self.pool.ready:
      return self._split(self.pool.ready.popleft())
    if not (group := self._choose(self._waiting())):
      return []
    near = self._near(group) if self.programs.resizes else []
    if group.stage > 0:
      batch = self.pool.open.pop(group)
      for other in near:
        one = self.pool.open.pop(other)
        try:
          batch = self.pool.merge(batch, one)
        except Exception as error:
          self._retry(one.rows, error, group.stage)
      return self._split(batch)
    rows = self.requests.take(group, self.programs.grid.capacity)
    for other in near:
      room = self.programs.grid.capacity - len(rows)
      rows += self.requests.take(other, room)
      group = max(group, other)
    if len(rows) == 1:
      return [self._alone(rows[0])]
    slots = np.arange(len(rows), dtype=np.int32)
    size = self.programs.grid.fit_rows(len(rows))
    return self._split(Batch(group, size, rows, slots))

  def _near(self, group: Group) -> list[Group]:
    """Returns groups whose rows join a batch of other lengths.

    They do if padding costs less than it does to read the weights once more.
    """
    waiting, found = self._waiting(), []
    count, length = len(waiting[group]), group.length
    others = [g for g in waiting if g[:2] == group[:2] and g != group]
    for other in sorted(others, key=lambda g: abs(g.length - group.length)):
      rows, longer = len(waiting[other]), max(length, other.length)
      room = self.programs.grid.capacity - count
      if group.stage == 0:  # they can be taken one by one
        rows = min(rows, room)
      padding = count * (longer - length) + rows * (longer - other.length)
      if padding <= WEIGHTS and 0 < rows <= room:
        found.append(other)
        count, length = count + rows, longer
    return found

  def _alone(self, row: Row) -> Batch:
    """Returns a batch of one row, which goes on without joining others."""
    grid, encoded, row.alone = self.programs.grid, row.encoded, True
    row.length = grid.fit_length(encoded.length)
    group = Group(0, encoded.variant, row.length)
    return Batch(group, grid.fit_rows(1), [row], np.zeros(1, np.int32))

  def _split(self, batch: Batch) -> list[Batch]:
    """Splits a batch into one part for each idle stream.

    A batch between stages is split if it is stored at the full size, from which
    there are programs that copy.
    """
    grid, parts = self.programs.grid, self.streams - len(self._flights)
    count, stored = len(batch.rows), batch.group.stage > 0
    if parts < 2 or count < 2 or self.pool.ready:
      return [batch]
    smaller = grid.fit_rows(-(-count // parts)) < grid.capacity == batch.size
    if stored and not smaller:
      return [batch]
    result = []
    for numbers in np.array_split(np.arange(count), min(parts, count)):
      rows = [batch.rows[number] for number in numbers]
      size = batch.size if stored else grid.fit_rows(len(rows))
      slots = batch.slots[numbers] if stored else batch.slots[: len(rows)]
      result.append(Batch(batch.group, size, rows, slots, batch.carry))
    return result

  def _choose(self, waiting: Mapping[Group, Sequence[Row]]) -> Group | None:
    """Returns the group whose rows run next, or None to wait.

    The first rule that applies:

    1. Near the limit of the pool: batches in flight finish first, then the
       pooled rows that have waited longest run.
    2. Rows that have waited in one group longer than `max_wait`, oldest first.
       (`since` restarts at each stage; otherwise pooled rows would always be
       older than queued ones, and in a backlog run one or two at a time.)
    3. A full batch of the latest stage: it frees memory.
    4. None while a caller is adding rows; else the oldest partial batch of the
       earliest stage, as its remaining rows fill the later pools. It waits for
       batches in flight of earlier stages, whose rows may join it.

    A partial batch waits while no stream is idle.
    """
    if not waiting:
      return None
    is_calm = not self._flights and not self.requests.is_expecting
    if is_calm and len(waiting) == 1:  # what the rules come to, in no time
      return next(iter(waiting))
    deadline = time.monotonic() - self.max_wait
    capacity = self.programs.grid.capacity
    pooled = [group for group in waiting if group.stage > 0]
    late = [group for group in waiting if waiting[group][0].since < deadline]
    flights = [one.group for one in self._flights if not one.rows[0].alone]
    full = [group for group in waiting if len(waiting[group]) >= capacity]
    if (pooled or self._flights) and self._is_crowded():
      found = [] if self._flights else pooled
    elif late:
      found = late
    elif full:
      found = [group for group in full if group.stage == max(full).stage]
    elif self.requests.is_expecting:
      found = []
    else:
      found = [
        group for group in waiting
        if not any(x.stage < group.stage and x.variant == group.variant
                   for x in flights)
      ]  # fmt: skip
      found = [group for group in found if group.stage == min(found).stage]
    # The group makes equal ages deterministic.
    oldest = min(found, key=lambda g: (waiting[g][0].since, g), default=None)
    is_idle = len(self._flights) < self.streams
    return oldest if is_idle or oldest in full else None

  def _is_crowded(self) -> bool:
    """Returns True if one more batch could exceed `max_pool_bytes`."""
    if not self.max_pool_bytes:
      return False
    opened = (len(self._flights) + 1) * self.programs.widest_bytes
    return self.pool.bytes + opened > self.max_pool_bytes

  def _dispatch(self, batch: Batch) -> None:
    group = batch.group
    try:
      if group.stage == 0:
        inputs = [row.encoded.inputs for row in batch.rows]
        batch.carry = self.programs.chain.pad(inputs, group.length, batch.size)
      else:
        self.pool.shrink(batch)
    except Exception as error:
      self._retry(batch.rows, error, group.stage)
      return
    self._flights.append(batch)
    self._chosen.append(batch)
    self.monitor.record_batch(group.stage, len(batch.rows), batch.size)

  def _finish(self, batch: Batch) -> None:
    """Moves the rows that stay and answers the others."""
    try:
      if isinstance(batch.outputs, BaseException):
        raise batch.outputs
      stays = self._stays(batch, batch.outputs)
    except Exception as error:
      batch.outputs = None
      self._retry(batch.rows, error, batch.group.stage)
      return
    if stays.any():
      self._go_on(batch, stays)
    pairs = zip(batch.rows, stays, strict=True)
    self._resolve([(row, self._answer(row)) for row, stay in pairs if not stay])

  def _retry(self, rows: Sequence[Row], error: Exception, stage: int) -> None:
    """Runs the rows of a batch that failed again, each alone.

    So a row that breaks its batch costs the others time and no answer. A batch
    whose carry was consumed can only start again from the inputs.
    """
    if len(rows) == 1:
      self._fail(rows, error, f'stage {stage}')
      return
    for row in rows:
      row.outputs.clear()
    self._retried.extend(rows)

  def _stays(self, batch: Batch, outputs: Any) -> Bool[np.ndarray, ' b']:
    """Returns True for the rows that stay; sets their length buckets."""
    values = {k: array[batch.slots] for k, array in outputs.items()}
    for number, row in enumerate(batch.rows):
      row.outputs.append({k: array[number] for k, array in values.items()})
    if batch.group.stage == self.programs.chain.num_stages - 1:
      return np.zeros(len(batch.rows), bool)
    exits = self.policy.decide(batch.group.stage, batch.rows, values)
    exits = np.asarray(exits, bool)
    if exits.shape != batch.slots.shape:
      expected = 'policy.decide: expected one for each row'
      raise ValueError(f'{expected}, got {exits}')
    if 'length' in values:
      for row, length in zip(batch.rows, values['length'], strict=True):
        row.length = self.programs.grid.fit_length(int(length))
    return ~exits

  def _go_on(self, batch: Batch, stays: Bool[np.ndarray, ' b']) -> None:
    """Moves the rows that stay to the next stage, by length bucket."""
    now, group = time.monotonic(), batch.group
    if batch.rows[0].alone:
      (row,) = batch.rows
      row.since = now
      group = Group(group.stage + 1, group.variant, row.length)
      batch = Batch(group, batch.size, [row], batch.slots, batch.carry)
      self.pool.ready.append(batch)
      return
    lengths = np.array([row.length for row in batch.rows])
    if self.programs.resizes:  # all have the same padding
      lengths[:] = batch.group.length
    buckets = np.unique(lengths[stays]).tolist()
    for length in buckets:
      group = Group(batch.group.stage + 1, batch.group.variant, length)
      numbers = np.flatnonzero(stays & (lengths == length))
      rows = [batch.rows[number] for number in numbers]
      for row in rows:
        row.since = now
      slots = batch.slots[numbers]
      moved = Batch(group, batch.size, rows, slots, batch.carry)
      try:
        if len(buckets) > 1:  # several groups use the carry
          self.pool.copy(moved, self.programs.grid.capacity)
        self.pool.add(moved)
      except Exception as error:
        self._retry(moved.rows, error, group.stage)

  def _answer(self, row: Row) -> Any:
    try:
      return self.policy.answer(row)
    except Exception as error:
      return Failure.of(error, 'answer')

  def _clear(self, error: BaseException, during: str) -> None:
    """Fails all waiting rows and, after an engine error, rows in flight."""
    rows = [*self.requests.rows(clear=True), *self.pool.clear()]
    rows += self._retried
    self._retried.clear()
    if during == 'engine':
      rows += [row for batch in self._flights for row in batch.rows]
      self._flights.clear()
      self._chosen.clear()
    self._fail(rows, error, during)

  def _fail(
    self, rows: Sequence[Row], error: BaseException, during: str
  ) -> None:
    """Answers rows with a failure."""
    failure = Failure.of(error, during)
    self._resolve([(row, failure) for row in rows])

  def _resolve(self, answers: Sequence[tuple[Row, Any]]) -> None:
    """Answers the rows that have no answer yet (after a defect), frees room."""
    if not answers:
      return
    now, resolved = time.monotonic(), 0
    for row, answer in answers:
      if not row.future.done():
        resolved += 1
        if isinstance(answer, Failure):
          shielded(self.monitor.record_failure, answer.during)
        else:
          shielded(self.monitor.record_answer, now - row.submitted)
        # A future logs errors of its callbacks, but only an `Exception`.
        shielded(row.future.set_result, answer)
    self.requests.release(resolved)
