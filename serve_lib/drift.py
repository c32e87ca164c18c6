"""Drift of the traffic away from the calibration split.

Thresholds hold for data like the calibration data. The confidence of the first
head is compared: every row passes it, also while all rows run to full depth.
"""

import collections
import dataclasses
import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from serve_lib.process import shielded

MIN_EXPECTED = 5.0  # rows per cell from which on chi-square is accurate


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Confidences of the first head on the calibration split, and a threshold."""

  confidences: Float[np.ndarray, ' N']
  threshold: float

  def __post_init__(self):
    given = np.append(self.confidences, self.threshold)
    # In float32 a softmax may exceed 1 by rounding.
    if len(given) < 2 or not ((given >= 0) & (given < 1.001)).all():
      raise ValueError(
        'calibration: expected at least one confidence and a threshold, all in '
        f'[0, 1], got {self.confidences} and {self.threshold}'
      )

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> 'Calibration':
    """Reads the result of `eval_lib.calibration.drift_statistics`."""
    confidences = np.array(values['confidences'], np.float64)
    return cls(confidences, float(values['threshold']))

  def sure(
    self, confidences: Float[np.ndarray, ' W']
  ) -> Bool[np.ndarray, ' W']:
    """Returns confidences >= threshold, in float32 as the exit rule does."""
    return confidences.astype(np.float32) >= np.float32(self.threshold)


@dataclasses.dataclass(eq=False)
class DriftCheck:
  """Compares traffic with a calibration, with hysteresis. Thread-safe.

  Two tests compare a sliding window of the traffic with the calibration split,
  each at half the significance (Bonferroni): Kolmogorov-Smirnov on the
  confidences, chi-square on the share of sure ones. A rejection counts only if
  the difference is large as well: with enough rows any one is significant.
  Drift ends when neither test rejects at ten times the significance or both
  differences are small.

  `on_drift` is called with (drifted, report) when drift begins or ends, without
  a lock, in the thread that added the row; its errors are logged.
  """

  calibration: Calibration
  window: int = 512  # rows that are compared, at least 20
  every: int = 128  # rows from one test of a full window to the next
  significance: float = 1e-4  # probability of a false alarm, in (0, 0.1)
  min_distance: float = 0.1  # smallest relevant Kolmogorov-Smirnov distance
  # Smallest relevant population stability index: .1 is a small shift by
  # convention, .25 a large one.
  min_psi: float = 0.1
  confirm: int = 2  # tests in a row that begin drift
  recover: int = 4  # tests in a row that end it
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None
  drifted: bool = dataclasses.field(default=False, init=False)

  def __post_init__(self):
    # Slow to import: not when a run trains, and not in the first check.
    importlib.import_module('scipy.stats')
    if self.window < 20:
      raise ValueError(f'drift.window: expected at least 20, got {self.window}')
    if not 0.0 < self.significance < 0.1:
      raise ValueError(
        'drift.significance: expected a number in (0, 0.1), got '
        f'{self.significance}'
      )
    self._lock = threading.Lock()
    self._rows = collections.deque[float](maxlen=self.window)
    self._since_test = self._in_a_row = 0
    self._report: dict[str, Any] = {'tests': 0}

  def add(self, confidence: float) -> None:
    """Adds the first head's confidence of one row."""
    with self._lock:
      self._rows.append(confidence)
      self._since_test += 1
      if len(self._rows) < self.window or self._since_test < self.every:
        return
      self._since_test = 0
      turned = self._test()
      report = dict(self._report)
    if turned and self.on_drift is not None:
      shielded(self.on_drift, self.drifted, report)

  def report(self) -> dict[str, Any]:
    """Returns the numbers of the last test, and `drifted`."""
    with self._lock:
      return self._report | {'drifted': self.drifted}

  def _test(self) -> bool:
    """Tests the window; returns True if drift has begun or ended."""
    normal, confidences = self.calibration.confidences, np.array(self._rows)
    distance, confidence_p = confidence_test(normal, confidences)
    expected, sure = map(self.calibration.sure, (normal, confidences))
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
  """Returns (distance, asymptotic p-value) of the Kolmogorov-Smirnov test."""
  from scipy import stats

  result = stats.ks_2samp(calibration, window, method='asymp')
  return float(result.statistic), float(result.pvalue)


def share_test(
  calibration: Bool[np.ndarray, ' N'], window: Bool[np.ndarray, ' W']
) -> tuple[float, float]:
  """Returns (population stability index, p-value) of the chi-square test.

  The p-value is 1 if there are too few rows of a kind.
  """
  from scipy import stats

  table = np.array([[x.sum(), (~x).sum()] for x in (calibration, window)])
  first, second = (table + 0.5) / (table + 0.5).sum(axis=1, keepdims=True)
  psi = float(((second - first) * np.log(second / first)).sum())
  if stats.contingency.expected_freq(table).min() < MIN_EXPECTED:
    return psi, 1.0
  return psi, float(stats.chi2_contingency(table, correction=False).pvalue)
