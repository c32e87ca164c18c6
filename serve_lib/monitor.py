"""Running statistics of a service, in bounded memory, and drift of its traffic.

The engine records batches, latencies and failures, the policy its decisions.
Thresholds hold for data like the calibration data, so the confidence of the
first head, which every row passes, is compared with that of these data.
"""

import collections
import dataclasses
import logging
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

OnDrift = Callable[[bool, dict[str, Any]], None]  # see `DriftCheck`

MAX_REASONS = 64  # further exit reasons count as 'other'
MIN_EXPECTED = 5.0  # rows per cell from which on chi-square is accurate


@dataclasses.dataclass(eq=False)
class DriftCheck:
  """Compares traffic with a calibration split, with hysteresis. Thread-safe.

  Two tests compare a sliding window of the traffic with the split, each at half
  the significance (Bonferroni): Kolmogorov-Smirnov on the confidences,
  chi-square on the share >= `threshold`. A rejection counts only if the
  difference is large as well: with enough rows any becomes significant. Drift
  ends when no test rejects at ten times the significance with a large one.

  `on_drift` is called with (drifted, report) when drift begins or ends, without
  a lock, in the thread that added the row; its errors are logged.
  """

  confidences: Float[np.ndarray, ' N']  # of the first head on the split
  threshold: float  # rows with confidence >= it are sure
  # Of another model that serves during drift, whose rows are compared with
  # them; a turn empties the window. None: the same model.
  during: Float[np.ndarray, ' D'] | None = None
  window: int = 512  # rows that are compared
  every: int = 128  # rows from one test of a full window to the next
  significance: float = 1e-4  # probability of a false alarm
  min_distance: float = 0.1  # smallest relevant Kolmogorov-Smirnov distance
  # Smallest relevant population stability index; by convention .25 is large.
  min_psi: float = 0.1
  confirm: int = 2  # tests in a row that begin drift
  recover: int = 4  # tests in a row that end it
  source: str = ''  # of the rows, for the report
  on_drift: OnDrift | None = None
  drifted: bool = dataclasses.field(default=False, init=False)

  def __post_init__(self):
    during = () if self.during is None else self.during
    values = np.concatenate([self.confidences, [self.threshold], during])
    # In float32 a softmax may exceed 1 by rounding.
    is_legal = ((values >= 0) & (values < 1.001)).all()
    if not len(self.confidences) or not is_legal:
      raise ValueError(
        'calibration: expected at least one confidence and a threshold, all in '
        f'[0, 1], got {self.confidences} and {self.threshold}'
      )
    self._lock = threading.Lock()
    self._rows = collections.deque[float](maxlen=self.window)
    self._since_test = self._in_a_row = 0
    self._report: dict[str, Any] = {'tests': 0}

  def add(self, confidence: float) -> None:
    """Adds the first head's confidence of one row, of the model that serves."""
    with self._lock:
      self._rows.append(confidence)
      self._since_test += 1
      if len(self._rows) < self.window or self._since_test < self.every:
        return
      self._since_test = 0
      turned = self._test()
      if turned and self.during is not None:
        self._rows.clear()
      report = {'source': self.source, **self._report}
    if turned and self.on_drift is not None:
      shielded(self.on_drift, self.drifted, report)

  def report(self) -> dict[str, Any]:
    """Returns the numbers of the last test, and `drifted`."""
    with self._lock:
      return self._report | {'drifted': self.drifted}

  def _test(self) -> bool:
    """Tests the window; returns True if drift has begun or ended."""
    from scipy import stats  # slow to import, and training does not need it

    confidences, reference = np.array(self._rows), self.confidences
    if self.drifted and self.during is not None:
      reference = self.during
    # Equal logits differ by rounding, of one softmax in float32.
    both = reference.round(6), confidences.round(6)
    distance, confidence_p = map(float, stats.ks_2samp(*both, method='asymp'))
    # In float32 as the exit rule does.
    expected, sure = (
      x.astype(np.float32) >= np.float32(self.threshold)
      for x in (reference, confidences)
    )
    psi, share_p = share_test(expected, sure)
    self._report = {
      'tests': self._report['tests'] + 1,
      'distance': distance, 'confidence_p': confidence_p,
      'sure_share': float(sure.mean()),
      'expected_share': float(expected.mean()),
      'psi': psi, 'share_p': share_p,
    }  # fmt: skip
    level = self.significance / 2 * (10 if self.drifted else 1)
    drifts = (confidence_p < level and distance >= self.min_distance) or (
      share_p < level and psi >= self.min_psi
    )
    self._in_a_row = self._in_a_row + 1 if drifts != self.drifted else 0
    if self._in_a_row < (self.recover if self.drifted else self.confirm):
      return False
    self.drifted, self._in_a_row = drifts, 0
    return True


class Monitor:
  """Thread-safe running statistics; `drift` gets first-head confidences.

  Rows of a source in `sources` have a check of their own.
  """

  def __init__(
    self,
    window: int = 4096,
    drift: DriftCheck | None = None,
    clock: Callable[[], float] = time.monotonic,
    sources: Mapping[str, DriftCheck] = types.MappingProxyType({}),
  ):
    self.drift, self.sources = drift, sources
    self.parts: Mapping[str, Monitor] = {}  # of several tasks, by name
    self._clock, self._lock = clock, threading.Lock()
    self._answers = self._truncated = 0
    self._counts = collections.defaultdict[str, Any](collections.Counter)
    self._latest = collections.defaultdict[str, Any](
      lambda: collections.deque(maxlen=window)
    )

  def full_depth(self, source: str = '') -> bool:
    """Returns True during drift, when rows should run to the last stage."""
    drift = self.sources.get(source, self.drift)
    return drift is not None and drift.drifted

  def record_batch(self, stage: int, rows: int, size: int) -> None:
    """Records a batch of `rows` rows in a bucket of `size`."""
    with self._lock:
      self._counts['rows'][stage] += rows
      self._counts['slots'][stage] += size

  def record_answer(self, seconds: float) -> None:
    """Records an answer and its latency in seconds."""
    with self._lock:
      self._answers += 1
      self._latest['seconds'].append(seconds)
      self._latest['answered'].append(self._clock())

  def record_failure(self, during: str) -> None:
    """Records a `Failure`."""
    with self._lock:
      self._counts['failures'][during] += 1

  def record_exit(
    self,
    depth: int,
    reason: str,
    confidence: float | None,
    retention: float = 1.0,
    source: str = '',
    truncated: bool = False,
    difficulty: int | None = None,
  ) -> None:
    """Records a row that left, its depth and the share of its tokens kept.

    A family says what these are, see `ClassifierPolicy.describe`. `confidence`
    is that of the first head; None excludes the row from the drift check.
    `difficulty` >= 0, if it is known, counts in levels that double.
    """
    with self._lock:
      reasons = self._counts['reasons']
      is_kept = reason in reasons or len(reasons) < MAX_REASONS
      reasons[reason if is_kept else 'other'] += 1
      self._counts['depth'][depth] += 1
      self._truncated += truncated
      if difficulty is not None:
        least = 1 << difficulty.bit_length() >> 1
        self._counts['level_rows'][least] += 1
        self._counts['level_depth'][least] += depth
      self._latest['retention'].append(retention)
    drift = self.sources.get(source, self.drift)
    if drift is not None and confidence is not None:
      drift.add(confidence)

  def snapshot(self) -> dict[str, Any]:
    """Returns the statistics as plain numbers, ready for JSON.

    `depth` and `reasons` are counts of all rows, `fill` the share of batch
    slots that held rows by stage. Percentiles, `latency` in seconds, and rates
    are of the last `window` records; None if there are none. Levels of
    difficulty, by their least, are there if rows have one.
    """
    with self._lock:
      counts, depths = self._counts, dict(sorted(self._counts['depth'].items()))
      exits = sum(depths.values())
      total = sum(depth * count for depth, count in depths.items())
      answered = self._latest['answered'] or [self._clock()]
      # Measured until now, so the rate decays when idle.
      passed, more = self._clock() - answered[0], len(answered) - 1
      result = {
        'answers': self._answers,
        'truncated': self._truncated,
        'failures': dict(counts['failures']),
        'rows_per_second': more / passed if more and passed else None,
        'latency': self._percentiles('seconds', (50, 95, 99)),
        'depth': depths,
        'mean_depth': total / exits if exits else None,
        'reasons': dict(counts['reasons']),
        'retention': self._percentiles('retention', (5, 50, 95)),
        'fill': {
          stage: counts['rows'][stage] / slots
          for stage, slots in sorted(counts['slots'].items())
        },
      }
      if levels := dict(sorted(counts['level_rows'].items())):
        means = {n: counts['level_depth'][n] / levels[n] for n in levels}
        result |= {
          'rows_by_difficulty': levels, 'mean_depth_by_difficulty': means
        }  # fmt: skip
    if self.drift is not None:
      result['drift'] = self.drift.report()
    if self.parts:
      parts = {name: one.snapshot() for name, one in self.parts.items()}
      for key in ('depth', 'mean_depth'):
        result[f'task_{key}'] = {name: one[key] for name, one in parts.items()}
    reports = {name: check.report() for name, check in self.sources.items()}
    return result | ({'drift_by_source': reports} if reports else {})

  def _percentiles(
    self, name: str, which: tuple[int, ...]
  ) -> dict[str, float | None]:
    values = np.array(self._latest[name])
    ranks = np.percentile(values, which).tolist() if values.size else [None] * 3
    return {f'p{p}': value for p, value in zip(which, ranks, strict=True)}


def monitor_of(
  checks: Mapping[str, Any], on_drift: OnDrift | None = None
) -> Monitor:
  """Returns a monitor with a drift check for each source; '' is all others.

  A check is None, or has `confidences`, `threshold` and maybe `during`; see
  `DriftCheck`.
  """
  sources: dict[str, Any] = dict.fromkeys(checks)
  for source, values in checks.items():
    if values is not None:
      confidences, during = values['confidences'], values.get('during')
      sources[source] = DriftCheck(
        np.array(confidences, float), float(values['threshold']),
        None if during is None else np.array(during, float),
        source=source, on_drift=on_drift,
      )  # fmt: skip
  return Monitor(drift=sources.pop('', None), sources=sources)


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


def shielded(function: Callable[..., Any], *arguments: Any) -> None:
  """Calls a user callback; logs whatever it raises, `SystemExit` included."""
  try:
    function(*arguments)
  except BaseException:
    logging.getLogger(__name__).exception('in a callback of the engine')
