"""What to run next.

A batch that is full in the pool goes on at once, before anything is chosen
here (see `serve_lib.worker`); so there is never more than one full batch per
batch in flight, which bounds the pool. What is left to choose from are rows
that have just come (stage 0) and partial batches between stages.
"""

from collections.abc import Iterable
from typing import NamedTuple

from serve_lib.buckets import Key


class Waiting(NamedTuple):
  """Rows that wait together.

  Attributes:
    key: what they wait for.
    rows: how many.
    since: when the oldest of them came here.
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
  """Which rows run next, or None for "wait".

  In this order:

  1. No memory for more pooled rows: those that have waited longest, or what
     is in flight if there are none.
  2. Rows that have been waiting *in their place* for longer than `max_wait`:
     the oldest first. Time in place and not since the request, for otherwise
     a pooled row would always be older than what is queued behind it, and in
     a backlog every pool would run with a row or two. As it is, a pooled row
     is next when all that were queued before it came to its place have been
     taken. So it waits at most as long as the queue does, and nobody starves.
  3. A full batch, the deepest first: it frees memory and answers somebody.
  4. The shallowest partial batch, the oldest of these. Its survivors fill the
     pools behind it; a pool runs partial when nothing in front can fill it.
     So a lone request runs at once, and the end of a long list runs in as few
     batches as it can. While a caller is in the middle of a list, nothing.

  If that is not a full batch while another is in flight, it waits for that
  one: the device has work, and rows may come out of it that join.

  Args:
    waiting: rows by key, at most one entry each.
    capacity: rows of a full batch.
    now: seconds, the clock of `since`.
    max_wait: seconds after which age counts.
    busy: a batch is in flight.
    expecting: more rows will be here in a moment.
    crowded: one more batch could take the pool over its memory limit.
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
