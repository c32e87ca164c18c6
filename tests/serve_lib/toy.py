"""A chain of three small stages, its policy, and both again in plain NumPy."""

import contextlib
import dataclasses
import functools
import math
import threading
import types
import weakref

import httpx2
import jax
import jax.numpy as jnp
import jsonschema
import numpy as np

from serve_lib import description, http
from serve_lib.chain import Encoded, InputError
from serve_lib.engine import Engine
from serve_lib.monitor import Monitor

STAGES = 3
WIDTH = 8
VOCABULARY = 50
KEEP = 0.7  # share of the tokens that stay after each stage
POISON = 49  # a token that breaks the host's part of a stage
GOOD = ('full', [2, 0])  # runs through all stages
BREAKS = [1, 0]  # leaves at stage 1, unless the policy breaks
HOLDS = ('full', [5, 5])  # holds the worker until the policy opens
ASKS = ('full', [8])  # predicts within `encode`
WRONG = ('full', [9])  # has inputs that are no arrays
WAIT = 20.0
LIMITS = dict(  # of a `Service`
  max_pending=64, max_waiting=64, max_body_bytes=100_000, max_seconds=60.0,
  max_pixels=10_000,
)  # fmt: skip


rng = np.random.default_rng(0)
VARIABLES = {
  'table': rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32),
  'weights': rng.normal(size=(STAGES, WIDTH, WIDTH)).astype(np.float32) / 3,
}


def static_length(stage, variant, length):
  """Tokens that a row of a length bucket may have left before a stage."""
  for _ in range(stage if variant == 'pruned' else 0):
    length = math.ceil(KEEP * length)
  return length


class Chain:
  num_stages = STAGES
  variants = ('pruned', 'full')
  variables = VARIABLES

  def stage(self, index, variant, length):
    size = static_length(index + 1, variant, length)

    def run(variables, carry):
      if index == 0:
        tokens = carry['tokens']
        places = jnp.arange(length, dtype=jnp.int32)[None]
        mask = places < carry['length'][:, None]
        code = (tokens * (places + 1) * mask).sum(1) % 7
        x = variables['table'][tokens]
        carry = {'x': x, 'length': carry['length'], 'code': code}
      # Tokens meet within their row only: everyone adds the row's mean.
      places = jnp.arange(carry['x'].shape[1], dtype=jnp.int32)[None]
      mask = (places < carry['length'][:, None])[..., None]
      count = carry['length'][:, None].astype(jnp.float32)
      mean = (carry['x'] * mask).sum(1) / count
      x = jnp.tanh(carry['x'] @ variables['weights'][index] + mean[:, None])
      kept = carry['length']
      if variant == 'pruned':
        kept = -(-kept * 7 // 10)
      new = {'x': x[:, :size], 'length': kept, 'code': carry['code']}
      logits = (x * mask).sum(1) / count
      return new, {'logits': logits, 'code': carry['code'], 'kept': kept}

    return run

  def pad(self, rows, length, size):
    batch = {
      'tokens': np.zeros((size, length), np.int32),
      'length': np.ones(size, np.int32),
    }
    for number, row in enumerate(rows):
      if POISON in row['tokens']:
        raise RuntimeError('poisoned batch')
      batch['tokens'][number, : len(row['tokens'])] = row['tokens']
      batch['length'][number] = len(row['tokens'])
    return batch


class Policy:
  """Rows leave at the stage that their content's code says."""

  def __init__(self):
    self.decided, self.monitor = [], Monitor()

  def encode(self, item):
    variant, tokens = item
    if not len(tokens):
      raise InputError('tokens: expected at least one, got none')
    return Encoded(
      {'tokens': np.array(tokens, np.int32)}, len(tokens), variant, tokens
    )

  def decide(self, stage, rows, outputs):
    assert len(rows) == len(outputs['code'])
    self.decided.append((stage, len(rows)))
    return outputs['code'] % STAGES <= stage

  def answer(self, row):
    return {
      'tokens': row.encoded.context,
      'depth': len(row.outputs),
      'logits': row.outputs[-1]['logits'],
    }


class FaultyPolicy(Policy):
  """Breaks, or holds the worker, for items that ask for it."""

  def __init__(self):
    super().__init__()
    self.reached, self.open = threading.Event(), threading.Event()
    self.broken_stage = self.engine = None

  def encode(self, item):
    if item == ASKS:
      self.engine.predict([GOOD])
    encoded = super().encode(item)
    return dataclasses.replace(encoded, inputs=0) if item == WRONG else encoded

  def decide(self, stage, rows, outputs):
    contexts = [row.encoded.context for row in rows]
    if [5, 5] in contexts:
      self.reached.set()
      assert self.open.wait(WAIT)
    if stage == self.broken_stage and BREAKS in contexts:
      raise ZeroDivisionError('decide')
    return super().decide(stage, rows, outputs)

  def answer(self, row):
    if row.encoded.context == [7]:
      raise ZeroDivisionError('answer')
    return super().answer(row)


def reference(item):
  """The answer to one item: a loop over stages, in float64."""
  variant, tokens = item
  code = sum(t * (i + 1) for i, t in enumerate(tokens)) % 7
  x = VARIABLES['table'].astype(np.float64)[list(tokens)]
  for stage in range(STAGES):
    x = np.tanh(x @ VARIABLES['weights'][stage] + x.mean(0))
    logits = x.mean(0)
    if code % STAGES <= stage or stage == STAGES - 1:
      return {'tokens': tokens, 'depth': stage + 1, 'logits': logits}
    if variant == 'pruned':
      x = x[: -(-len(x) * 7 // 10)]
  return None


def check(item, answer):
  expected = reference(item)
  assert answer['tokens'] == expected['tokens']
  assert answer['depth'] == expected['depth']
  np.testing.assert_allclose(answer['logits'], expected['logits'], atol=1e-5)


def random_items(seed, count, longest):
  rng = np.random.default_rng(seed)
  return [
    (
      Chain.variants[int(rng.integers(2))],
      rng.integers(0, POISON, rng.integers(1, longest + 1)).tolist(),
    )
    for _ in range(count)
  ]


@functools.cache
def compiled():
  """One warmed-up engine, whose programs the engines of all tests share."""
  engine = Engine(Chain(), Policy(), (3, 6), (1, 2, 4))
  jax.config.update('jax_disable_most_optimizations', True)  # compiles faster
  try:
    engine.warm_up(threads=2)
  finally:
    jax.config.update('jax_disable_most_optimizations', False)
  return engine


def make_engine(policy=None, lengths=(3, 6), batches=(1, 2, 4), **settings):
  """An engine with the programs of `compiled`: capacity 4, or 1."""
  engine = Engine(Chain(), policy or Policy(), lengths, batches, **settings)
  engine._programs._table = dict(compiled()._programs._table)
  engine._programs._row_bytes = compiled()._programs._row_bytes
  engine._programs.compile = lambda *_: compiled()._warm_up
  engine.warm_up()
  return engine


def faulty(**settings):
  engine = make_engine(FaultyPolicy(), **settings)
  engine.policy.engine = weakref.proxy(engine)
  return engine


def hold(engine):
  """Submits an item that holds the worker, and waits until it does."""
  future = engine.submit(HOLDS)
  assert engine.policy.reached.wait(WAIT)
  return future


@contextlib.asynccontextmanager
async def started(engine, name='', **limits):
  """Yields a client of a service, which is ready and an attribute of it."""
  service = http.Service(engine, types.SimpleNamespace(**LIMITS | limits), name)
  service.is_ready = True
  given = httpx2.ASGITransport(service.app)
  async with httpx2.AsyncClient(transport=given, base_url='http://a') as client:
    client.service = service
    yield client
  service.close()


def check_schema(engine, answer):
  """An answer is legal in OpenAPI, which names its fields, also of a task."""
  about = description.about(engine, 'run')
  predict = description.openapi(about)['paths']['/predict']['post']
  content = predict['responses']['200']['content']['application/json']
  schema = content['schema']['anyOf'][0]
  jsonschema.Draft202012Validator(schema).validate(answer)
  named = schema['properties']
  assert {*answer} <= {*named}
  for task in answer.get('tasks', {}).values():
    each = named['tasks']['additionalProperties']
    assert {*task} <= {*each['properties']}
