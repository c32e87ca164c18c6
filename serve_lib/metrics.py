"""The statistics of an engine in the format of Prometheus."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import core, registry

# Of `Monitor.snapshot`: name, words, label of a mapping, is it a counter?
_STATISTICS = (
  ('answers', 'Rows that were answered', '', True),
  ('failures', 'Rows that failed, by what failed', 'during', True),
  ('depth', 'Rows by the depth at which they left', 'depth', True),
  ('reasons', 'Rows by the reason for which they left', 'reason', True),
  ('latency', 'Seconds in the engine, of the last rows', 'quantile', False),
  ('retention', 'Share of tokens kept, of the last rows', 'quantile', False),
  ('fill', 'Share of batch slots that held rows', 'stage', False),
  ('mean_depth', 'Mean depth at which rows left', '', False),
  ('rows_per_second', 'Rate of the last answers', '', False),
)


class EngineMetrics(registry.Collector):
  """Reads `Monitor.snapshot` and `Engine.status` of an engine when asked.

  Metrics begin with `engine_`. Numbers of the drift check, of `DriftCheck`, are
  `engine_drift_*`, those of the status `engine_pending` and so on.
  """

  def __init__(self, engine: Any):
    self._engine = engine

  def collect(self) -> Iterator[core.Metric]:
    """Yields the metrics, without those that have no value yet."""
    snapshot = self._engine.monitor.snapshot()
    for name, words, label, is_counter in _STATISTICS:
      yield _metric(name, words, snapshot[name], label, is_counter)
    for name, value in snapshot.get('drift', {}).items():
      yield _metric(f'drift_{name}', 'Drift check', value)
    for name, value in self._engine.status().items():
      yield _metric(name, 'Held by the engine now, or at most', value)


def _metric(
  name: str, words: str, value: Any, label: str = '', is_counter: bool = False
) -> core.Metric:
  """Returns a number, or numbers by label, as a metric."""
  kind: Any = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
  family = kind(f'engine_{name}', words, labels=[label] if label else [])
  values = value if isinstance(value, Mapping) else {'': value}
  for key, number in values.items():
    if label == 'quantile':  # 'p95'
      key = int(key[1:]) / 100
    if number is not None:
      family.add_metric([str(key)] if label else [], float(number))
  return family
