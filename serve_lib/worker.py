"""The thread that chooses batches and runs them on the device.

It dispatches batches without waiting for them and reads back the small outputs
of the oldest one in flight while the device computes the next.
"""

import collections
import dataclasses
import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

from serve_lib.chain import ClosedError, Failure, Group, Policy, Row
from serve_lib.monitor import Monitor, shielded
from serve_lib.pool import Batch, Pool, RequestQueue
from serve_lib.programs import Programs


@dataclasses.dataclass(eq=False)
class Worker:
  """Runs rows through the chain; see `Engine` for the arguments."""

  policy: Policy
  programs: Programs
  requests: RequestQueue
  monitor: Monitor
  max_wait: float
  ahead: int
  max_pool_bytes: int

  def __post_init__(self):
    self.pool = Pool(self.programs)
    self._flights: collections.deque[Batch] = collections.deque()

  def run(self) -> None:
    """Serves until the engine is closed; called once, in its thread."""
    try:
      while self._step():
        pass
    except BaseException as error:
      # Log text, because a stored traceback would keep the rows alive.
      text = traceback.format_exc()
      logging.getLogger(__name__).error('a defect of the engine\n%s', text)
      self.requests.close(cancel=True)
      self._clear(error, 'engine')

  def _step(self) -> bool:
    """Dispatches or finishes a batch; returns False after the last one.

    No local reference to a batch survives a call.
    """
    batch = self._next()
    if batch is not None:
      self._dispatch(batch)
    elif not self._flights:
      return False
    if self._flights and (batch is None or len(self._flights) > self.ahead):
      self._finish(self._flights[0])
      self._flights.popleft()
    return True

  def _next(self) -> Batch | None:
    """Returns the next batch; None to finish one in flight, or to stop."""
    if self.requests.is_cancelled:
      closed = ClosedError('the engine was closed before the answer')
      self._clear(closed, 'close')
    if self.pool.ready:
      return self.pool.ready.popleft()
    with self.requests.lock:
      while True:
        waiting = {**self.requests.groups, **self.pool.groups}
        if group := self._choose(waiting):
          break
        if self._flights or (self.requests.is_closed and not waiting):
          return None
        timeout = None
        if waiting:
          oldest = min(rows[0].since for rows in waiting.values())
          timeout = max(oldest + self.max_wait - time.monotonic(), 0.0) + 1e-3
        self.requests.arrived.wait(timeout)
      if group.stage > 0:
        return self.pool.open.pop(group)
      rows = self.requests.take(group, self.programs.grid.capacity)
    slots = np.arange(len(rows), dtype=np.int32)
    return Batch(group, self.programs.grid.fit_rows(len(rows)), rows, slots)

  def _choose(self, waiting: Mapping[Group, Sequence[Row]]) -> Group | None:
    """Returns the group whose rows run next, or None to wait.

    The first rule that applies:

    1. Near the limit of the pool: the pooled rows that have waited longest;
       without any, the batch in flight finishes first.
    2. Rows that have waited in one group longer than `max_wait`, oldest first.
       (`since` restarts at each stage; otherwise pooled rows would always be
       older than queued ones, and in a backlog run one or two at a time.)
    3. A full batch of the latest stage: it frees memory.
    4. None while a caller is adding rows; else the oldest partial batch of the
       earliest stage, as its remaining rows fill the later pools.

    A partial batch waits while another is in flight, whose rows may join it.
    """
    if not waiting:
      return None
    deadline = time.monotonic() - self.max_wait
    capacity = self.programs.grid.capacity
    pooled = [group for group in waiting if group.stage > 0]
    late = [group for group in waiting if waiting[group][0].since < deadline]
    full = [group for group in waiting if len(waiting[group]) >= capacity]
    if (pooled or self._flights) and self._is_crowded():
      found = pooled
    elif late:
      found = late
    elif full:
      found = [group for group in full if group.stage == max(full).stage]
    elif self.requests.is_expecting:
      found = []
    else:
      found = [group for group in waiting if group.stage == min(waiting).stage]
    # The group makes equal ages deterministic.
    oldest = min(found, key=lambda g: (waiting[g][0].since, g), default=None)
    return None if self._flights and oldest not in full else oldest

  def _is_crowded(self) -> bool:
    """Returns True if one more batch could exceed `max_pool_bytes`."""
    if not self.max_pool_bytes:
      return False
    opened = (len(self._flights) + 1) * self.programs.widest_bytes
    return self.pool.bytes + opened > self.max_pool_bytes

  def _dispatch(self, batch: Batch) -> None:
    group = batch.group
    self._flights.append(batch)  # `_clear` finds it after an engine error
    try:
      if group.stage == 0:
        inputs = [row.encoded.inputs for row in batch.rows]
        batch.carry = self.programs.chain.pad(inputs, group.length, batch.size)
      else:
        self.pool.shrink(batch)
      # Overwrites the reference to the old carry, which frees its memory.
      batch.carry, batch.outputs = self.programs.run(
        group, batch.size, batch.carry
      )
      for leaf in jax.tree.leaves(batch.outputs):
        leaf.copy_to_host_async()
    except Exception as error:
      self._flights.pop()
      self._fail(batch.rows, error, f'stage {group.stage}')
      return
    self.monitor.record_batch(group.stage, len(batch.rows), batch.size)

  def _finish(self, batch: Batch) -> None:
    """Waits for a batch, moves the rows that stay and answers the others."""
    try:
      stays = self._stays(batch, jax.device_get(batch.outputs))
    except Exception as error:
      self._fail(batch.rows, error, f'stage {batch.group.stage}')
      return
    if stays.any():
      self._go_on(batch, stays)
    pairs = zip(batch.rows, stays, strict=True)
    self._resolve([(row, self._answer(row)) for row, stay in pairs if not stay])

  def _stays(self, batch: Batch, outputs: Any) -> Bool[np.ndarray, ' b']:
    """Returns True for the rows that stay; sets their length buckets."""
    values = {k: np.asarray(array)[batch.slots] for k, array in outputs.items()}
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
    now, lengths = time.monotonic(), np.array([r.length for r in batch.rows])
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
        self._fail(moved.rows, error, f'stage {group.stage}')

  def _answer(self, row: Row) -> Any:
    try:
      return self.policy.answer(row)
    except Exception as error:
      return Failure.of(error, 'answer')

  def _clear(self, error: BaseException, during: str) -> None:
    """Fails all waiting rows and, after an engine error, rows in flight."""
    rows = [*self.requests.rows(clear=True), *self.pool.clear()]
    while during == 'engine' and self._flights:
      rows += self._flights.popleft().rows
    self._fail(rows, error, during)

  def _fail(
    self, rows: Sequence[Row], error: BaseException, during: str
  ) -> None:
    """Answers rows with a failure."""
    failure = Failure.of(error, during)
    self._resolve([(row, failure) for row in rows])

  def _resolve(self, answers: Sequence[tuple[Row, Any]]) -> None:
    """Answers the rows that have no answer yet (after a defect), frees room."""
    now = time.monotonic()
    resolved = 0
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
