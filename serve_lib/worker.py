"""The one thread that talks to the device.

It dispatches batches without waiting for them and reads back the small
outputs of the oldest one in flight while the device works on the next. It
lives while there is work: with nothing to do for a while it ends, and the
next request starts another, so that a program that forgets to close its
engine still ends.
"""

import collections
import dataclasses
import time
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

from serve_lib import schedule
from serve_lib.buckets import Grid, Key
from serve_lib.chain import Chain, ClosedError, Failure, Policy, Row
from serve_lib.intake import Intake
from serve_lib.monitor import Monitor
from serve_lib.pool import Batch, Pool
from serve_lib.programs import Programs
from serve_lib.shielded import shielded

LINGER_SECONDS = 1.0


@dataclasses.dataclass
class _Flight:
  """A dispatched batch; the arrays may not be computed yet."""

  batch: Batch
  carry: Any
  outputs: Any


class Worker:
  """Runs rows through the chain; see `Engine` for the arguments.

  Attributes:
    is_active: a thread serves, or has been started to; guarded by the intake's
      lock. It is cleared where the thread decides to end, and from there on
      that thread touches nothing here: the next may be at work already.
    pool: the rows between stages.
  """

  def __init__(
    self,
    chain: Chain,
    policy: Policy,
    grid: Grid,
    programs: Programs,
    intake: Intake,
    monitor: Monitor,
    *,
    max_wait: float,
    ahead: int,
    max_pool_bytes: int,
  ):
    self._chain, self._policy, self._grid = chain, policy, grid
    self._programs, self._intake, self._monitor = programs, intake, monitor
    self._max_wait, self._ahead = max_wait, ahead
    self._max_pool_bytes = max_pool_bytes
    self._ready: collections.deque[Batch] = collections.deque()
    self._flights: collections.deque[_Flight] = collections.deque()
    self.pool = Pool(programs, grid)
    self.is_active = False

  def run(self) -> None:
    """Serves until the engine is closed, or nothing has come for a while."""
    try:
      self._serve()
    except BaseException as error:
      self._give_up(error)
      raise

  def _give_up(self, error: BaseException) -> None:
    """After a defect of the engine itself: nobody waits for ever."""
    frames = error.__traceback__
    # Closed first: no row comes any more, and so no other thread.
    self._intake.close(cancel=True)
    self._drop_all(error, 'engine', [f.batch for f in self._flights])
    self._flights.clear()
    with self._intake.lock:
      self.is_active = False
    # The lines are for who reads of the dead thread; the rows are let go.
    traceback.clear_frames(frames)
    error.__traceback__ = frames

  def _serve(self) -> None:
    while self._step():
      pass

  def _step(self) -> bool:
    """Dispatches or finishes a batch; False if the thread is to end.

    Nothing of a batch is held from one step to the next.
    """
    busy = bool(self._flights)
    batch = self._next(busy)
    if batch is not None:
      self._dispatch(batch)
    elif not busy:
      return False
    if self._flights and (batch is None or len(self._flights) > self._ahead):
      self._finish(self._flights[0])
      self._flights.popleft()
    return True

  # -- what runs next --------------------------------------------------------

  def _next(self, busy: bool) -> Batch | None:
    """The next batch; None if the device is to finish first, or to end."""
    if self._intake.is_cancelled:
      error = ClosedError('the engine was closed before the answer')
      self._drop_all(error, 'close')
    if self._ready:
      return self._ready.popleft()
    with self._intake.lock:
      while (key := self._choose(busy)) is None:
        if busy or not self._wait():
          return None
      if key.stage == 0:
        rows = self._intake.take(key, self._grid.capacity)
        size = self._grid.fit_rows(len(rows))
        slots = np.arange(len(rows), dtype=np.int32)
        return Batch(key, size, rows, slots)
    return self._take(key, busy)

  def _waiting(self) -> list[schedule.Waiting]:
    return [*self._intake.waiting(), *self.pool.waiting()]

  def _choose(self, busy: bool) -> Key | None:
    return schedule.choose(
      self._waiting(),
      capacity=self._grid.capacity,
      now=time.monotonic(),
      max_wait=self._max_wait,
      busy=busy,
      expecting=self._intake.is_expecting,
      crowded=self._is_crowded(),
    )

  def _is_crowded(self) -> bool:
    """Whether there may be no room for another batch's rows in the pool.

    What is in flight has its room already. Only a batch that runs although
    there is nothing to wait for can exceed the limit: a limit below one batch.
    """
    if not self._max_pool_bytes:
      return False
    claimed = self.pool.bytes
    for flight in self._flights:
      claimed += self.pool.next_bytes(flight.batch.key)
    return claimed + self.pool.widest_bytes > self._max_pool_bytes

  def _wait(self) -> bool:
    """Waits for rows, with the lock held; False: the thread has to end."""
    oldest = min((entry.since for entry in self._waiting()), default=None)
    if oldest is not None:  # more is expected, but not for ever
      late = oldest + self._max_wait - time.monotonic()
      self._intake.arrived.wait(max(late, 0.0) + 1e-3)
      return True
    if not self._intake.is_closed and (
      self._intake.arrived.wait(LINGER_SECONDS) or self._intake.rows
    ):
      return True
    self.is_active = False
    return False

  def _take(self, key: Key, busy: bool) -> Batch | None:
    try:
      return self.pool.take(key)
    except Exception as error:
      self.fail(self.pool.discard(key), error, f'stage {key.stage}')
    return self._next(busy)

  # -- one batch -------------------------------------------------------------

  def _dispatch(self, batch: Batch) -> None:
    key, carry = batch.key, batch.carry
    try:
      if key.stage == 0:
        inputs = [row.encoded.inputs for row in batch.rows]
        carry = self._chain.pad(inputs, key.length, batch.size)
      carry, outputs = self._programs.run(key, batch.size, carry)
      for leaf in jax.tree.leaves(outputs):
        leaf.copy_to_host_async()
    except Exception as error:
      self.fail(batch.rows, error, f'stage {key.stage}')
      return
    except BaseException:
      self._ready.append(batch)  # where `run` finds its rows
      raise
    # The old carry is not needed any more; its memory is free when it is read.
    batch.carry = None
    self._flights.append(_Flight(batch, carry, outputs))
    self._monitor.record_batch(key.stage, len(batch.rows), batch.size)

  def _finish(self, flight: _Flight) -> None:
    """Waits for a batch, sends rows on and answers the others."""
    batch = flight.batch
    try:
      stays = self._undecided(batch, jax.device_get(flight.outputs))
    except Exception as error:
      self.fail(batch.rows, error, f'stage {batch.key.stage}')
      return
    if stays.any():
      self._go_on(batch, flight.carry, stays)
    leaving = [
      row for row, stay in zip(batch.rows, stays, strict=True) if not stay
    ]
    self._resolve([(row, self._answer(row)) for row in leaving])

  def _undecided(self, batch: Batch, outputs: Any) -> Bool[np.ndarray, ' b']:
    """Which rows go on."""
    values = {
      name: np.asarray(array)[batch.slots] for name, array in outputs.items()
    }
    for number, row in enumerate(batch.rows):
      row.outputs.append(
        {name: array[number] for name, array in values.items()}
      )
    if batch.key.stage == self._chain.num_stages - 1:
      return np.zeros(len(batch.rows), bool)
    leaves = self._policy.decide(batch.key.stage, batch.rows, values)
    leaves = np.asarray(leaves, bool)
    if leaves.shape != (len(batch.rows),):
      raise ValueError(
        f'policy.decide: expected bool [{len(batch.rows)}], got shape '
        f'{leaves.shape}'
      )
    if 'length' in values:
      for row, length in zip(batch.rows, values['length'], strict=True):
        row.length = self._grid.fit_length(int(length))
    return ~leaves

  def _go_on(
    self, batch: Batch, carry: Any, stays: Bool[np.ndarray, ' b']
  ) -> None:
    """Moves the rows that stay to the next stage, by length bucket."""
    now = time.monotonic()
    groups: dict[int, list[int]] = {}
    for number in np.flatnonzero(stays):
      row = batch.rows[number]
      row.since = now
      groups.setdefault(row.length, []).append(number)
    for length, numbers in sorted(groups.items()):
      key = Key(batch.key.stage + 1, batch.key.variant, length)
      rows = [batch.rows[number] for number in numbers]
      self._move(Batch(key, batch.size, rows, batch.slots[numbers], carry))

  def _move(self, moved: Batch) -> None:
    """Hands the carry on as it is where that wastes nothing, or compacts."""
    key, rows = moved.key, moved.rows
    # In the same bucket is not full: 17 rows of 32 are half a batch.
    is_full = len(rows) == self._grid.capacity
    fits = self._grid.fit_rows(len(rows)) == moved.size
    if not self.pool.has(key) and (is_full or (fits and self._is_alone())):
      self._ready.append(moved)
      return
    try:
      full = self.pool.add(moved)
    except Exception as error:
      # The open batch was given away to the copy that failed.
      lost = {id(row): row for row in [*rows, *self.pool.discard(key)]}
      self.fail([*lost.values()], error, f'stage {key.stage}')
      return
    if full is not None:
      self._ready.append(full)

  def _is_alone(self) -> bool:
    """Nothing waits, comes or is in flight besides: no one could join."""
    return not (
      self._ready
      or self._intake.is_expecting
      or len(self._flights) > 1
      or self.pool.rows
      or self._intake.rows
    )

  # -- answers ---------------------------------------------------------------

  def _answer(self, row: Row) -> Any:
    try:
      return self._policy.answer(row)
    except Exception as error:
      return Failure.of(error, 'answer')

  def fail(
    self,
    rows: Sequence[Row],
    error: BaseException,
    during: str,
    handled: BaseException | None = None,
  ) -> None:
    """Answers rows with a failure, in any thread; see `Failure.of`."""
    failure = Failure.of(error, during, handled)
    self._resolve([(row, failure) for row in rows])

  def _resolve(self, answers: Sequence[tuple[Row, Any]]) -> None:
    """Answers the rows that have no answer yet and gives their room back."""
    now = time.monotonic()
    resolved = 0
    for row, answer in answers:
      if not row.future.done():
        resolved += 1
        shielded(self._record, answer, now - row.submitted)
        # It logs what a callback raises, but only if that is an `Exception`.
        shielded(row.future.set_result, answer)
    self._intake.release(resolved)

  def _record(self, answer: Any, seconds: float) -> None:
    if isinstance(answer, Failure):
      self._monitor.record_failure(answer.during)
    else:
      self._monitor.record_answer(seconds)

  def _drop_all(
    self, error: BaseException, during: str, batches: Sequence[Batch] = ()
  ) -> None:
    """Fails the rows that wait, wherever they do, and those of `batches`."""
    rows = [*self._intake.clear(), *self.pool.clear()]
    for batch in [*self._ready, *batches]:
      rows += batch.rows
    self._ready.clear()
    # A defect may have left a row in two places.
    self.fail([*{id(row): row for row in rows}.values()], error, during)
