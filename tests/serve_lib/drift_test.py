"""The tests of drift against hand-computed values and simulated traffic."""

import math

import numpy as np
import pytest

from serve_lib.drift import (
  Calibration,
  DriftCheck,
  confidence_test,
  share_test,
)

THRESHOLD = 0.9


def traffic(rng, rows, shift=0.0, sure=0.3):
  """Confidences, a share `sure` of them just above the threshold."""
  below = THRESHOLD * rng.beta(8.0, 2.0 + shift, rows)
  above = rng.uniform(THRESHOLD, THRESHOLD + 0.02, rows)
  return np.where(rng.random(rows) < sure, above, below)


def calibration(seed=0, rows=4000):
  return Calibration(traffic(np.random.default_rng(seed), rows), THRESHOLD)


def feed(check, confidences):
  states = []
  for confidence in confidences:
    check.add(float(confidence))
    states.append(check.drifted)
  return states


def flags(sure, unsure):
  return np.arange(sure + unsure) < sure


def test_distance_by_hand():
  # The empirical distributions differ most at 2: 2/4 against 1/4.
  distance, _ = confidence_test(
    np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 3.0, 4.0, 5.0])
  )
  assert distance == 0.25


def test_shares_by_hand():
  psi, p_value = share_test(flags(30, 10), flags(20, 20))
  # Chi-square of a 2 x 2 table: n (ad - bc)^2 / products of the margins.
  chi_square = 80 * (30 * 20 - 10 * 20) ** 2 / (40 * 40 * 50 * 30)
  assert p_value == pytest.approx(math.erfc(math.sqrt(chi_square / 2)))
  first, second = (30.5 / 41, 10.5 / 41), (20.5 / 41, 20.5 / 41)
  by_hand = sum(
    (b - a) * math.log(b / a) for a, b in zip(first, second, strict=True)
  )
  assert psi == pytest.approx(by_hand)


def test_too_few_rows_of_a_kind_prove_nothing():
  assert share_test(flags(100, 1), flags(100, 0))[1] == 1.0
  assert share_test(flags(100, 0), flags(50, 0))[1] == 1.0
  # Rows of a kind that calibration never saw count, if they are enough.
  assert share_test(flags(100, 0), flags(50, 50))[1] < 1e-6


def test_sure_is_float32_as_the_exit_rule():
  normal = Calibration(np.array([0.5]), 0.9)
  at, below = np.float32(0.9), np.nextafter(np.float32(0.9), np.float32(0))
  values = np.array([float(at), float(below)])
  assert normal.sure(values).tolist() == [True, False]


def test_a_file_of_an_older_version_is_read():
  # It had the rows by depth for the check, too.
  old = {'threshold': 0.9, 'confidences': [0.5, 0.95], 'depths': {'4': 2}}
  normal = Calibration.from_dict(old)
  assert normal.threshold == 0.9
  assert normal.sure(normal.confidences).tolist() == [False, True]


def test_no_drift_is_found_where_there_is_none():
  false_alarms = 0
  for seed in range(10):
    check = DriftCheck(calibration(seed), window=256, every=64)
    rng = np.random.default_rng(100 + seed)
    false_alarms += any(feed(check, traffic(rng, 3000)))
  assert false_alarms == 0


def test_a_single_test_is_significant_as_often_as_it_says():
  rng = np.random.default_rng(0)
  base = calibration()
  found = [[], []]
  for _ in range(1000):
    window = traffic(rng, 200)
    found[0].append(confidence_test(base.confidences, window)[1] < 0.05)
    shares = base.sure(base.confidences), base.sure(window)
    found[1].append(share_test(*shares)[1] < 0.05)
  for rejected in found:
    assert 0.02 < np.mean(rejected) < 0.08


@pytest.mark.parametrize('change', [dict(shift=2.0), dict(sure=0.8)])
def test_drift_is_found_soon_and_ends_with_hysteresis(change):
  turns = []
  check = DriftCheck(
    calibration(),
    window=256,
    every=64,
    on_drift=lambda drifted, report: turns.append((drifted, report)),
  )
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

  check = DriftCheck(calibration(), window=256, every=64, on_drift=page)
  assert feed(check, traffic(np.random.default_rng(1), 1000, sure=0.8))[-1]
  assert caplog.records[0].exc_info[1] is error


def test_a_difference_that_does_not_matter_is_no_drift():
  base = calibration(rows=4000)
  check = DriftCheck(base, window=4000, every=4000, confirm=1)
  rng = np.random.default_rng(2)
  feed(check, traffic(rng, 4000, shift=0.25))
  report = check.report()
  assert report['confidence_p'] < 1e-4  # significant, but
  assert report['distance'] < 0.1  # small
  assert not report['drifted']


def test_illegal_fields_are_named():
  with pytest.raises(ValueError, match=r'drift\.window: expected at least'):
    DriftCheck(calibration(), window=5)
  with pytest.raises(ValueError, match=r'drift.significance'):
    DriftCheck(calibration(), significance=0.5)


@pytest.mark.parametrize(
  ('confidences', 'threshold'),
  [([], 0.9), ([0.5, math.nan], 0.9), ([0.5], 1.5)],
)
def test_an_illegal_calibration_is_an_error(confidences, threshold):
  with pytest.raises(ValueError, match=r'calibration: .* all in \[0, 1\]'):
    Calibration(np.array(confidences, np.float64), threshold)
