"""Does the traffic still look like the calibration split?

Thresholds hold for data like those they were found on. Two statistical tests
compare a sliding window of the traffic with the calibration split: the
two-sample Kolmogorov-Smirnov test on confidences, and the chi-square test of
homogeneity on exit depths, each at half the significance (Bonferroni). A test
counts only if the difference also matters in size (the Kolmogorov-Smirnov
distance, the population stability index): with enough rows any difference is
significant.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

MIN_EXPECTED = 5.0  # rows per cell from which on chi-square is accurate


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What the calibration split looks like.

  Attributes:
    confidences: a sorted sample of its confidences.
    depths: rows by depth at which they leave.
  """

  confidences: Float[np.ndarray, ' N']
  depths: Mapping[int, int]

  @classmethod
  def of(
    cls,
    confidences: Float[np.ndarray, ' N'],
    depths: Int[np.ndarray, ' N'],
    limit: int = 4096,
  ) -> 'Calibration':
    """Summarises a split; of more than `limit` rows evenly spaced ones.

    Raises:
      ValueError: there are no rows, or not as many of each.
    """
    if len(confidences) != len(depths) or not len(depths):
      raise ValueError(
        'calibration: expected a confidence and a depth for each row, got '
        f'{len(confidences)} and {len(depths)}'
      )
    ordered = np.sort(np.asarray(confidences, np.float64))
    count = min(limit, len(ordered))
    places = np.linspace(0, len(ordered) - 1, count).round().astype(int)
    values, counts = np.unique(depths, return_counts=True)
    table = zip(values.tolist(), counts.tolist(), strict=True)
    return cls(ordered[places], dict(table))

  def as_dict(self) -> dict[str, Any]:
    """Plain numbers for JSON."""
    depths = {str(depth): count for depth, count in self.depths.items()}
    return {'confidences': self.confidences.tolist(), 'depths': depths}

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> 'Calibration':
    """The inverse of `as_dict`."""
    depths = {int(d): int(count) for d, count in values['depths'].items()}
    return cls(np.array(values['confidences'], np.float64), depths)


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
      held, in the thread that added the row.
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
    self._rows: collections.deque[tuple[float, int]] = collections.deque(
      maxlen=window
    )
    self._since_test = 0
    self._in_a_row = 0
    self._report: dict[str, Any] = {'tests': 0}

  def add(self, confidence: float, depth: int) -> None:
    """One row of traffic."""
    with self._lock:
      self._rows.append((confidence, depth))
      self._since_test += 1
      is_full = len(self._rows) == self._rows.maxlen
      if not is_full or self._since_test < self.every:
        return
      self._since_test = 0
      turned = self._test()
      report = dict(self._report)
    if turned and self._on_drift is not None:
      self._on_drift(self.drifted, report)

  def report(self) -> dict[str, Any]:
    """The last test, plain numbers; and whether drift is on."""
    with self._lock:
      return self._report | {'drifted': self.drifted}

  def _test(self) -> bool:
    """Tests the window; whether drift has turned on or off."""
    confidences = np.array([row[0] for row in self._rows])
    depths = collections.Counter(row[1] for row in self._rows)
    distance, confidence_p = confidence_test(
      self.calibration.confidences, confidences
    )
    psi, depth_p = depth_test(self.calibration.depths, depths)
    self._report = {
      'tests': self._report['tests'] + 1,
      'distance': distance,
      'confidence_p': confidence_p,
      'psi': psi,
      'depth_p': depth_p,
    }
    # To turn off, the evidence must be ten times weaker than to turn on.
    level = self.significance / 2 * (10 if self.drifted else 1)
    found = (confidence_p < level and distance >= self.min_distance) or (
      depth_p < level and psi >= self.min_psi
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


def depth_test(
  calibration: Mapping[int, int], window: Mapping[int, int]
) -> tuple[float, float]:
  """Chi-square test of homogeneity: (population stability index, p-value).

  Depths too rare for the test are counted together, rarest first.
  """
  depths = sorted({*calibration, *window})
  table = np.array(
    [[counts.get(depth, 0) for depth in depths] for counts in
     (calibration, window)], np.float64,
  )  # fmt: skip
  smoothed = table + 0.5
  first, second = smoothed / smoothed.sum(axis=1, keepdims=True)
  psi = float(((second - first) * np.log(second / first)).sum())
  table = table[:, np.argsort(-table.sum(axis=0), kind='stable')]
  while table.shape[1] > 1 and _expected(table).min() < MIN_EXPECTED:
    merged = table[:, -2:].sum(axis=1, keepdims=True)
    table = np.concatenate([table[:, :-2], merged], axis=1)
  if table.shape[1] < 2:
    return psi, 1.0
  return psi, float(stats.chi2_contingency(table, correction=False).pvalue)


def _expected(table: Float[np.ndarray, '2 K']) -> Float[np.ndarray, '2 K']:
  """Counts to expect in each cell if both rows are alike."""
  rows, columns = table.sum(axis=1), table.sum(axis=0)
  return rows[:, None] * columns[None] / table.sum()
