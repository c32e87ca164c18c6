"""The grid of static shapes: lengths times batch sizes.

XLA compiles for one shape at a time, so a row is padded to the next length
and a batch to the next size. Every shape the engine ever runs is in the grid.
"""

import bisect
import dataclasses
from typing import NamedTuple

from dataset_lib.errors import ConfigError
from serve_lib.chain import InputError


class Key(NamedTuple):
  """Rows with the same key can share a batch.

  Attributes:
    stage: the stage that they wait for.
    variant: the form of the chain that serves them.
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
    """The bucket of a row.

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
    """The smallest batch bucket that holds so many rows."""
    return self.batches[bisect.bisect_left(self.batches, rows)]


def doubling(largest: int) -> tuple[int, ...]:
  """Batch buckets 1, 2, 4, ... below the largest, and the largest."""
  powers = {2**power for power in range(largest.bit_length())}
  return tuple(sorted({*powers, largest}))
