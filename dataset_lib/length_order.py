"""Batches of rows of similar length: which records, padded to what.

Rows of one batch are padded to one length out of a few buckets, so a batch
should hold rows of one bucket. An epoch is a random permutation of the
records, sorted by bucket (stably: rows of a bucket stay in random order), cut
into global batches, which then are shuffled. Sorting by the exact length would
pad to the same buckets and only make batches more alike within.

Everything follows from (seed, step) and the lengths: it does not depend on the
number of hosts and needs no replay on resume.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int32

from dataset_lib.order import Order, record_rng

_BATCHES = 1  # tells the order of the batches from that of the records


class LengthOrder:
  """Maps steps to records and to the length that they are padded to.

  Training is an infinite stream of full batches; epoch e is the steps
  [e S, (e + 1) S) with S = N // batch_size, and leaves out N % batch_size
  records, others each time. A set smaller than a batch is repeated within it.
  Evaluation is one pass in ascending length whose last batch may be short.

  Attributes:
    shuffle: True for training.
    steps_per_epoch: S for training, at least 1; all batches for evaluation.

  Args:
    lengths: tokens of each record.
    buckets: lengths to pad to, ascending; the last one holds every record.
    batch_size: rows of the global batch.
    seed: the run's seed.
    shuffle: True for training.
  """

  def __init__(
    self,
    lengths: Int32[np.ndarray, ' N'],
    buckets: Sequence[int],
    batch_size: int,
    seed: int,
    shuffle: bool,
  ):
    self.shuffle = shuffle
    self._buckets = np.array(buckets)
    # The smallest bucket that holds a row; bytes sort fast.
    self._bucket = np.searchsorted(self._buckets, lengths).astype(np.uint8)
    self._lengths = lengths
    self._batch_size = batch_size
    self._seed = seed
    full, rest = divmod(len(lengths), batch_size)
    self.steps_per_epoch = max(1, full) if shuffle else full + bool(rest)
    # Two: threads read across the border of an epoch.
    self._epoch = functools.lru_cache(maxsize=2)(self._batches_of_epoch)
    self._ascending = functools.cache(self._sorted)

  def batch(self, step: int) -> tuple[Int[np.ndarray, ' R'], int]:
    """(records of a global batch, the length to pad them to).

    Training batches have `batch_size` records; the last one of an evaluation
    may have fewer, and beyond it there are none.
    """
    if not self.shuffle:
      start = step * self._batch_size
      records = self._ascending()[start : start + self._batch_size]
    elif len(self._lengths) < self._batch_size:
      records = self._repeated(step)
    else:
      epoch, number = divmod(step, self.steps_per_epoch)
      records = self._epoch(epoch)[number]
    bucket = self._bucket[records].max(initial=0)
    return records, int(self._buckets[bucket])

  def _batches_of_epoch(self, epoch: int) -> Int32[np.ndarray, 'S B']:
    count = len(self._lengths)
    permutation = record_rng(self._seed, epoch).permutation(count)
    used = permutation[: self.steps_per_epoch * self._batch_size]
    by_bucket = used[np.argsort(self._bucket[used], kind='stable')]
    batches = by_bucket.reshape(self.steps_per_epoch, self._batch_size)
    order = record_rng(self._seed, epoch, _BATCHES)
    return order.permutation(batches).astype(np.int32)

  def _repeated(self, step: int) -> Int32[np.ndarray, ' B']:
    """Positions of an endless stream of permutations, as in `Order`."""
    order = Order(len(self._lengths), self._seed, shuffle=True)
    start = step * self._batch_size
    positions = range(start, start + self._batch_size)
    places = [order.place(position) for position in positions]
    return np.array([place[1] for place in places if place], np.int32)

  def _sorted(self) -> Int32[np.ndarray, ' N']:
    return np.argsort(self._lengths, kind='stable').astype(np.int32)
