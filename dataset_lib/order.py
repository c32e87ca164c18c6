"""Which record stands at which position: pure functions, no state.

Training is one infinite stream of positions. Position p is epoch p // N, and
within the epoch the image of p % N under a random permutation of the N records.
Global batch s holds positions [s B, (s + 1) B), host h
of H its rows [h B / H, (h + 1) B / H). So the order follows from (seed, step)
alone: it does not depend on the number of hosts and needs no replay on resume.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Int32

from dataset_lib.errors import ConfigError

# Up to this size the permutation of an epoch is a table of at most 4 MiB;
# beyond, Grain's index_shuffle computes it entry by entry in constant memory.
# That takes 4 microseconds an entry for a million records, but milliseconds for
# ten: it walks a cycle of at least 2**16 numbers until it meets a legal one.
_TABLE_EXAMPLES = 2**20
_SHUFFLE_ROUNDS = 4  # Grain's own choice


@functools.lru_cache(maxsize=4)
def _table(num_examples: int, seed: int, epoch: int) -> Int32[np.ndarray, ' N']:
  indices = np.arange(num_examples, dtype=np.int32)
  return record_rng(seed, epoch).permutation(indices)


@functools.lru_cache(maxsize=4)
def _epoch_seed(seed: int, epoch: int) -> int:
  return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


def permuted(offset: int, num_examples: int, seed: int, epoch: int) -> int:
  """Entry `offset` of the epoch's permutation of range(num_examples)."""
  if num_examples <= _TABLE_EXAMPLES:
    return int(_table(num_examples, seed, epoch)[offset])
  # Imported here: Grain takes most of a second, and few sets are this large.
  from grain.experimental import index_shuffle

  return index_shuffle(
    offset,
    max_index=num_examples - 1,
    seed=_epoch_seed(seed, epoch),
    rounds=_SHUFFLE_ROUNDS,
  )


def record_rng(*key: int) -> np.random.Generator:
  """Random numbers that are a function of the non-negative integers `key`."""
  return np.random.default_rng(key)


@dataclasses.dataclass(frozen=True)
class Order:
  """Maps positions to records.

  Attributes:
    num_examples: N, records in the split.
    seed: the run's seed.
    shuffle: True for the infinite training stream, False for one ordered pass.
  """

  num_examples: int
  seed: int
  shuffle: bool

  def place(self, position: int) -> tuple[int, int] | None:
    """(epoch, index) of a position; None beyond the end of an ordered pass."""
    if not self.shuffle:
      return (0, position) if position < self.num_examples else None
    epoch, offset = divmod(position, self.num_examples)
    return epoch, permuted(offset, self.num_examples, self.seed, epoch)

  def replacement(self, epoch: int, index: int, attempt: int) -> int:
    """The record that stands in for a bad one: a function of its arguments.

    It does not look at which records were bad before, so that every host and
    every resumed run makes the same choice.
    """
    rng = record_rng(self.seed, epoch, index, attempt + 1)
    return int(rng.integers(self.num_examples))


def local_rows(batch_size: int, host_index: int, host_count: int) -> range:
  """Rows of every global batch that one host reads.

  Raises:
    ConfigError: the batch does not divide by the hosts, or no such host.
  """
  if host_count < 1:
    raise ConfigError('host_count', host_count, 'an integer of at least 1')
  if not 0 <= host_index < host_count:
    raise ConfigError(
      'host_index', host_index, f'an integer in [0, {host_count - 1}]'
    )
  if batch_size < 1 or batch_size % host_count:
    raise ConfigError(
      'batch_size', batch_size, f'a positive multiple of {host_count} hosts'
    )
  rows = batch_size // host_count
  return range(host_index * rows, (host_index + 1) * rows)
