"""Statistics by hand, from many threads; drift in simulated traffic."""

import concurrent.futures
import json
import math

import numpy as np
import pytest

from serve_lib.monitor import MAX_REASONS, DriftCheck, Monitor, share_test

THRESHOLD = 0.9


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
  assert snapshot['rows_per_second'] is None
  for rows, size in ((3, 4), (4, 4)):
    monitor.record_batch(0, rows, size)
  monitor.record_batch(1, 1, 2)
  for second in range(1, 101):
    clock.now = float(second)
    monitor.record_answer(second / 100)
  monitor.record_failure('encode')
  monitor.record_exit(4, 'confidence', 0.9, 0.5)
  monitor.record_exit(4, 'confidence', 0.9, 0.7)
  monitor.record_exit(12, 'last', 0.6, 0.9, truncated=True)
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
    reasons={'confidence': 2, 'last': 1}, truncated=1, fill={0: 7 / 8, 1: 0.5},
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


@pytest.mark.parametrize(
  ('source', 'confidence', 'drifted'),
  [('', 0.4, ['', 'news']), ('', None, []), ('forum', 0.4, ['forum'])],
)
def test_drift_asks_for_full_depth_of_rows_that_can_be_compared(
  source, confidence, drifted
):
  normal = np.linspace(0.5, 1.0, 200)
  checks = [DriftCheck(normal, 0.9, window=50, every=10) for _ in range(2)]
  monitor = Monitor(drift=checks[0], sources={'forum': checks[1]})
  assert not monitor.full_depth(source)
  for _ in range(100):
    monitor.record_exit(12, 'last', confidence, source=source)
  full = [name for name in ('', 'news', 'forum') if monitor.full_depth(name)]
  assert full == drifted
  snapshot = monitor.snapshot()
  assert snapshot['depth'] == {12: 100}
  reports = {'': snapshot['drift'], **snapshot['drift_by_source']}
  for name, report in reports.items():
    assert report['drifted'] == (report['tests'] > 0) == (name in drifted)
  json.dumps(snapshot)


# -- drift


def traffic(rng, rows, shift=0.0, sure=0.3):
  """Confidences, a share `sure` of them just above the threshold."""
  below = THRESHOLD * rng.beta(8.0, 2.0 + shift, rows)
  above = rng.uniform(THRESHOLD, THRESHOLD + 0.02, rows)
  return np.where(rng.random(rows) < sure, above, below)


def make(seed=0, **fields):
  normal = traffic(np.random.default_rng(seed), 4000)
  return DriftCheck(normal, THRESHOLD, **fields)


def feed(check, confidences):
  """Whether drift was found, after each row."""
  states = []
  for confidence in confidences:
    check.add(float(confidence))
    states.append(check.drifted)
  return states


def flags(sure, unsure):
  return np.arange(sure + unsure) < sure


def test_shares_by_hand():
  psi, p_value = share_test(flags(30, 10), flags(20, 20))
  # Chi-square of a 2 x 2 table: n (ad - bc)^2 / products of the margins.
  chi_square = 80 * (30 * 20 - 10 * 20) ** 2 / (40 * 40 * 50 * 30)
  assert p_value == pytest.approx(math.erfc(math.sqrt(chi_square / 2)))
  first, second = np.array([30.5, 10.5]) / 41, np.array([20.5, 20.5]) / 41
  assert psi == pytest.approx(((second - first) * np.log(second / first)).sum())


def test_too_few_rows_of_a_kind_prove_nothing():
  assert share_test(flags(100, 1), flags(100, 0))[1] == 1.0
  assert share_test(flags(100, 0), flags(50, 0))[1] == 1.0
  # Rows of a kind that calibration never saw count, if they are enough.
  assert share_test(flags(100, 0), flags(50, 50))[1] < 1e-6


def test_sure_is_float32_as_the_exit_rule():
  at = np.float32(0.9)  # less than 0.9 in float64
  check = make(window=2, every=2)
  feed(check, [at, np.nextafter(at, np.float32(0))])
  assert check.report()['sure_share'] == 0.5


def test_no_drift_is_found_where_there_is_none():
  for seed in range(10):
    check = make(seed, window=256, every=64)
    rng = np.random.default_rng(100 + seed)
    assert not any(feed(check, traffic(rng, 3000)))


@pytest.mark.parametrize('change', [dict(shift=2.0), dict(sure=0.8)])
def test_drift_is_found_soon_and_ends_with_hysteresis(change):
  turns = []
  check = make(window=256, every=64, on_drift=lambda *x: turns.append(x))
  rng = np.random.default_rng(1)
  assert not any(feed(check, traffic(rng, 1000)))
  drifting = feed(check, traffic(rng, 1000, **change))
  assert drifting.index(True) <= 2 * 256
  assert drifting[-1]
  recovering = feed(check, traffic(rng, 1500))
  # Not before the window is clean again, then four tests.
  assert 64 * 3 < recovering.index(False) <= 256 + 64 * 5
  assert not recovering[-1]
  assert [drifted for drifted, _ in turns] == [True, False]
  assert turns[0][1]['tests'] > 0


@pytest.mark.parametrize('error', [ConnectionError('pager'), SystemExit(1)])
def test_a_callback_that_fails_is_logged(error, caplog):
  def page(*_):
    raise error

  check = make(window=256, every=64, on_drift=page)
  assert feed(check, traffic(np.random.default_rng(1), 1000, sure=0.8))[-1]
  assert caplog.records[0].exc_info[1] is error


def test_a_difference_that_does_not_matter_is_no_drift():
  check = make(window=4000, every=4000, confirm=1)
  feed(check, traffic(np.random.default_rng(2), 4000, shift=0.25))
  report = check.report()
  assert report['confidence_p'] < 1e-4  # significant, but
  assert report['distance'] < 0.1  # small
  assert not report['drifted']


def test_an_illegal_calibration_is_named():
  for given, threshold in (([], 0.9), ([0.5, math.nan], 0.9), ([0.5], 1.5)):
    with pytest.raises(ValueError, match=r'calibration: .* all in \[0, 1\]'):
      DriftCheck(np.array(given, np.float64), threshold)
