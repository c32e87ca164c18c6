"""What a server says of itself: `GET /`, and its OpenAPI description."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from core import VERSION, machine, registry
from serve_lib import bodies
from serve_lib.decisions import GUARANTEED, ClassifierPolicy

ENDPOINTS = {
  'POST /predict': 'the answer to an item, or those to `items` in their order',
  'GET /': 'this description of the model',
  'GET /openapi.json': 'the requests and answers in OpenAPI',
  'GET /healthz': '200 while the process works',
  'GET /readyz': '200 once the programs are compiled, before that 503',
  'GET /metrics': 'numbers for Prometheus',
}
LIMITS = 'max_pending max_waiting max_body_bytes max_pixels max_seconds'
# Fields of a policy that are no options; warnings have paths of the server.
_OTHERS = 'chain reader monitor warnings about class_names kept_tokens'


def about(engine: Any, limits: Any, name: str) -> dict[str, Any]:
  """Returns the answer to `GET /` but `ready`, as JSON without paths.

  Any policy but a `ClassifierPolicy` says nothing of its model.
  """
  policy, found, sample = engine.policy, dict[str, Any](), dict[str, Any]()
  options = {'largest_batch': engine.grid.capacity, 'backend': engine.backend}
  options['threads'] = machine.cores()
  if isinstance(policy, ClassifierPolicy):
    names = {field.name for field in dataclasses.fields(policy)}
    names -= {*_OTHERS.split()}
    options |= {name: getattr(policy, name) for name in sorted(names)}
    options['setting'] = GUARANTEED if policy.certified else 'trained'
    options['reader'] = policy.reader.recipe
    found = policy.about | {'labels': policy.class_names}
    sample = policy.reader.sample
  found |= {'name': name, 'version': VERSION, 'options': options}
  found['limits'] = {name: getattr(limits, name) for name in LIMITS.split()}
  found |= {'endpoints': ENDPOINTS, 'example': {'POST /predict': sample}}
  text = json.dumps(found, default=registry.described)
  # A threshold may be infinite, which JSON has not.
  return dict(json.loads(text, parse_constant=str))


def openapi(about: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the OpenAPI 3.1 description of a service that says `about`."""
  text, sample = {'type': 'string'}, about['example']['POST /predict']
  identity = {'id': {'type': ['string', 'number']}}  # the answer repeats it
  limit, most = bodies.DEADLINE_MS, about['limits']['max_pending']
  late = {'type': 'number', 'exclusiveMinimum': limit.gt, 'maximum': limit.le}
  kinds = {
    name: text if isinstance(value, str) else {'type': 'array'}
    for name, value in sample.items()
  }
  item = _object([*sample], **kinds, **identity)
  some = {'type': 'array', 'items': item, 'minItems': 1, 'maxItems': most}
  shares = {'type': 'object', 'additionalProperties': {'type': 'number'}}
  label = {'enum': about['labels']} if about.get('labels') else {}
  error = _object(['error'], error=text, **identity)
  answer = _object(
    ['label', 'probabilities'], label=label, probabilities=shares, **identity
  )
  each = {'type': 'array', 'items': {'anyOf': [answer, error]}}
  item = _object([*sample], **item['properties'], deadline_ms=late)
  batch = _object(['items'], items=some, deadline_ms=late)
  answers = {'anyOf': [answer, _object(['answers'], answers=each)]}
  paths: dict[str, Any] = {}
  for endpoint, words in ENDPOINTS.items():
    method, path = endpoint.lower().split()
    paths[path] = {method: {'responses': {'200': {'description': words}}}}
  predict = paths['/predict']['post']
  predict['requestBody'] = _json({'anyOf': [item, batch]}, example=sample)
  predict['responses']['200'] |= _json(answers)
  predict['responses']['default'] = {'description': 'an error'} | _json(error)
  info = {'title': about['name'], 'version': about['version']}
  return {'openapi': '3.1.0', 'info': info, 'paths': paths}


def _json(schema: Any, **more: Any) -> dict[str, Any]:
  return {'content': {'application/json': {'schema': schema, **more}}}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
  return {'type': 'object', 'properties': properties, 'required': required}
