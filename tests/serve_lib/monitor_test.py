"""Statistics by hand, in bounded memory, from many threads."""

import concurrent.futures
import json

import numpy as np
import pytest

from serve_lib.monitor import MAX_REASONS, DriftCheck, Monitor


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def test_statistics_by_hand():
  clock = Clock()
  monitor = Monitor(clock=clock)
  snapshot = monitor.snapshot()
  assert snapshot['latency'] == {'p50': None, 'p95': None, 'p99': None}
  assert snapshot['mean_depth'] is None
  assert snapshot['rows_per_second'] == 0.0
  for rows, size in ((3, 4), (4, 4)):
    monitor.record_batch(0, rows, size)
  monitor.record_batch(1, 1, 2)
  for second in range(1, 101):
    clock.now = float(second)
    monitor.record_answer(second / 100)
  monitor.record_failure('encode')
  monitor.record_exit(4, 'confidence', 0.9, 0.5)
  monitor.record_exit(4, 'confidence', 0.9, 0.7)
  monitor.record_exit(12, 'last', 0.6, 0.9)
  percentiles = {
    'latency': {'p50': 0.505, 'p95': 0.9505, 'p99': 0.9901},
    'retention': {'p5': 0.52, 'p50': 0.7, 'p95': 0.88},
  }
  snapshot = monitor.snapshot()
  json.dumps(snapshot)
  for name, values in percentiles.items():
    assert snapshot.pop(name) == pytest.approx(values)
  assert snapshot == dict(
    answers=100, failures={'encode': 1}, rows_per_second=pytest.approx(1.0),
    depth={4: 2, 12: 1}, mean_depth=pytest.approx(20 / 3),
    reasons={'confidence': 2, 'last': 1}, fill={0: 7 / 8, 1: 0.5},
  )  # fmt: skip
  clock.now = 991.0  # the rate falls when nothing is answered
  assert monitor.snapshot()['rows_per_second'] == pytest.approx(0.1)


def test_memory_is_bounded_and_percentiles_are_of_the_window():
  monitor = Monitor(window=10)
  for number in range(1000):
    monitor.record_answer(float(number))
    monitor.record_exit(1, f'reason {number}', 0.5, 0.1)
  snapshot = monitor.snapshot()
  assert snapshot['answers'] == 1000
  assert snapshot['latency']['p50'] == 994.5
  assert len(snapshot['reasons']) <= MAX_REASONS + 1
  assert snapshot['reasons']['other'] == 1000 - MAX_REASONS


def test_counts_from_many_threads():
  monitor = Monitor()

  def record(_):
    for _ in range(500):
      monitor.record_batch(0, 1, 1)
      monitor.record_answer(0.1)
      monitor.record_exit(2, 'confidence', 0.9)
      monitor.snapshot()

  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    list(threads.map(record, range(4)))
  assert monitor.snapshot()['depth'] == {2: 2000}
  assert monitor.snapshot()['answers'] == 2000


@pytest.mark.parametrize('confidence', [0.4, None])
def test_drift_asks_for_full_depth_of_rows_that_can_be_compared(confidence):
  normal = np.linspace(0.5, 1.0, 200)
  monitor = Monitor(drift=DriftCheck(normal, 0.9, window=50, every=10))
  assert not monitor.full_depth
  for _ in range(100):
    monitor.record_exit(12, 'last', confidence)
  compared = confidence is not None
  snapshot = monitor.snapshot()
  assert snapshot['depth'] == {12: 100}
  assert monitor.full_depth == snapshot['drift']['drifted'] == compared
  assert (snapshot['drift']['tests'] > 0) == compared
  json.dumps(snapshot)
