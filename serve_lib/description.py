"""What a server says of itself: `GET /`, its OpenAPI, its metrics."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
  CounterMetricFamily,
  GaugeMetricFamily,
  Metric,
)

from core import VERSION, machine
from serve_lib.decisions import GUARANTEED, ClassifierPolicy
from serve_lib.items import (
  ImageReader,
  ItemReader,
  Reader,
  TextReader,
  TokenReader,
)

ENDPOINTS = {
  'POST /predict': 'the answer to an item, or those to `items` in their order',
  'GET /': 'this description of the model',
  'GET /openapi.json': 'the requests and answers in OpenAPI',
  'GET /healthz': '200 while the process works',
  'GET /readyz': '200 once the programs are compiled, before that 503',
  'GET /metrics': 'numbers for Prometheus',
}
# A black pixel.
_PNG = (
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVQIHWNgAAAAAgABz8g15QAA'
  'AABJRU5ErkJggg=='
)
# Fields of a policy that are no options; warnings have paths of the server.
_OTHERS = (
  'chain reader monitor warnings about class_names kept_tokens certified'
)
_EXITS = 'heads rule thresholds ensemble_margin'  # of a model that has some
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
  'engine_task_depth_total{task,depth}': 'rows by the depth of a task',
  'engine_task_mean_depth{task}': 'mean depth of a task',
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


def about(engine: Any, name: str) -> dict[str, Any]:
  """Returns the answer to `GET /` but `ready`, as JSON without paths.

  Any policy but a `ClassifierPolicy` says nothing of its model.
  """
  policy, example = engine.policy, dict[str, Any]()
  found: dict[str, Any] = {'name': name, 'version': VERSION}
  options = {'largest_batch': engine.grid.capacity, 'backend': engine.backend}
  options['threads'] = machine.cores()
  if isinstance(policy, ClassifierPolicy):
    names = {field.name for field in dataclasses.fields(policy)}
    names -= {*_OTHERS.split()}
    if policy.chain.num_stages == 1:
      names -= {*_EXITS.split()}
    kinds = 'string' if policy.class_names else ['string', 'number']
    one: Any = {'label': kinds, 'probabilities': 'object', **policy.FIELDS}
    if 'tasks' in names:  # each has its own
      names -= {'temperatures', 'several'}
      one = {'tasks': {'<name>': one}, **policy.FIELDS}
    elif policy.several:
      one['labels'] = 'array'
    found['answer'] = one
    options |= {name: getattr(policy, name) for name in sorted(names)}
    options['setting'] = GUARANTEED if policy.certified else 'trained'
    found = policy.about | found | {'labels': policy.class_names}
    if isinstance(policy.reader, Reader):
      options['reader'] = policy.reader.recipe
      example = sample(policy.reader)
  found |= {'options': options, 'endpoints': ENDPOINTS}
  found['example'] = {'POST /predict': example}
  text = json.dumps(found, default=repr)  # of rules
  # A threshold may be infinite, which JSON has not.
  return dict(json.loads(text, parse_constant=str))


def sample(reader: Reader) -> dict[str, Any]:
  """Returns an item as JSON; of puzzles its form, else {}."""
  if isinstance(reader, TextReader):
    pair = {'pair': 'It is fun.'} if reader.num_texts == 2 else {}
    texts = {'text': 'A good film.', **pair}
    return texts if reader.tokenizer else {'tokens': [0]}
  if isinstance(reader, TokenReader):
    return {'tokens': [0] * reader.count}
  if isinstance(reader, ImageReader):
    return {reader.NAME: _PNG}
  if isinstance(reader, ItemReader):
    return {reader.NAME: 'a text'}
  return {}


def openapi(about: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the OpenAPI 3.1 description of a service that says `about`."""
  example, text = about['example']['POST /predict'], {'type': 'string'}
  own: dict[str, Any] = {'id': {'type': ['string', 'number']}}
  late = {'deadline_ms': {'type': 'number', 'exclusiveMinimum': 0}}
  for name, value in example.items():
    own[name] = text if isinstance(value, str) else {'type': 'array'}
  item = _object(example, own)
  batch = {'items': {'type': 'array', 'items': item, 'minItems': 1}}
  body = [_object(example, own | late), _object(batch, batch | late)]
  error = _object(['error'], {'error': text, 'id': own['id']})
  answer = _answer(about.get('answer', {}), {'id': own['id']})
  many = {'answers': {'type': 'array', 'items': {'anyOf': [answer, error]}}}
  paths: dict[str, Any] = {}
  for endpoint, words in ENDPOINTS.items():
    method, path = endpoint.lower().split()
    paths[path] = {method: {'responses': {'200': {'description': words}}}}
  predict = paths['/predict']['post']
  predict['requestBody'] = _json({'anyOf': body}, example=example)
  predict['responses']['200'] |= _json({'anyOf': [answer, _object(many, many)]})
  predict['responses']['default'] = {'description': 'an error'} | _json(error)
  info = {'title': about['name'], 'version': about['version']}
  return {'openapi': '3.1.0', 'info': info, 'paths': paths}


def _answer(fields: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
  """Returns the schema of an answer, or of that of a task, by its fields."""
  shares = {'type': 'object', 'additionalProperties': {'type': 'number'}}
  legal = {**{n: {'type': kind} for n, kind in fields.items()}, **own}
  if 'tasks' in fields:
    [each] = fields['tasks'].values()
    tasks = {'type': 'object', 'additionalProperties': _answer(each, {})}
    return _object(['tasks'], {**legal, 'tasks': tasks})
  needed = ['label', 'probabilities']
  return _object(needed, {'label': {}, **legal, 'probabilities': shares})


def _json(schema: Any, **more: Any) -> dict[str, Any]:
  return {'content': {'application/json': {'schema': schema, **more}}}


def _object(required: Iterable[str], properties: Any) -> dict[str, Any]:
  legal = {'type': 'object', 'properties': properties}
  return {**legal, 'required': [*required]}


def metrics(engine: Any, own: Mapping[str, Any]) -> Iterator[Metric]:
  """Yields the numbers of an engine, and the service's `own` by name.

  The keys of a mapping are values of its label. None is left out.
  """
  seen = engine.monitor.snapshot() | engine.status()
  seen['latency_seconds'] = seen.pop('latency')
  drift, sources = seen.pop('drift', {}), seen.pop('drift_by_source', {})
  seen |= {f'drift_{name}': value for name, value in drift.items()}
  tasks = engine.monitor.parts  # their sources are 'task=source'
  for source, report in sources.items():
    task, _, own_source = source.partition('=')
    for name, value in report.items():
      held = seen.setdefault(_BY_SOURCE + name, {})
      held, key = (
        (held.setdefault(task, {}), own_source) if tasks else (held, source)
      )
      held[key] = value
  values = {f'engine_{name}': value for name, value in seen.items()}
  for name, value in {**values, **own}.items():
    plain = name.replace(_BY_SOURCE, 'drift_')
    is_count = f'{plain}_total' in _SHOWN
    shown = _SHOWN[f'{plain}_total' if is_count else plain]
    label = 'task,source' if tasks else 'source'
    if plain == name:
      label = shown.partition('{')[2][:-1]
    labels = label.split(',') if label else []
    kind = CounterMetricFamily if is_count else GaugeMetricFamily
    metric = kind(name, METRICS[shown], labels=labels)
    for keys, number in _leaves(value, len(labels)):
      if label == 'quantile':  # 'p95'
        keys = (int(keys[0][1:]) / 100,)
      if number is not None:
        metric.add_metric([*map(str, keys)], float(number))
    yield metric


def _leaves(value: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
  """Yields the keys and the value of each leaf of nested mappings."""
  if not depth:
    yield (), value
    return
  for key, inner in value.items():
    for keys, leaf in _leaves(inner, depth - 1):
      yield (key, *keys), leaf
