"""The tests of drift against hand-computed values and simulated traffic."""

import json
import math

import numpy as np
import pytest

from serve_lib.drift import (
  Calibration,
  DriftCheck,
  confidence_test,
  depth_test,
)


def traffic(rng, rows, shift=0.0, early=0.7):
  confidences = rng.beta(8.0, 2.0 + shift, rows)
  depths = np.where(rng.random(rows) < early, 4, 12)
  return confidences, depths


def calibration(seed=0, rows=4000):
  return Calibration.of(*traffic(np.random.default_rng(seed), rows))


def feed(check, confidences, depths):
  states = []
  for confidence, depth in zip(confidences, depths, strict=True):
    check.add(float(confidence), int(depth))
    states.append(check.drifted)
  return states


def test_distance_by_hand():
  # The empirical distributions differ most at 2: 2/4 against 1/4.
  distance, _ = confidence_test(
    np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 3.0, 4.0, 5.0])
  )
  assert distance == 0.25


def test_depths_by_hand():
  psi, p_value = depth_test({4: 30, 12: 10}, {4: 20, 12: 20})
  # Chi-square of a 2 x 2 table: n (ad - bc)^2 / products of the margins.
  chi_square = 80 * (30 * 20 - 10 * 20) ** 2 / (40 * 40 * 50 * 30)
  assert p_value == pytest.approx(math.erfc(math.sqrt(chi_square / 2)))
  first, second = (30.5 / 41, 10.5 / 41), (20.5 / 41, 20.5 / 41)
  by_hand = sum(
    (b - a) * math.log(b / a) for a, b in zip(first, second, strict=True)
  )
  assert psi == pytest.approx(by_hand)


def test_rare_depths_are_counted_together():
  same = depth_test({4: 100, 8: 1, 12: 100}, {4: 100, 10: 1, 12: 100})[1]
  assert same > 0.5
  assert depth_test({4: 100}, {4: 50}) == (pytest.approx(0.0), 1.0)
  # A depth that calibration never saw counts.
  assert depth_test({4: 100}, {4: 50, 12: 50})[1] < 1e-6


def test_calibration_as_json():
  original = calibration(rows=10_000)
  assert len(original.confidences) == 4096
  copy = Calibration.from_dict(json.loads(json.dumps(original.as_dict())))
  np.testing.assert_array_equal(copy.confidences, original.confidences)
  assert copy.depths == original.depths
  assert sum(copy.depths.values()) == 10_000
  distance, _ = confidence_test(
    original.confidences, traffic(np.random.default_rng(0), 10_000)[0]
  )
  assert distance < 1e-3


def test_no_drift_is_found_where_there_is_none():
  false_alarms = 0
  for seed in range(10):
    check = DriftCheck(calibration(seed), window=256, every=64)
    rng = np.random.default_rng(100 + seed)
    false_alarms += any(feed(check, *traffic(rng, 3000)))
  assert false_alarms == 0


def test_a_single_test_is_significant_as_often_as_it_says():
  rng = np.random.default_rng(0)
  base = calibration()
  found = [[], []]
  for _ in range(1000):
    confidences, depths = traffic(rng, 200)
    found[0].append(confidence_test(base.confidences, confidences)[1] < 0.05)
    values, counts = np.unique(depths, return_counts=True)
    window = dict(zip(values.tolist(), counts.tolist(), strict=True))
    found[1].append(depth_test(base.depths, window)[1] < 0.05)
  for rejected in found:
    assert 0.02 < np.mean(rejected) < 0.08


@pytest.mark.parametrize('change', [dict(shift=2.0), dict(early=0.2)])
def test_drift_is_found_soon_and_ends_with_hysteresis(change):
  turns = []
  check = DriftCheck(
    calibration(),
    window=256,
    every=64,
    on_drift=lambda drifted, report: turns.append((drifted, report)),
  )
  rng = np.random.default_rng(1)
  assert not any(feed(check, *traffic(rng, 1000)))
  drifting = feed(check, *traffic(rng, 1000, **change))
  assert drifting.index(True) <= 2 * 256
  assert drifting[-1]
  recovering = feed(check, *traffic(rng, 1500))
  # Not before the window is clean again, then four tests.
  assert 64 * 3 < recovering.index(False) <= 256 + 64 * 5
  assert not recovering[-1]
  assert [drifted for drifted, _ in turns] == [True, False]
  assert turns[0][1]['tests'] > 0


def test_a_difference_that_does_not_matter_is_no_drift():
  base = calibration(rows=4000)
  check = DriftCheck(base, window=4000, every=4000, confirm=1)
  rng = np.random.default_rng(2)
  feed(check, *traffic(rng, 4000, shift=0.25))
  report = check.report()
  assert report['confidence_p'] < 1e-4  # significant, but
  assert report['distance'] < 0.1  # small
  assert not report['drifted']


@pytest.mark.parametrize(
  ('field', 'value'),
  [('window', 5), ('every', 0), ('confirm', 0), ('recover', 0)],
)
def test_illegal_fields_are_named(field, value):
  with pytest.raises(ValueError, match=f'drift.{field}: expected at least'):
    DriftCheck(calibration(), **{field: value})
  with pytest.raises(ValueError, match=r'drift.significance'):
    DriftCheck(calibration(), significance=0.5)


def test_an_empty_calibration_is_an_error():
  with pytest.raises(ValueError, match=r'calibration: expected a confidence'):
    Calibration.of(np.zeros(0), np.zeros(0, int))
