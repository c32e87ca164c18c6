"""Running statistics of a service, in bounded memory.

The engine records batches, latencies and failures, the policy its decisions
(`record_exit`). Counts are of all records; percentiles and rates are of the
last `window` records.
"""

import collections
import threading
import time
from collections.abc import Callable, Iterable
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
    counters = [collections.Counter[Any]() for _ in range(5)]
    self._depths, self._reasons, self._failures, *counts = counters
    self._rows, self._slots = counts
    latest = [collections.deque[float](maxlen=window) for _ in range(3)]
    self._answered, self._seconds, self._retention = latest

  @property
  def full_depth(self) -> bool:
    """True during drift, when every row should run to the last stage."""
    return self.drift is not None and self.drift.drifted

  def record_batch(self, stage: int, rows: int, size: int) -> None:
    """Records a batch of `rows` rows in a bucket of `size`."""
    with self._lock:
      self._rows[stage] += rows
      self._slots[stage] += size

  def record_answer(self, seconds: float) -> None:
    """Records an answer and its latency in seconds."""
    with self._lock:
      self._answers += 1
      self._seconds.append(seconds)
      self._answered.append(self._clock())

  def record_failure(self, during: str) -> None:
    """Records a `Failure`."""
    with self._lock:
      self._failures[during] += 1

  def record_exit(
    self,
    depth: int,
    reason: str,
    confidence: float | None,
    retention: float = 1.0,
  ) -> None:
    """Records a row that left.

    Args:
      depth: layers, iterations or tape tokens that ran.
      reason: one of a few names.
      confidence: of the first head, for the drift check: later heads see other
        rows during drift. None for a row that is not to be compared.
      retention: share of the row's tokens that were left at the end.
    """
    with self._lock:
      known = reason in self._reasons or len(self._reasons) < MAX_REASONS
      self._depths[depth] += 1
      self._reasons[reason if known else 'other'] += 1
      self._retention.append(retention)
    if self.drift is not None and confidence is not None:
      self.drift.add(confidence)

  def snapshot(self) -> dict[str, Any]:
    """Returns the statistics as plain numbers, ready for JSON.

    `depth` and `reasons` are counts, `fill` the share of batch slots that held
    rows by stage, `latency` in seconds; None without records.
    """
    with self._lock:
      exits = sum(self._depths.values())
      total = sum(depth * count for depth, count in self._depths.items())
      result = {
        'answers': self._answers,
        'failures': dict(self._failures),
        'rows_per_second': self._rate(),
        'latency': _percentiles(self._seconds, (50, 95, 99)),
        'depth': dict(sorted(self._depths.items())),
        'mean_depth': total / exits if exits else None,
        'reasons': dict(self._reasons),
        'retention': _percentiles(self._retention, (5, 50, 95)),
        'fill': {
          stage: self._rows[stage] / slots
          for stage, slots in sorted(self._slots.items())
        },
      }
    if self.drift is not None:
      result['drift'] = self.drift.report()
    return result

  def _rate(self) -> float:
    if len(self._answered) < 2:
      return 0.0
    # Until now and not the last answer, so that the rate falls without answers.
    passed = self._clock() - self._answered[0]
    return (len(self._answered) - 1) / passed if passed > 0 else 0.0


def _percentiles(
  values: Iterable[float], which: tuple[int, ...]
) -> dict[str, float | None]:
  array = np.array([*values])
  found = np.percentile(array, which).tolist() if array.size else [None] * 3
  return {f'p{p}': value for p, value in zip(which, found, strict=True)}
