"""Chooses which rows run next, and in which batch."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from serve_lib import loops
from serve_lib.chain import Group, Row
from serve_lib.pool import Batch, RequestQueue, wanted

Waiting = Mapping[Group, Sequence[Row]]
TURNS = 4  # batches in a row of a loop, or of others, while both are late


@dataclasses.dataclass(eq=False)
class Scheduler:
  """Forms batches of waiting rows; see `Engine` for the arguments.

  Used by one thread at a time, which holds the lock of `requests`.
  """

  programs: Any  # `Programs` or `OnnxStages`
  requests: RequestQueue
  pool: Any  # `Pool` or `HostPool`
  retry: Callable[[Sequence[Row], Exception, int], None]
  max_wait: float
  ahead: int
  max_pool_bytes: int

  def __post_init__(self):
    self.flights: list[Batch] = []  # dispatched
    self.retried: collections.deque[Row] = collections.deque()
    self._is_retrying = False
    # Batches in a row of the same kind, and whether that is of a loop.
    self._in_a_row, self._was_loop = 0, False

  @property
  def waiting(self) -> Waiting:
    """Rows that wait, by group, oldest first."""
    return {**self.requests.groups, **self.pool.groups}

  def patience(self) -> float | None:
    """Returns seconds until a row has waited for `max_wait`, None for never."""
    now = time.monotonic() - self.max_wait
    left = [rows[0].since - now for rows in self.waiting.values()]
    return min((one + 1e-3 for one in left if one > 0), default=None)

  def next(self) -> Batch | None:
    """Returns the batch to run next; None to wait."""
    if len(self.flights) > self.ahead:
      return None
    batch = self._following()
    if batch and self.programs.loop:
      is_loop = self._loops(batch.group)
      is_same = is_loop == self._was_loop
      self._in_a_row = 1 + self._in_a_row * is_same
      self._was_loop = is_loop
    return batch

  def _following(self) -> Batch | None:
    """Returns the batch of rows that wait, or that failed."""
    if self.requests.has_cancelled:
      self.requests.purge()
      self.pool.purge()
      self.retried = collections.deque(wanted(self.retried))
    if self.pool.ready and not self._is_due():
      return self.pool.ready.popleft()
    # Rows of batches that failed do not hold up the others.
    self._is_retrying = not self._is_retrying
    batch = None if self.retried and self._is_retrying else self._next()
    if not batch and self.retried:
      return self._alone(self.retried.popleft())
    if not batch and self.pool.ready:  # late rows have to wait for a flight
      return self.pool.ready.popleft()
    return batch

  def _next(self) -> Batch | None:
    """Returns the batch of the group that runs next."""
    if not (group := self._choose(self.waiting)):
      return None
    near = self._near(group)
    if group.stage > 0:
      batches = [self.pool.open.pop(one) for one in (group, *near)]
      if not near:
        return batches[0]
      try:
        return self.pool.gathered(batches)
      except Exception as error:
        rows = [row for one in batches for row in one.rows]
        self.retry(rows, error, group.stage)
        return self._next()
    rows = self.requests.take(group, self.pool.most(group.length))
    for other in near:
      room = self.pool.most(max(group, other).length) - len(rows)
      rows += self.requests.take(other, room)
      group = max(group, other)
    for row in rows:
      row.length = group.length
    if len(rows) == 1:
      return self._alone(rows[0])
    slots = np.arange(len(rows), dtype=np.int32)
    size = self.programs.grid.fit_rows(len(rows))
    return Batch(group, size, rows, slots)

  def _near(self, group: Group) -> list[Group]:
    """Returns groups to join: padding costs less than reading the weights."""
    waiting, near = self.waiting, []
    count, length = len(waiting[group]), group.length
    others = [g for g in waiting if g[:2] == group[:2] and g != group]
    for other in sorted(others, key=lambda g: abs(g.length - group.length)):
      rows, longer = len(waiting[other]), max(length, other.length)
      room = self.pool.most(longer) - count
      if group.stage == 0:  # they can be taken one by one
        rows = min(rows, room)
      padding = count * (longer - length) + rows * (longer - other.length)
      if padding <= self.programs.padding and 0 < rows <= room:
        near.append(other)
        count, length = count + rows, longer
    return near

  def _alone(self, row: Row) -> Batch:
    """Returns a batch of one row, which goes on without joining others."""
    grid, encoded, row.alone = self.programs.grid, row.encoded, True
    row.length = grid.fit_length(encoded.length)
    group = Group(0, encoded.variant, row.length)
    return Batch(group, grid.fit_rows(1), [row], np.zeros(1, np.int32))

  def _choose(self, waiting: Waiting) -> Group | None:
    """Returns the group whose rows run next, or None to wait.

    The first rule that applies:

    1. Near the limit of the pool: batches in flight finish first, then the
       pooled rows that have waited longest run.
    2. Rows that have waited in one group longer than `max_wait`, oldest first;
       loops take turns with others, see `_due`. (`since` restarts at each
       stage, or pooled rows would always be older than queued ones.)
    3. A full batch of the latest stage: it frees memory.
    4. None while a caller is adding rows; else the oldest partial batch of the
       earliest stage, as its remaining rows fill the later pools. It waits for
       batches in flight of earlier stages, whose rows may join it.

    A partial batch waits while another is in flight.
    """
    if not waiting:
      return None
    is_calm = not self.flights and not self.requests.is_expecting
    if is_calm and len(waiting) == 1:  # as the rules would, but fast
      return next(iter(waiting))
    capacity = self.programs.grid.capacity
    pooled = [group for group in waiting if group.stage > 0]
    late = self._late(waiting)
    flights = [one.group for one in self.flights if not one.rows[0].alone]
    full = [group for group in waiting if len(waiting[group]) >= capacity]
    if (pooled or self.flights) and self._is_crowded():
      legal = [] if self.flights else pooled
    elif late:
      legal = self._due(late) or late
    elif full:
      legal = [group for group in full if group.stage == max(full).stage]
    elif self.requests.is_expecting:
      legal = []
    else:
      legal = [
        group for group in waiting
        if not any(x.stage < group.stage and x.variant == group.variant
                   for x in flights)
      ]  # fmt: skip
      legal = [group for group in legal if group.stage == min(legal).stage]
    # The group makes equal ages deterministic.
    oldest = min(legal, key=lambda g: (waiting[g][0].since, g), default=None)
    if oldest and oldest.stage == 0:  # the queue's turn, whose rows take turns
      queued = [group for group in legal if group.stage == 0]
      turns = {g: (waiting[g][0].turn, waiting[g][0].since, g) for g in queued}
      oldest = min(queued, key=turns.__getitem__)
    return oldest if not self.flights or oldest in full else None

  def _late(self, waiting: Waiting) -> list[Group]:
    """Returns the groups of rows that have waited longer than `max_wait`."""
    deadline = time.monotonic() - self.max_wait
    return [group for group in waiting if waiting[group][0].since < deadline]

  def _loops(self, group: Group) -> bool:
    """Returns True if rows come back to a stage."""
    return loops.at(self.programs.loop, group.stage) is not None

  def _due(self, late: Sequence[Group]) -> list[Group]:
    """Returns the groups whose turn has come, if any.

    After `TURNS` batches of a loop in a row other stages are due, and the other
    way round: neither long loops nor new rows starve the rest.
    """
    if self._in_a_row < TURNS:
      return []
    return [group for group in late if self._loops(group) != self._was_loop]

  def _is_due(self) -> bool:
    """Returns True if late rows are due before a full batch of a loop.

    They may fill one more, so never if two are full: the device holds these.
    """
    if self._in_a_row < TURNS:
      return False
    (first, *others) = self.pool.ready
    if others or not self._loops(first.group) or self._is_crowded():
      return False
    return bool(self._due(self._late(self.waiting)))

  def _is_crowded(self) -> bool:
    """Returns True if one more batch could exceed `max_pool_bytes`."""
    if not self.max_pool_bytes:
      return False
    opened = (len(self.flights) + 1) * self.pool.widest_bytes
    return self.pool.bytes + opened > self.max_pool_bytes
