"""The thread that runs batches on the device.

It dispatches batches without waiting for them and reads back the small outputs
of the oldest one in flight while the device computes the next. It ends after
`LINGER_SECONDS` without work, and the next request starts another: a program
that does not close its engine still ends.
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
from serve_lib.chain import Chain, ClosedError, Failure, Policy, Row
from serve_lib.monitor import Monitor
from serve_lib.pool import Batch, Intake, Pool
from serve_lib.process import shielded
from serve_lib.programs import Programs
from serve_lib.schedule import Grid, Key

LINGER_SECONDS = 1.0


@dataclasses.dataclass
class _Flight:
  """A dispatched batch, whose arrays may not be computed yet."""

  batch: Batch
  carry: Any
  outputs: Any


class Worker:
  """Runs rows through the chain; see `Engine` for the arguments.

  Attributes:
    is_active: a thread runs `run` or has been started to; guarded by the lock
      of the intake. The thread that clears it uses nothing here afterwards.
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
    """Serves until the engine is closed or no row came for a while."""
    try:
      while self._step():
        pass
    except BaseException as error:
      self._give_up(error)
      raise

  def _give_up(self, error: BaseException) -> None:
    """Fails all rows after a defect of the engine itself."""
    frames = error.__traceback__
    # Closed first: no row comes any more, and so no other thread starts.
    self._intake.close(cancel=True)
    self._drop_all(error, 'engine', [f.batch for f in self._flights])
    self._flights.clear()
    with self._intake.lock:
      self.is_active = False
    # The traceback is printed by `threading`, its frames free their rows.
    traceback.clear_frames(frames)
    error.__traceback__ = frames

  def _step(self) -> bool:
    """Dispatches or finishes a batch; returns False if the thread is to end.

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

  # -- the next batch --------------------------------------------------------

  def _next(self, busy: bool) -> Batch | None:
    """Returns the next batch; None to finish the one in flight, or to end."""
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
    try:
      return self.pool.take(key)
    except Exception as error:
      self.fail(self.pool.discard(key), error, f'stage {key.stage}')
    return self._next(busy)

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
    """Returns True if another batch could exceed the limit of the pool.

    Counts the memory that batches in flight may need. A single batch may
    exceed a limit that is smaller than itself.
    """
    if not self._max_pool_bytes:
      return False
    claimed = self.pool.bytes + sum(
      self._programs.next_bytes(flight.batch.key) for flight in self._flights
    )
    return claimed + self._programs.widest_bytes > self._max_pool_bytes

  def _wait(self) -> bool:
    """Waits for rows, with the lock held; False if the thread has to end."""
    oldest = min((entry.since for entry in self._waiting()), default=None)
    if oldest is not None:  # rows are expected, for at most `max_wait`
      late = oldest + self._max_wait - time.monotonic()
      self._intake.arrived.wait(max(late, 0.0) + 1e-3)
      return True
    if not self._intake.is_closed and (
      self._intake.arrived.wait(LINGER_SECONDS) or self._intake.rows
    ):
      return True
    self.is_active = False
    return False

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
      self._ready.append(batch)  # `_give_up` fails its rows
      raise
    batch.carry = None  # frees the memory of the old carry
    self._flights.append(_Flight(batch, carry, outputs))
    self._monitor.record_batch(key.stage, len(batch.rows), batch.size)

  def _finish(self, flight: _Flight) -> None:
    """Waits for a batch, moves the rows that stay and answers the others."""
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
    """Returns True for the rows that stay; sets their length buckets."""
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
    for number in np.flatnonzero(stays).tolist():
      row = batch.rows[number]
      row.since = now
      groups.setdefault(row.length, []).append(number)
    for length, numbers in sorted(groups.items()):
      key = Key(batch.key.stage + 1, batch.key.variant, length)
      rows = [batch.rows[number] for number in numbers]
      self._move(Batch(key, batch.size, rows, batch.slots[numbers], carry))

  def _move(self, moved: Batch) -> None:
    """Runs rows without a copy, or adds them to the pool.

    They run if the batch is full, or if it has the smallest fitting size and no
    other rows could join it.
    """
    key, rows = moved.key, moved.rows
    is_full = len(rows) == self._grid.capacity
    fits = self._grid.fit_rows(len(rows)) == moved.size
    if key not in self.pool and (is_full or (fits and self._is_alone())):
      self._ready.append(moved)
      return
    try:
      full = self.pool.add(moved)
    except Exception as error:
      # A failed 'join' has consumed the open batch of the key.
      lost = {id(row): row for row in [*rows, *self.pool.discard(key)]}
      self.fail([*lost.values()], error, f'stage {key.stage}')
      return
    if full is not None:
      self._ready.append(full)

  def _is_alone(self) -> bool:
    """Returns True if there are no rows but those of one batch."""
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
    self, rows: Sequence[Row], error: BaseException, during: str
  ) -> None:
    """Answers rows with a failure, in any thread; see `Failure`."""
    failure = Failure.of(error, during)
    self._resolve([(row, failure) for row in rows])

  def _resolve(self, answers: Sequence[tuple[Row, Any]]) -> None:
    """Answers the rows that have no answer yet and frees their room."""
    now = time.monotonic()
    resolved = 0
    for row, answer in answers:
      if not row.future.done():
        resolved += 1
        shielded(self._record, answer, now - row.submitted)
        # A future logs errors of its callbacks, but only an `Exception`.
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
    """Fails all waiting rows, and those of `batches`."""
    rows = [*self._intake.clear(), *self.pool.clear()]
    for batch in [*self._ready, *batches]:
      rows += batch.rows
    self._ready.clear()
    # After a defect a row may be in two places.
    self.fail([*{id(row): row for row in rows}.values()], error, during)
