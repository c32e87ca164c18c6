"""Static shapes of batches, and which batch runs next.

XLA compiles for one shape at a time, so a row is padded to the next length
bucket and a batch to the next batch bucket. A batch that fills up in the pool
runs at once (see `serve_lib.worker`), so there is at most one full batch for
each batch in flight, which bounds the pool. `choose` selects among the other
rows: new ones (stage 0) and partial batches between stages.
"""

import bisect
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from dataset_lib.errors import ConfigError
from serve_lib.chain import InputError


class Key(NamedTuple):
  """What rows must have in common to share a batch.

  Attributes:
    stage: their next stage.
    variant: the chain's variant that serves them.
    length: their length bucket.
  """

  stage: int
  variant: str
  length: int


@dataclasses.dataclass(frozen=True)
class Grid:
  """Length and batch buckets.

  Close batch sizes (1, 2, 3, 4, 6, 8, 12, 16) waste less padding, few compile
  faster.

  Attributes:
    lengths: ascending; the last is the longest row that is served.
    batches: ascending; the last is a full batch.
  """

  lengths: tuple[int, ...]
  batches: tuple[int, ...]

  def __post_init__(self):
    for name in ('lengths', 'batches'):
      sizes = getattr(self, name)
      legal = sizes and all(type(size) is int and size > 0 for size in sizes)
      if not legal or list(sizes) != sorted(set(sizes)):
        raise ConfigError(
          f'engine.{name}', sizes, 'a tuple of ascending positive integers'
        )

  @property
  def capacity(self) -> int:
    """Rows of a full batch."""
    return self.batches[-1]

  def fit_length(self, length: int) -> int:
    """Returns the length bucket of a row.

    Raises:
      InputError: the row is empty, or longer than the longest bucket.
    """
    if not 1 <= length <= self.lengths[-1]:
      raise InputError(
        f'length: expected 1 to {self.lengths[-1]}, the longest bucket, got '
        f'{length}; truncate the item or serve with a longer bucket'
      )
    return self.lengths[bisect.bisect_left(self.lengths, length)]

  def fit_rows(self, rows: int) -> int:
    """Returns the smallest batch bucket that holds `rows` rows."""
    return self.batches[bisect.bisect_left(self.batches, rows)]


def doubling(largest: int) -> tuple[int, ...]:
  """Returns batch buckets 1, 2, 4, ... up to `largest`, which is included."""
  powers = {2**power for power in range(largest.bit_length())}
  return tuple(sorted({*powers, largest}))


class Waiting(NamedTuple):
  """Rows that wait under one key.

  Attributes:
    key: the key.
    rows: number of rows.
    since: time at which the oldest of them began to wait here.
  """

  key: Key
  rows: int
  since: float


def choose(
  waiting: Iterable[Waiting],
  *,
  capacity: int,
  now: float,
  max_wait: float,
  busy: bool,
  expecting: bool = False,
  crowded: bool = False,
) -> Key | None:
  """Returns the key whose rows run next, or None to wait.

  The first rule that applies:

  1. `crowded`: the pooled rows that have waited longest; None if there are
     none, so that the batch in flight finishes.
  2. Rows that have waited at one key longer than `max_wait`, oldest first.
     Waiting counts per key and not since the request: pooled rows are always
     older than queued ones, and in a backlog every pool would run with one or
     two rows. A pooled row runs after the rows queued before it came there,
     so no row starves.
  3. A full batch of the latest stage: it frees memory.
  4. None while `expecting`; else the oldest partial batch of the earliest
     stage. Its survivors fill the later pools, so a single request runs at
     once and the end of a list in few batches.

  A partial batch waits while another is in flight, as the rows that stay in
  that one may join it.

  Args:
    waiting: at most one entry per key.
    capacity: rows of a full batch.
    now: seconds, the clock of `since`.
    max_wait: in seconds.
    busy: a batch is in flight.
    expecting: a caller is about to add rows.
    crowded: one more batch could exceed the memory limit of the pool.
  """
  entries = list(waiting)
  if not entries:
    return None
  pooled = [entry for entry in entries if entry.key.stage > 0]
  late = [entry for entry in entries if now - entry.since > max_wait]
  full = [entry for entry in entries if entry.rows >= capacity]
  if crowded and (pooled or busy):
    if not pooled:
      return None
    chosen = min(pooled, key=_age)
  elif late:
    chosen = min(late, key=_age)
  elif full:
    chosen = min(full, key=lambda entry: (-entry.key.stage, _age(entry)))
  elif expecting:
    return None
  else:
    chosen = min(entries, key=lambda entry: (entry.key.stage, _age(entry)))
  return None if busy and chosen.rows < capacity else chosen.key


def _age(entry: Waiting) -> tuple[float, Key]:
  return entry.since, entry.key  # the key makes equal ages deterministic
