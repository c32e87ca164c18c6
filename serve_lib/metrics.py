"""The metrics of a service for Prometheus: names, units, meaning."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import core

# Upper limits of the buckets of a histogram, which adds up over servers.
SECONDS = (
  .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30,
)  # fmt: skip
_RECENT = 'last 4096 rows'
# Suffixes: `_total` of counts, `{label}` of several values.
METRICS = {
  'engine_answers_total': 'rows answered',
  'engine_failures_total{during}': 'rows that failed, by the step that failed',
  'engine_truncated_total': 'rows whose text was cut off',
  'engine_rows_per_second': f'rate of answers, {_RECENT}',
  'engine_latency_seconds{quantile}': f'seconds in the engine, {_RECENT}',
  'engine_depth_total{depth}': 'rows by the depth at which they left',
  'engine_mean_depth': 'mean depth of all rows',
  'engine_reasons_total{reason}': 'rows by the reason for which they left',
  'engine_retention{quantile}': f'share of tokens kept or steps run, {_RECENT}',
  'engine_fill{stage}': 'share of the slots of batches in use, 0 to 1',
  'engine_rows_by_difficulty_total{least}': 'puzzles by least difficulty',
  'engine_mean_depth_by_difficulty{least}': 'mean depth of these puzzles',
  'engine_pending': 'rows in the engine without an answer',
  'engine_peak_pending': 'most rows in the engine at a time',
  'engine_queued_rows': 'rows that wait for the first stage',
  'engine_queue_bytes': 'host memory of these rows, in bytes',
  'engine_pooled_rows': 'rows that wait between stages',
  'engine_pool_bytes': 'memory of these rows, in bytes',
  'engine_peak_pool_bytes': 'most memory of rows between stages, in bytes',
  'engine_copies': 'copies of rows from one batch to another',
  'engine_drift_drifted': '1 during drift, when rows run at full depth',
  'engine_drift_tests': 'tests for drift so far',
  'engine_drift_distance': 'distance of the confidences, 0 to 1 (Kolmogorov)',
  'engine_drift_confidence_p': 'p-value of this distance',
  'engine_drift_sure_share': 'share of confident rows, 0 to 1',
  'engine_drift_expected_share': 'this share in the calibration',
  'engine_drift_psi': 'population stability index of this share',
  'engine_drift_share_p': 'p-value of this share',
  'http_waiting_rows': 'rows that wait for room in the engine',
  'http_responses_total{status}': 'answers to /predict by their status',
}
_BY_SOURCE = 'drift_by_source_'
_SHOWN = {name.partition('{')[0]: name for name in METRICS}


def families(engine: Any, own: Mapping[str, Any]) -> Iterator[core.Metric]:
  """Yields the numbers of an engine, and the service's `own` by name.

  The keys of a mapping are values of its label. None is left out.
  """
  seen = engine.monitor.snapshot() | engine.status()
  seen['latency_seconds'] = seen.pop('latency')
  drift, sources = seen.pop('drift', {}), seen.pop('drift_by_source', {})
  seen |= {f'drift_{name}': value for name, value in drift.items()}
  for source, report in sources.items():
    for name, value in report.items():
      seen.setdefault(_BY_SOURCE + name, {})[source] = value
  values = {f'engine_{name}': value for name, value in seen.items()}
  for name, value in {**values, **own}.items():
    plain = name.replace(_BY_SOURCE, 'drift_')
    is_count = f'{plain}_total' in _SHOWN
    shown = _SHOWN[f'{plain}_total' if is_count else plain]
    label = shown.partition('{')[2][:-1] if plain == name else 'source'
    kind = core.CounterMetricFamily if is_count else core.GaugeMetricFamily
    metric = kind(name, METRICS[shown], labels=[label] if label else [])
    for key, number in value.items() if label else [('', value)]:
      if label == 'quantile':  # 'p95'
        key = int(key[1:]) / 100
      if number is not None:
        metric.add_metric([str(key)], float(number))
    yield metric
