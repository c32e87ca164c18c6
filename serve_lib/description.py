"""What a server says of itself: `GET /`, and its OpenAPI description."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from core import VERSION, machine
from serve_lib.decisions import GUARANTEED, ClassifierPolicy
from serve_lib.items import ItemReader, Reader, TextReader, TokenReader

ENDPOINTS = {
  'POST /predict': 'the answer to an item, or those to `items` in their order',
  'GET /': 'this description of the model',
  'GET /openapi.json': 'the requests and answers in OpenAPI',
  'GET /healthz': '200 while the process works',
  'GET /readyz': '200 once the programs are compiled, before that 503',
  'GET /metrics': 'numbers for Prometheus',
}
# Fields of a policy that are no options; warnings have paths of the server.
_OTHERS = 'chain reader monitor warnings about class_names kept_tokens'


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
  """Returns an item as JSON; of images and puzzles its form, else {}."""
  if isinstance(reader, TextReader):
    pair = {'pair': 'It is fun.'} if reader.num_texts == 2 else {}
    texts = {'text': 'A good film.', **pair}
    return texts if reader.tokenizer else {'tokens': [0]}
  if isinstance(reader, TokenReader):
    return {'tokens': [0] * reader.count}
  if isinstance(reader, ItemReader):
    return {reader.NAME: 'a text, or the bytes of a file in base64'}
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
  several = 'tasks' in about['options']  # each with an answer
  needed = ['tasks'] if several else ['label', 'probabilities']
  answer = _object(needed, {'id': own['id']})
  each = {'answers': {'type': 'array', 'items': {'anyOf': [answer, error]}}}
  paths: dict[str, Any] = {}
  for endpoint, words in ENDPOINTS.items():
    method, path = endpoint.lower().split()
    paths[path] = {method: {'responses': {'200': {'description': words}}}}
  predict = paths['/predict']['post']
  predict['requestBody'] = _json({'anyOf': body}, example=example)
  predict['responses']['200'] |= _json({'anyOf': [answer, _object(each, each)]})
  predict['responses']['default'] = {'description': 'an error'} | _json(error)
  info = {'title': about['name'], 'version': about['version']}
  return {'openapi': '3.1.0', 'info': info, 'paths': paths}


def _json(schema: Any, **more: Any) -> dict[str, Any]:
  return {'content': {'application/json': {'schema': schema, **more}}}


def _object(required: Iterable[str], properties: Any) -> dict[str, Any]:
  legal = {'type': 'object', 'properties': properties}
  return {**legal, 'required': [*required]}
