"""The threads that run batches and answer rows.

Each thread chooses a batch, runs it and answers its rows; all but running is
done by one at a time. On a CPU the element-wise operations of a batch are
computed during products of another; XLA's client needs a thread for each.
"""

import dataclasses
import itertools
import logging
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from serve_lib import loops
from serve_lib.chain import ClosedError, Failure, Group, Policy, Row
from serve_lib.monitor import shielded
from serve_lib.pool import Batch, RequestQueue
from serve_lib.scheduler import Scheduler


@dataclasses.dataclass(eq=False)
class Worker:
  """Runs rows through the chain; see `Engine` for the arguments."""

  policy: Policy
  programs: Any  # `Programs` or `OnnxStages`
  requests: RequestQueue
  limits: Mapping[str, Any]  # `max_wait` and others, of the scheduler

  def __post_init__(self):
    self.pool = self.programs.pool(self.programs, self.requests)
    self.monitor = self.policy.monitor
    self.scheduler = Scheduler(
      self.programs, self.requests, self.pool, self._retry, **self.limits
    )
    self.num_threads = 1 + self.scheduler.ahead
    self._flights = self.scheduler.flights
    self._turn = threading.Lock()  # guards all that the threads share

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

    A function, so that no local variable keeps a batch.
    """
    seen = self.requests.changes
    with self._turn:
      batch = self._take()
      if batch is None:
        with self.requests.lock:
          closed = self.requests.is_closed and not self.scheduler.waiting
          patience = self.scheduler.patience()
        if closed and not self._flights:
          self.requests.wake()  # the other threads end too
          return False
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
      self._flights[:] = [x for x in self._flights if x is not batch]
    return True

  def _take(self) -> Batch | None:
    """Returns a batch to run now, and wakes a thread if there are others."""
    if self.requests.is_cancelled:
      closed = ClosedError('the engine was closed before the answer')
      self._clear(closed, 'close')
    while True:
      with self.requests.lock:
        batch = self.scheduler.next()
      if batch is None:
        return None
      if self._dispatch(batch):
        break
    if self.num_threads > 1:
      with self.requests.lock:
        queues = self.scheduler.retried, self.pool.ready, self.scheduler.waiting
        if any(queues):
          self.requests.wake()
    return batch

  def _dispatch(self, batch: Batch) -> bool:
    """Completes a batch; returns False if it cannot run."""
    group = batch.group
    try:
      if group.stage == 0:
        inputs = [row.encoded.inputs for row in batch.rows]
        batch.carry = self.programs.chain.pad(inputs, group.length, batch.size)
      else:
        self.pool.shrink(batch)
    except Exception as error:
      self._retry(batch.rows, error, group.stage)
      return False
    self._flights.append(batch)
    self.monitor.record_batch(group.stage, len(batch.rows), batch.size)
    return True

  def _finish(self, batch: Batch) -> None:
    """Moves the rows that stay and answers the others."""
    try:
      if isinstance(batch.outputs, BaseException):
        raise batch.outputs
      following = self._following(batch, batch.outputs)
      stays = following < self.programs.chain.num_stages
      is_wanted = [not row.future.cancelled() for row in batch.rows]
      stays &= is_wanted
    except Exception as error:
      batch.outputs = None
      self._retry(batch.rows, error, batch.group.stage)
      return
    if stays.any():
      self._go_on(batch, stays, following)
    leaves = itertools.compress(batch.rows, ~stays & is_wanted)
    self._resolve([(row, self._answer(row)) for row in leaves])

  def _retry(self, rows: Sequence[Row], error: Exception, stage: int) -> None:
    """Runs the rows of a batch that failed again from their inputs, each alone.

    So a row that breaks its batch costs the others time and no answer.
    """
    if len(rows) == 1:
      self._fail(rows, error, f'stage {stage}')
      return
    for row in rows:
      row.outputs.clear()
    self.scheduler.retried.extend(rows)

  def _following(self, batch: Batch, outputs: Any) -> Int[np.ndarray, ' b']:
    """Returns the next stage of each row, and sets its length bucket.

    It is one past the last stage for the rows that leave.
    """
    stage, end = batch.group.stage, self.programs.chain.num_stages
    loop = loops.at(self.programs.loop, stage)
    values = {k: array[batch.slots] for k, array in outputs.items()}
    for number, row in enumerate(batch.rows):
      row.outputs.append({k: array[number] for k, array in values.items()})
    if stage == end - 1 and not loop:
      return np.full(len(batch.rows), end)
    exits = self.policy.decide(stage, batch.rows, values)
    exits = np.asarray(exits, bool)
    if exits.shape != batch.slots.shape:
      raise ValueError(f'policy.decide: expected one for each row, got {exits}')
    if 'length' in values:
      for row, length in zip(batch.rows, values['length'], strict=True):
        row.length = self.programs.grid.fit_length(int(length))
    if not loop:
      return np.where(exits, end, stage + 1)
    visits = [len(row.outputs) - stage for row in batch.rows]
    return stage + (exits | (np.array(visits) >= loop.visits))

  def _go_on(
    self,
    batch: Batch,
    stays: Bool[np.ndarray, ' b'],
    following: Int[np.ndarray, ' b'],
  ) -> None:
    """Moves the rows that stay to their next stages, by length bucket."""
    groups, now = dict[Group, list[int]](), time.monotonic()
    for number in np.flatnonzero(stays).tolist():
      row = batch.rows[number]
      row.since = now
      group = Group(int(following[number]), batch.group.variant, row.length)
      groups.setdefault(group, []).append(number)
    for group, numbers in sorted(groups.items()):
      rows = [batch.rows[number] for number in numbers]
      moved = Batch(group, batch.size, rows, batch.slots[numbers], batch.carry)
      if rows[0].alone:
        self.pool.ready.append(moved)
        continue
      try:
        if len(groups) > 1:  # several groups use the carry
          self.pool.copy(moved)
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
    rows += self.scheduler.retried
    self.scheduler.retried.clear()
    if during == 'engine':
      rows += [row for batch in self._flights for row in batch.rows]
      self._flights.clear()
    self._fail(rows, error, during)

  def _fail(
    self, rows: Sequence[Row], error: BaseException, during: str
  ) -> None:
    """Answers rows with a failure."""
    failure = Failure.of(error, during)
    self._resolve([(row, failure) for row in rows])

  def _resolve(self, answers: Sequence[tuple[Row, Any]]) -> None:
    """Answers the rows that have no answer yet, and were not cancelled."""
    now = time.monotonic()
    for row, answer in answers:
      # After a defect a row may be in two places.
      if not row.future.done() and row.future.set_running_or_notify_cancel():
        if isinstance(answer, Failure):
          shielded(self.monitor.record_failure, answer.during)
        else:
          shielded(self.monitor.record_answer, now - row.submitted)
        # A future logs errors of its callbacks, but only an `Exception`.
        shielded(row.future.set_result, answer)
