"""The statistics of an engine in the format of Prometheus."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import core, registry

# Of `Monitor.snapshot`: what is counted, and labels of mappings.
_COUNTS = ('answers', 'failures', 'depth', 'reasons')
_LABELS = dict(
  failures='during', depth='depth', reasons='reason', latency='quantile',
  retention='quantile', fill='stage',
)  # fmt: skip


class EngineMetrics(registry.Collector):
  """Reads `Monitor.snapshot` and `Engine.status` when it is asked.

  Names are theirs after `engine_`, those of a drift check after
  `engine_drift_`; None is left out.
  """

  def __init__(self, engine: Any):
    self._engine = engine

  def collect(self) -> Iterator[core.Metric]:
    """Yields the metrics."""
    values = self._engine.monitor.snapshot() | self._engine.status()
    drift = values.pop('drift', {})
    values |= {f'drift_{name}': number for name, number in drift.items()}
    for name, value in values.items():
      is_count, label = name in _COUNTS, _LABELS.get(name)
      kind = core.CounterMetricFamily if is_count else core.GaugeMetricFamily
      labels = [label] if label else []
      metric = kind(f'engine_{name}', 'See docs/serving.md', labels=labels)
      for key, number in value.items() if label else [('', value)]:
        if label == 'quantile':  # 'p95'
          key = int(key[1:]) / 100
        if number is not None:
          metric.add_metric([str(key)] if labels else [], float(number))
      yield metric
