"""Splits of rows that have none: 'train', 'validation' and 'test'.

Rows of a group are in one split. Groups of a label are ordered by a checksum of
their names, so that a split depends on no order of the rows and on no file
format; each label has the same shares, within a row where groups are single
rows. A label with one group is in 'train'.
"""

import bisect
import collections
import contextlib
import functools
import hashlib
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

from absl import logging
from annotated_types import Predicate

from core import files

NAMES = ('train', 'validation', 'test')
SHARES = (0.6, 0.2, 0.2)
SHOWN = 5  # classes in a warning


Shares = Annotated[
  tuple[float, float, float],
  Predicate(lambda x: abs(sum(x) - 1) < 1e-6 and min(x) >= 0 and x[0] > 0.5),
  'shares of train, validation and test, which sum to 1, the first > 0.5',
]


class Row(NamedTuple):
  """What the split of a row depends on."""

  labels: Sequence[str]  # () for a number
  group: bytes  # a checksum
  content: bytes  # a checksum of inputs and label


def checksum(name: bytes, seed: int = 0) -> bytes:
  """Returns 8 bytes that order names at random."""
  return hashlib.blake2b(name, salt=seed.to_bytes(8, 'little')).digest()[:8]


def digest(*parts: Any) -> str:
  """Returns a checksum of arrays."""
  return checksum(b''.join(checksum(one.tobytes()) for one in parts)).hex()


def places(
  strata: Sequence[Any],
  keys: Sequence[Any],
  sizes: Sequence[int],
  offset: Callable[[Any], float] = lambda stratum: 0.5,
) -> list[float]:
  """Returns places in [0, 1), in the order of `keys`, even in each stratum.

  The `offset` of a stratum is in [0, 1). Its first item is in the first half.
  """
  totals: collections.Counter[Any] = collections.Counter()
  for stratum, size in zip(strata, sizes, strict=True):
    totals[stratum] += size
  result, before = [0.0] * len(keys), collections.Counter[Any]()
  for item in sorted(range(len(keys)), key=keys.__getitem__):
    stratum, size = strata[item], sizes[item]
    place = (before[stratum] + offset(stratum) * size) / totals[stratum]
    result[item] = place if before[stratum] else min(place, 0.5)
    before[stratum] += size
  return result


def make(
  rows: Sequence[Row], shares: Sequence[float], seed: int
) -> tuple[dict[str, list[int]], dict[str, Any]]:
  """Returns the rows of each split, and `DatasetInfo.splits`.

  A group counts to the rarest of its labels. The rows of a split are in an
  order of their own, so that parts of it depend on no order of the file either.
  """
  sizes = collections.Counter(row.group for row in rows)
  counts = collections.Counter(label for row in rows for label in row.labels)
  rarest: dict[bytes, tuple[int, str]] = {}
  for row in rows:
    own = [(counts[label], label) for label in row.labels] or [(0, '')]
    rarest[row.group] = min(*own, rarest.get(row.group, own[0]))
  keys = {group: checksum(group, seed) for group in sizes}

  @functools.cache
  def offset(stratum: str) -> float:  # random, or labels of 2 rows have no test
    return int.from_bytes(checksum(stratum.encode(), seed)) / 2**64

  strata = [rarest[group][1] for group in sizes]
  spread = places(strata, [*keys.values()], [*sizes.values()], offset)
  place_of = dict(zip(sizes, spread, strict=True))
  bounds = [*itertools.accumulate(shares)][:-1]
  made: dict[str, list[int]] = {name: [] for name in NAMES}
  total = 0  # of checksums: a sum has no order
  for _, content, index, group in sorted(
    (keys[row.group], row.content, index, row.group)
    for index, row in enumerate(rows)
  ):
    name = NAMES[bisect.bisect(bounds, place_of[group])]
    made[name].append(index)
    total += int.from_bytes(checksum(name.encode() + content))
  missing: set[str] = set()
  for name in itertools.compress(NAMES, shares):
    held = {label for index in made[name] for label in rows[index].labels}
    missing |= counts.keys() - held
  if missing:
    shown = ', '.join(sorted(missing)[:SHOWN])
    more = f' and {len(missing) - SHOWN} more' * (len(missing) > SHOWN)
    warn_once(f'classes of few rows, of which a split has none: {shown}{more}')
  of_splits = {name: len(made[name]) for name in NAMES}
  about = dict(shares=(*shares,), seed=seed, rows=of_splits)
  return made, about | {'digest': f'{total % 2**64:016x}'}


@functools.cache  # the splits of a data set are opened one by one
def warn_once(message: str) -> None:
  """Logs a warning, which a process shows once."""
  logging.warning('%s', files.printable(message))


def warn_of_look_alikes(where: object, classes: Iterable[str]) -> None:
  """Logs pairs of classes that may be one."""
  for one, other in itertools.pairwise(sorted(classes, key=_folded)):
    if _folded(one) == _folded(other):
      alike = f'the classes {one!r} and {other!r} look alike: are they one?'
      warn_once(f'{where}: {alike}')


def _folded(name: str) -> str:
  """Returns a text that is equal for names which look alike."""
  with contextlib.suppress(ValueError):
    return str(float(name))
  plain = unicodedata.normalize('NFKC', name).casefold().split()
  return ' '.join(''.join(filter(str.isprintable, part)) for part in plain)


def content(texts: Iterable[str]) -> str:
  """Returns a key of the texts of a row, in which spaces do not count."""
  return '\0'.join(' '.join(text.split()) for text in texts)


def warn_of_copies(
  where: object, what: str, known: Iterable[Any], own: Sequence[Any]
) -> None:
  """Logs how many rows have the inputs, which are `what`, of rows of train."""
  if copies := sum(map({*known}.__contains__, own)):
    message = '%s: %d of %d rows have the %s of rows of train, which makes '
    message += 'their answers too good: leave them out of one of the splits'
    logging.warning(message, where, copies, len(own), what)
