"""Batches of data sets, for the tests of the builder."""

import itertools
import threading
import time

import numpy as np

from dataset_lib import builder

DIGITS = dict(name='digits', image_size=8, augment=('inception_crop', 'flip'))
PARITY = dict(name='parity', length=4, train_examples=100, test_examples=10)
BUCKETS = (8, 16, 32)
TEXT = dict(
  name='tests.fakes:FakeText', train_examples=1000, test_examples=45,
  max_length=32, length_buckets=(8, 16, 64),  # cut at max_length
)  # fmt: skip


def build(config=DIGITS, split='train', **arguments):
  given = dict(train=True, batch_size=16, seed=0, num_threads=2) | arguments
  return builder.build(config, split=split, **given)


def take(data, count, start_step=0):
  batches = data.batches(start_step)
  taken = list(itertools.islice(batches, count))
  batches.close()
  return taken


def assert_same(left, right):
  assert len(left) == len(right)
  for one, other in zip(left, right, strict=True):
    assert one.keys() == other.keys()
    for key in one:
      np.testing.assert_array_equal(one[key], other[key])


def joined(batches):
  return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def global_batches(hosts, count, start_step=0, **arguments):
  """The batches of all hosts put together; their shapes must agree."""
  arguments['host_count'] = hosts
  opened = (build(host_index=host, **arguments) for host in range(hosts))
  parts = [take(data, count, start_step) for data in opened]
  return [joined(step) for step in zip(*parts, strict=True)]


def grain_threads():
  return [t for t in threading.enumerate() if 'grain' in t.name]


def wait_for_no_threads():
  deadline = time.monotonic() + 5
  while grain_threads() and time.monotonic() < deadline:
    time.sleep(0.01)
  return not grain_threads()
