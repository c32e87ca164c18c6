"""The HTTP application: answers, refusals, limits, deadlines, metrics."""

import asyncio
import base64
import dataclasses
import json
import threading
import types

import cv2
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_lib import bodies, http, pool
from serve_lib.chain import ClosedError, InputError
from serve_lib.decisions import Prediction
from serve_lib.engine import Engine
from serve_lib.items import TextReader
from serve_lib.monitor import DriftCheck, Monitor
from tests.serve_lib import toy

pytestmark = pytest.mark.anyio
GOOD, OTHER, HOLDS = {'tokens': [2, 0]}, {'tokens': [1, 2, 3]}, [5, 5]
HUGE = 10**400


def limited(**limits):
  return pytest.mark.parametrize('client', [limits], indirect=True, ids=[''])


class Chain(toy.Chain):
  variants = ('full',)


class Policy(toy.FaultyPolicy):
  """Reads items as a model of token ids does."""

  def __init__(self):
    super().__init__()
    self.encoded, check = 0, DriftCheck(np.linspace(0.5, 1.0, 9), 0.75)
    self.monitor = Monitor(drift=check, sources={'forum': check})

  def encode(self, item):
    self.encoded += 1
    found = TextReader(None, 6, vocab_size=50).read(item, 'full')
    return dataclasses.replace(found, context=found.inputs['tokens'].tolist())

  def answer(self, row):
    answer = super().answer(row)
    self.monitor.record_exit(answer['depth'], 'toy', None)
    fields = {'depth': answer['depth'], 'exit_reason': 'whole model'}
    return Prediction(answer['tokens'], {}, fields)


@pytest.fixture(scope='module')
def engine():
  with Engine(Chain(), Policy(), (6,), (1,), ahead=0) as engine:
    yield engine


@pytest.fixture
async def client(engine, request):
  """A client of a service that is ready; see `limited`."""
  for event in (engine.policy.open, engine.policy.reached):
    event.clear()
  async with toy.started(engine, **getattr(request, 'param', {})) as client:
    yield client
    engine.policy.open.set()
    await until(lambda: client.service._places.taken == 0)
    assert client.service._waiting == client.service._bytes == 0


async def until(condition):
  async with asyncio.timeout(toy.WAIT):
    while not condition():
      await asyncio.sleep(0.001)


async def test_items_are_answered_alone_and_in_the_order_of_a_batch(client):
  one = await client.post('/predict', json=GOOD | {'deadline_ms': 60_000})
  reason = {'exit_reason': 'whole model'}
  assert one.json() == dict(label=[2, 0], probabilities={}, depth=3) | reason
  batch = [OTHER, {'tokens': [99]}, GOOD, 'text', 7, {'tokens': [7]}]
  many = await client.post('/predict', json={'items': batch})
  answers = many.json()['answers']
  labels = [answer.get('label') for answer in answers]
  assert labels == [[1, 2, 3], None, [2, 0], None, None, None]
  errors = [a['error'] for a in answers if set(a) == {'error'}]
  words = ('tokens: ', 'item: ', 'item: expected an object', 'answer')
  assert all(map(str.startswith, errors, words))


def photo(*size):
  data = cv2.imencode('.png', np.zeros((*size, 3), np.uint8))[1].tobytes()
  return base64.b64encode(data).decode()


@pytest.mark.parametrize(('value', 'status'), [
    ([[]] * 400_000, 413), ({'items': [{}] * 400_000}, 413),
    ([''] * 400_000, 413), ({str(n): [] for n in range(110_000)}, 413),
    ({'items': [[]] * 100_000}, 413), ([[]] * 100_000, 422),
    ('[,{' * 200_000 + '\\" "', 422), ({'text': '"\\' * 200_000}, 422),
], ids=range(8))  # fmt: skip
@limited(max_body_bytes=2**22)
async def test_the_values_of_a_body_are_limited(client, value, status):
  found = await client.post('/predict', content=json.dumps(value))
  assert found.status_code == status, found.text


def body(**fields):
  return json.dumps(fields).encode()


# Bodies of bad requests, with the status and words of their answers.
BAD = (
  (b'\xff', 400, 'body: expected one JSON value in UTF-8'),
  (b'{"tokens": [NaN]}', 400, 'NaN, which is no finite'),
  (b'{"tokens": [1], "tokens": [2]}', 400, "name 'tokens' twice"),
  (b'[' * 100_000, 400, 'nested too deeply'),
  (b'[]', 422, 'item: expected an object'),
  (b'null', 422, 'got null'),
  (body(items=[]), 422, 'items: expected a list of one item'),
  (body(items=[GOOD] * 65), 413, 'items: expected at most 64, got 65'),
  (body(items=[GOOD], **{'\ud800': 1}), 422, ': expected no such field'),
  (body(tokens=[1], sauce='a'), 422, "token_types, source, got also sauce"),
  (b'x' * 100_001, 413, 'body: expected at most 100000 bytes'),
  (body(tokens=[7]), 500, 'answer'),  # the policy breaks
  (body(tokens=[1], token_types=[0, 0]), 422, 'token_types: expected 1'),
  (body(tokens=[1], source=[]), 422, 'source: expected a name'),
  (body(image=photo(101, 100)), 413, 'at most 10000 pixels'),
  (body(items=[{'image': photo(60, 100)}] * 2), 413, 'at most 10000 pixels'),
  *((body(image=value), 422, "the bytes of a file in base64, no path and no")
    for value in ('../x', 7, 'data:image/png;base64,AA==')),
  *((body(tokens=[1], deadline_ms=value), 422, 'deadline_ms: expected a number')
    for value in (0, HUGE)),
  *((body(tokens=tokens), 422, 'tokens: expected a row of integers in [0, 50)')
    for tokens in ([50], [HUGE], [2**32], [1.0], [[1]])),
  *((body(tokens=[1], token_types=[kind]), 422, 'a row of integers in [0, 2)')
    for kind in (7, 2**32, HUGE)),
  *((body(tokens=tokens), 422, f'got values of type {kind}')
    for kind, tokens in (('boolean', [1, True]), ('text', [1, 'x' * 999]),
                         ('list', [[1], [2]]))),
)  # fmt: skip


@pytest.mark.parametrize(('sent', 'status', 'words'), BAD, ids=range(len(BAD)))
async def test_a_bad_request_is_refused(sent, status, words, client):
  found = await client.post('/predict', content=sent)
  assert found.status_code == status, found.text
  assert set(found.json()) == {'error'}
  assert words in found.json()['error']
  assert len(found.content) < 3000


def test_no_string_of_a_request_is_taken_for_a_path():
  for value in ('/etc/pas', ['/etc/pas'], ('x', 'y'), {'image': '/etc/pa.'}):
    item = bodies.read_item(value)
    assert isinstance(item, InputError) or item == {'text': value}
  assert type(bodies.read_item({'image': '/etc/pas'})['image']) is bytes


async def test_other_paths_readiness_and_the_end_of_an_engine(client):
  async def ask(*request):
    found = await client.request(*request, json=GOOD)
    return found.status_code, found.json().get('error'), found.headers

  found = {'/predict': 405, '/predict/': 404, '/etc': 404, '/readyz': 200}
  assert {path: (await ask('GET', path))[0] for path in found} == found
  client.service.is_ready = False
  assert (await ask('GET', '/healthz'))[0] == 200
  for request in (('GET', '/readyz'), ('POST', '/predict')):
    status, error, headers = await ask(*request)
    assert (status, headers['Retry-After']) == (503, '1')
    assert 'being compiled' in error
  client.service.is_ready = True

  def refuse(*_):
    raise ClosedError('the engine is closed')

  client.service._engine = types.SimpleNamespace(submit_all=refuse, item_work=0)
  for request in (('POST', '/predict'), ('GET', '/healthz')):
    assert (await ask(*request))[:2] == (503, 'the engine is closed')


def send(client, value):
  return asyncio.create_task(client.post('/predict', json=value))


async def held(client, policy):
  """Sends an item that holds the engine; returns its task."""
  task = send(client, {'tokens': HOLDS})
  assert await asyncio.to_thread(policy.reached.wait, toy.WAIT)
  return task


@limited(max_pending=4, max_waiting=4)
async def test_overload_is_refused_and_others_are_answered(client, engine):
  first = await held(client, engine.policy)
  rows = {'items': [GOOD, OTHER]}
  tasks = [send(client, rows) for _ in range(3)]
  await until(lambda: client.service._waiting == 3)  # of 4 + 4 rows, 4 run
  await until(lambda: engine.status()['pending'] == 4)
  refused = await send(client, rows)
  assert (refused.status_code, refused.headers['Retry-After']) == (503, '1')
  assert 'max_waiting: 8 rows' in refused.text
  engine.policy.open.set()
  assert (await first).status_code == 200
  for answers in [(await task).json()['answers'] for task in tasks]:
    assert [one['label'] for one in answers] == [[2, 0], [1, 2, 3]]


@limited(max_pending=2)
@pytest.mark.parametrize('how', ['late', 'left'])
async def test_rows_of_an_ended_request_leave_every_line(how, client, engine):
  policy = engine.policy
  first, before = await held(client, policy), engine.monitor.snapshot()
  encoded = policy.encoded
  for _ in range(3):  # one row in the engine, one in the line
    rows = {'items': [GOOD] * 2}
    if how == 'late':
      found = await client.post('/predict', json=rows | {'deadline_ms': 50})
      assert found.status_code == 504
      assert 'deadline_ms: the time' in found.text
    else:
      task = send(client, rows)
      await until(lambda: engine.status()['pending'] == 2)
      task.cancel()
    await until(lambda: engine.status()['pending'] == 1)
    assert client.service._waiting == 0
  await until(lambda: client.service._places.taken == 1)
  policy.open.set()
  assert (await first).status_code == 200
  assert policy.encoded == encoded + 3  # those in the line are not read
  after = engine.monitor.snapshot()
  assert after['answers'] == before['answers'] + 1
  assert after['failures'] == before['failures']


async def test_a_small_request_is_not_behind_a_large_one(client, engine):
  policy, order = engine.policy, []
  first, decide = await held(client, policy), policy.decide

  def decided(stage, rows, outputs):
    order.extend(row.encoded.context for row in rows if stage == 0)
    return decide(stage, rows, outputs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(policy, 'decide', decided)
    large = send(client, {'items': [GOOD] * 8})
    await until(lambda: engine.status()['pending'] == 9)
    small = send(client, OTHER)
    await until(lambda: engine.status()['queued_rows'] == 9)
    policy.open.set()
    for one in await asyncio.gather(first, large, small):
      assert one.status_code == 200
  assert order.index(OTHER['tokens']) <= 1
  assert order.count(GOOD['tokens']) == 8


async def test_a_small_request_needs_no_thread_that_reads(client):
  lane, end = client.service._quick, threading.Event()
  lane._yields = bool  # it has threads of low priority, too
  for _ in range(lane.places):
    lane.start(0, end.wait, toy.WAIT)
  large = {'items': [GOOD] * (pool.SMALL + 1)}, {'text': 'a' * http.MAX_INLINE}
  tasks = [send(client, value) for value in large]
  few = await client.post('/predict', json={'items': [GOOD] * pool.SMALL})
  assert few.status_code == 200
  assert not any(task.done() for task in tasks)
  end.set()
  assert [(await task).status_code for task in tasks] == [200, 422]


@limited(max_pending=2, max_waiting=2)
async def test_a_small_request_is_accepted_above_the_limit(client):
  client.service._waiting, client.service._requests = 4, 1
  many = {'items': [GOOD] * 2}
  assert (await send(client, GOOD)).status_code == 200
  assert (await send(client, many)).status_code == 200
  client.service._requests = 2  # with itself 3: 4 / 3 rows each
  assert (await send(client, many)).status_code == 503
  client.service._waiting = client.service._requests = 0


@limited(max_body_bytes=100, max_seconds=0.5)
async def test_bodies_are_limited_in_time_and_together(monkeypatch, client):
  monkeypatch.setattr(http, 'MAX_BODIES', 2)
  opened = asyncio.Event()

  async def slow():
    yield b' ' * 90
    await opened.wait()

  posts = (client.post('/predict', content=slow()) for _ in range(2))
  tasks = [*map(asyncio.create_task, posts)]
  await until(lambda: client.service._bytes == 180)
  stated = {'Content-Length': '101'}  # refused before it has come
  assert (await client.post('/predict', headers=stated)).status_code == 413
  third = await client.post('/predict', content=b' ' * 90)
  assert (third.status_code, third.headers['Retry-After']) == (503, '1')
  for found in await asyncio.gather(*tasks):
    assert (found.status_code, 'the time is over' in found.text) == (408, True)


async def test_metrics_are_those_of_monitor_and_engine(client, engine):
  for item in (GOOD, OTHER, {'tokens': [99]}):
    await client.post('/predict', json=item)
  await until(lambda: not engine.status()['pending'])  # after the answer
  found = await client.get('/metrics')
  assert 'text/plain; version=' in found.headers['Content-Type']
  found = [*text_string_to_metric_families(found.text)]
  assert all(family.documentation for family in found)
  values = {
    (sample.name, *sample.labels.values()): sample.value
    for family in found for sample in family.samples
  }  # fmt: skip
  seen = engine.monitor.snapshot()
  depths = seen['depth'].items()
  expected = {('engine_depth_total', str(key)): n for key, n in depths} | {
    ('engine_answers_total',): seen['answers'],
    ('engine_failures_total', 'encode'): seen['failures']['encode'],
    ('engine_latency_seconds', '0.95'): seen['latency']['p95'],
    ('http_latency_seconds_bucket', '+Inf'): 3.0,
    ('http_latency_seconds_bucket', '30.0'): 3.0,
    ('engine_retention', '0.05'): 1.0,
    ('engine_reasons_total', 'toy'): seen['answers'],
    ('engine_fill', '2'): 1.0, ('engine_drift_drifted',): 0.0,
    ('engine_drift_by_source_tests', 'forum'): 0.0,
    ('engine_pending',): 0.0, ('http_waiting_rows',): 0.0,
    ('http_responses_total', '200'): 2.0, ('http_responses_total', '422'): 1.0,
  }  # fmt: skip
  assert {key: values[key] for key in expected} == expected
