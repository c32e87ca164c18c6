"""Static shapes: rows are padded to length buckets, batches to batch buckets.

XLA compiles for one shape at a time.
"""

import bisect
import dataclasses
from typing import NamedTuple

from dataset_lib.errors import ConfigError
from serve_lib.chain import InputError


class Group(NamedTuple):
  """Rows that may share a batch: of one next stage, variant, length bucket."""

  stage: int
  variant: str
  length: int


@dataclasses.dataclass(frozen=True)
class Grid:
  """Length buckets of rows and row counts of batches, both ascending."""

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
    """Returns the length bucket of a row, or raises InputError."""
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
