"""Running statistics of a service, in bounded memory.

The engine records batches, latencies and failures, the policy its decisions
(`record_exit`). Counts are of all records; percentiles and rates are of the
last `window` records.
"""

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from serve_lib.drift import DriftCheck

MAX_REASONS = 64  # further exit reasons count as 'other'


class Monitor:
  """Thread-safe running statistics.

  Args:
    window: records of the percentiles and rates, at least 2.
    drift: gets the first confidence of every row; None for no check.
    clock: monotonic seconds.
  """

  def __init__(
    self,
    window: int = 4096,
    drift: DriftCheck | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    if window < 2:
      raise ValueError(f'monitor.window: expected at least 2, got {window}')
    self.drift = drift
    self._clock, self._lock, self._answers = clock, threading.Lock(), 0
    self._counts = collections.defaultdict[str, Any](collections.Counter)
    self._latest = collections.defaultdict[str, Any](
      lambda: collections.deque(maxlen=window)
    )

  @property
  def full_depth(self) -> bool:
    """True during drift, when every row should run to the last stage."""
    return self.drift is not None and self.drift.drifted

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
  ) -> None:
    """Records a row that left, and the share of its tokens left at the end.

    The confidence is that of the first head; None for a row that the drift
    check is not to compare.
    """
    with self._lock:
      reasons = self._counts['reasons']
      known = reason in reasons or len(reasons) < MAX_REASONS
      reasons[reason if known else 'other'] += 1
      self._counts['depth'][depth] += 1
      self._latest['retention'].append(retention)
    if self.drift is not None and confidence is not None:
      self.drift.add(confidence)

  def snapshot(self) -> dict[str, Any]:
    """Returns the statistics as plain numbers, ready for JSON.

    `depth` and `reasons` are counts, `fill` the share of batch slots that held
    rows by stage, `latency` in seconds; None without records.
    """
    with self._lock:
      counts, depths = self._counts, dict(sorted(self._counts['depth'].items()))
      exits = sum(depths.values())
      total = sum(depth * count for depth, count in depths.items())
      result = {
        'answers': self._answers,
        'failures': dict(counts['failures']),
        'rows_per_second': self._rate(),
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
    if self.drift is not None:
      result['drift'] = self.drift.report()
    return result

  def _rate(self) -> float:
    answered = self._latest['answered']
    if len(answered) < 2:
      return 0.0
    # Until now and not the last answer, so that the rate falls without answers.
    passed = self._clock() - answered[0]
    return (len(answered) - 1) / passed if passed > 0 else 0.0

  def _percentiles(
    self, name: str, which: tuple[int, ...]
  ) -> dict[str, float | None]:
    values = np.array(self._latest[name])
    found = np.percentile(values, which).tolist() if values.size else [None] * 3
    return {f'p{p}': value for p, value in zip(which, found, strict=True)}
