"""Does the traffic still look like the calibration split?

Thresholds hold for data like those they were found on. Compared is the
confidence of the first head: every row passes it, so it is known whatever rule
is in use, whatever a source's own threshold, and also while all rows run to
full depth. What later heads would say of rows that have left nobody knows.

Two statistical tests compare a sliding window of the traffic with the
calibration split: the two-sample Kolmogorov-Smirnov test on the confidences,
and the chi-square test of homogeneity on the share of them that reaches the
threshold of the calibration, each at half the significance (Bonferroni). A
test counts only if the difference also matters in size (the
Kolmogorov-Smirnov distance, the population stability index): with enough rows
any difference is significant.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from serve_lib.shielded import shielded

MIN_EXPECTED = 5.0  # rows per cell from which on chi-square is accurate


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What the calibration split looks like.

  Attributes:
    confidences: those of the first head, of all rows or an even sample.
    threshold: a row that reaches it at the first head counts as sure.

  Raises:
    ValueError: there are no confidences, or one is not in [0, 1].
  """

  confidences: Float[np.ndarray, ' N']
  threshold: float

  def __post_init__(self):
    confidences = self.confidences
    # In float32 a softmax may pass 1 by rounding.
    legal = (confidences >= 0) & (confidences < 1.001)
    if not len(confidences) or not legal.all():
      raise ValueError(
        'calibration.confidences: expected at least one, all in [0, 1], got '
        f'{confidences}'
      )
    if not 0.0 <= self.threshold <= 1.0:
      raise ValueError(
        'calibration.threshold: expected a number in [0, 1], got '
        f'{self.threshold}'
      )

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> 'Calibration':
    """From what `eval_lib.calibration.drift_statistics` wrote.

    Raises:
      KeyError: a field is missing.
      ValueError: a value is illegal.
    """
    confidences = np.array(values['confidences'], np.float64)
    return cls(confidences, float(values['threshold']))

  def sure(
    self, confidences: Float[np.ndarray, ' W']
  ) -> Bool[np.ndarray, ' W']:
    """Which of them reach the threshold, in float32 as the exit rule does."""
    return confidences.astype(np.float32) >= np.float32(self.threshold)


class DriftCheck:
  """Compares traffic with a calibration, with hysteresis. Thread-safe.

  Every `every` rows a full window is tested. Drift is on after `confirm`
  tests in a row found it, and off after `recover` tests in a row in which
  neither test rejects at ten times the significance or both are small.

  Args:
    calibration: what is normal.
    window: rows that are compared.
    every: rows from one test to the next.
    significance: probability of finding drift in one test where there is
      none, both tests together.
    min_distance: Kolmogorov-Smirnov distance that matters.
    min_psi: population stability index that matters; by convention .1 is a
      small shift and .25 a large one.
    confirm: tests in a row that turn drift on.
    recover: tests in a row that turn it off.
    on_drift: called with (drifted, report) whenever it turns, without a lock
      held, in the thread that added the row; what it raises is logged.
  """

  def __init__(
    self,
    calibration: Calibration,
    *,
    window: int = 512,
    every: int = 128,
    significance: float = 1e-4,
    min_distance: float = 0.1,
    min_psi: float = 0.1,
    confirm: int = 2,
    recover: int = 4,
    on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
  ):
    for name, value, low in (
      ('window', window, 20),
      ('every', every, 1),
      ('confirm', confirm, 1),
      ('recover', recover, 1),
    ):
      if value < low:
        raise ValueError(f'drift.{name}: expected at least {low}, got {value}')
    if not 0.0 < significance < 0.1:
      raise ValueError(
        f'drift.significance: expected a number in (0, 0.1), got {significance}'
      )
    self.calibration = calibration
    self.significance, self.every = significance, every
    self.min_distance, self.min_psi = min_distance, min_psi
    self.confirm, self.recover = confirm, recover
    self.drifted = False
    self._on_drift = on_drift
    self._lock = threading.Lock()
    self._rows: collections.deque[float] = collections.deque(maxlen=window)
    self._since_test = 0
    self._in_a_row = 0
    self._report: dict[str, Any] = {'tests': 0}

  def add(self, confidence: float) -> None:
    """The first head's confidence of one row of traffic."""
    with self._lock:
      self._rows.append(confidence)
      self._since_test += 1
      is_full = len(self._rows) == self._rows.maxlen
      if not is_full or self._since_test < self.every:
        return
      self._since_test = 0
      turned = self._test()
      report = dict(self._report)
    if turned and self._on_drift is not None:
      shielded(self._on_drift, self.drifted, report)

  def report(self) -> dict[str, Any]:
    """The last test, plain numbers; and whether drift is on."""
    with self._lock:
      return self._report | {'drifted': self.drifted}

  def _test(self) -> bool:
    """Tests the window; whether drift has turned on or off."""
    normal, confidences = self.calibration.confidences, np.array(self._rows)
    distance, confidence_p = confidence_test(normal, confidences)
    expected, sure = (
      self.calibration.sure(values) for values in (normal, confidences)
    )
    psi, share_p = share_test(expected, sure)
    self._report = {
      'tests': self._report['tests'] + 1,
      'distance': distance,
      'confidence_p': confidence_p,
      'sure_share': float(sure.mean()),
      'expected_share': float(expected.mean()),
      'psi': psi,
      'share_p': share_p,
    }
    # To turn off, the evidence must be ten times weaker than to turn on.
    level = self.significance / 2 * (10 if self.drifted else 1)
    found = (confidence_p < level and distance >= self.min_distance) or (
      share_p < level and psi >= self.min_psi
    )
    self._in_a_row = self._in_a_row + 1 if found != self.drifted else 0
    if self._in_a_row < (self.recover if self.drifted else self.confirm):
      return False
    self.drifted, self._in_a_row = found, 0
    return True


def confidence_test(
  calibration: Float[np.ndarray, ' N'], window: Float[np.ndarray, ' W']
) -> tuple[float, float]:
  """Two-sample Kolmogorov-Smirnov test: (distance, p-value).

  The asymptotic p-value; with ties, as in confidences of 1, it is too large
  rather than too small.
  """
  result = stats.ks_2samp(calibration, window, method='asymp')
  return float(result.statistic), float(result.pvalue)


def share_test(
  calibration: Bool[np.ndarray, ' N'], window: Bool[np.ndarray, ' W']
) -> tuple[float, float]:
  """Chi-square test of homogeneity: (population stability index, p-value).

  The p-value is 1 where there are too few rows of one kind for the test.
  """
  table = np.array(
    [[sure.sum(), len(sure) - sure.sum()] for sure in (calibration, window)],
    np.float64,
  )
  smoothed = table + 0.5
  first, second = smoothed / smoothed.sum(axis=1, keepdims=True)
  psi = float(((second - first) * np.log(second / first)).sum())
  expected = table.sum(axis=1)[:, None] * table.sum(axis=0) / table.sum()
  if expected.min() < MIN_EXPECTED:
    return psi, 1.0
  return psi, float(stats.chi2_contingency(table, correction=False).pvalue)
