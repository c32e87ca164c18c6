"""Order of records and random numbers: pure functions of integers.

Training is an infinite stream of positions. Position p is entry p % N of the
random permutation of epoch p // N. Global batch s holds positions
[s B, (s + 1) B): the order follows from (seed, step), for any number of hosts.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt64

# Up to this size an epoch's permutation is a table; beyond, Grain's
# index_shuffle computes each entry: 4 us at 1e6 records, but ms at 10 records.
_TABLE_EXAMPLES = 2**20
_SHUFFLE_ROUNDS = 4  # Grain's own choice
_BATCHES = 1  # separates the order of the batches from that of the records
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
# The wrap-around of uint64 is intended.
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Bits = UInt64[np.ndarray, '...']


def record_rng(*key: int) -> np.random.Generator:
  """Returns a generator that follows from the non-negative integers `key`."""
  return np.random.default_rng(key)


def splitmix64(counters: Bits) -> Bits:
  """Returns random bits of each counter (Steele et al., 2014, figure 16)."""
  bits = counters * _INCREMENT
  bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIERS[0]
  bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIERS[1]
  return bits ^ (bits >> np.uint64(31))


@functools.lru_cache(maxsize=64)
def _state(dtype: type, *key: int) -> Any:
  return np.random.SeedSequence(key).generate_state(1, dtype)[0]


def record_bits(
  indices: Int[np.ndarray, ' B'], count: int, *key: int
) -> UInt64[np.ndarray, 'B C']:
  """Returns `count` random numbers of each record of the stream `key`."""
  first = _state(np.uint64, *key)
  starts = first + indices.astype(np.uint64) * np.uint64(count)
  return splitmix64(starts[:, None] + np.arange(count, dtype=np.uint64))


def integers(bits: Bits, low: int, high: int) -> Int[np.ndarray, '...']:
  """Returns numbers uniform over low .. high, both included, to 2**-32."""
  count = np.uint64(high - low + 1)
  drawn = ((bits >> np.uint64(32)) * count) >> np.uint64(32)
  return drawn.astype(np.int64) + low


@functools.lru_cache(maxsize=4)
def _table(num_examples: int, seed: int, epoch: int) -> Int32[np.ndarray, ' N']:
  indices = np.arange(num_examples, dtype=np.int32)
  return record_rng(seed, epoch).permutation(indices)


class Places(NamedTuple):
  """Epochs and records of some rows; fewer at the end of an ordered pass."""

  epochs: Int[np.ndarray, ' R']
  indices: Int[np.ndarray, ' R']
  length: int = 0  # of the padded batch; 0 where all records have one shape


@dataclasses.dataclass(eq=False)
class Order:
  """Maps steps to the records of a split, shuffled or one ordered pass.

  `steps_per_epoch`: in training full batches, at least 1; else all batches.

  With `lengths` an epoch of training is a random permutation, sorted stably by
  length bucket and cut into global batches, which are shuffled. It leaves out
  N % B records, different ones each time; a set smaller than a batch is
  repeated within the batch. Evaluation is one pass in ascending length.
  """

  num_examples: int
  batch_size: int
  seed: int
  shuffle: bool
  lengths: Int32[np.ndarray, ' N'] | None = None
  buckets: Sequence[int] = ()

  def __post_init__(self) -> None:
    full, rest = divmod(self.num_examples, self.batch_size)
    self.steps_per_epoch = max(1, full) if self.shuffle else full + bool(rest)
    if self.lengths is not None:
      # The smallest bucket that holds a row; bytes sort fast.
      bucket = np.searchsorted(self.buckets, self.lengths)
      self._bucket = bucket.astype(np.uint8)
      # Cache two epochs, because threads read across the border of an epoch.
      self._epoch: Any = functools.lru_cache(maxsize=2)(self._batches_of_epoch)
      lengths: Any = [] if self.shuffle else self.lengths
      self._ascending = np.argsort(lengths, kind='stable')

  def batch(self, step: int, rows: range) -> Places:
    """Returns the records of some rows of global batch number `step`."""
    if not self.buckets:
      return self._in_order(step, rows)
    if self.shuffle and self.num_examples >= self.batch_size:
      epoch, number = divmod(step, self.steps_per_epoch)
      records = self._epoch(epoch)[number]
    else:
      records = self._in_order(step, range(self.batch_size)).indices
      records = records if self.shuffle else self._ascending[records]
    # All hosts pad to the length of the whole batch.
    length = int(self.buckets[self._bucket[records].max(initial=0)])
    here = records[rows.start : rows.stop]
    return Places(np.zeros_like(here), here, length)

  def _in_order(self, step: int, rows: range) -> Places:
    positions = step * self.batch_size + np.arange(rows.start, rows.stop)
    if not self.shuffle:
      indices = positions[positions < self.num_examples]
      return Places(np.zeros_like(indices), indices)
    epochs, offsets = np.divmod(positions, self.num_examples)
    indices = np.empty_like(offsets)
    for epoch in np.unique(epochs).tolist():
      here = epochs == epoch
      indices[here] = self._shuffled(epoch, offsets[here])
    return Places(epochs, indices)

  def _shuffled(self, epoch: int, offsets: Int[np.ndarray, ' R']) -> Any:
    """Returns the records at some offsets of an epoch's permutation."""
    if self.num_examples <= _TABLE_EXAMPLES:
      return _table(self.num_examples, self.seed, epoch)[offsets]
    # Imported here: Grain takes most of a second, and few sets are this large.
    from grain.experimental import index_shuffle

    last, key = self.num_examples - 1, int(_state(np.uint32, self.seed, epoch))
    return [
      index_shuffle(offset, last, key, _SHUFFLE_ROUNDS)
      for offset in offsets.tolist()
    ]

  def _batches_of_epoch(self, epoch: int) -> Int32[np.ndarray, 'S B']:
    permutation = record_rng(self.seed, epoch).permutation(self.num_examples)
    used = permutation[: self.steps_per_epoch * self.batch_size]
    by_bucket = used[np.argsort(self._bucket[used], kind='stable')]
    batches = by_bucket.reshape(self.steps_per_epoch, self.batch_size)
    order = record_rng(self.seed, epoch, _BATCHES)
    return order.permutation(batches).astype(np.int32)
