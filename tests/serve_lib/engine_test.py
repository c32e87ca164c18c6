"""The engine against plain NumPy, row by row, in any batch."""

import concurrent.futures
import random

import jax
import numpy as np
import pytest

from core.errors import ConfigError
from serve_lib.chain import Failure, doubling
from serve_lib.engine import Engine
from tests.compilations import compilations
from tests.serve_lib import toy

LIMIT = 1024  # bytes between stages, hardly more than one batch
BAD = [
  ('pruned', []), ('full', [1] * 7), ('pruned', [1] * 10_000),
  ('nonsense', [1]), ('pruned', b'\xff\xfe'), ('pruned', 'text'), None, 17,
]  # fmt: skip


@pytest.fixture(scope='module', params=[0, 1])
def engine(request):
  limits = dict(max_pending=16, max_pool_bytes=LIMIT)
  with toy.make_engine(ahead=request.param, **limits) as engine:
    yield engine


def test_a_thousand_mixed_requests_from_threads(engine):
  items, rng = toy.random_items(0, 1000, 6), random.Random(0)
  for place in rng.sample(range(1000), 125):
    items[place] = rng.choice(BAD)

  def predict(part):
    for item, answer in zip(part, engine.predict(part), strict=True):
      if item in BAD:
        assert isinstance(answer, Failure)
        assert answer.during == 'encode'
      else:
        toy.check(item, answer)
        assert isinstance(answer['logits'], np.ndarray)  # on the host

  with compilations() as compiled:
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
      list(executor.map(predict, [items[start::4] for start in range(4)]))
    assert not compiled
    jax.jit(lambda x: x * 3)(np.arange(3))
    assert compiled  # it would be counted
  status = engine.status()
  empty = ('pending', 'queued_rows', 'pooled_rows', 'queue_bytes', 'pool_bytes')
  assert {status[name] for name in empty} == {0}
  assert status['peak_pending'] <= 16
  assert 0 < status['peak_pool_bytes'] <= LIMIT


@pytest.mark.parametrize(('stays', 'first', 'later'), [
  ([1, 1, 1, 1], 16, 16),  # full batches stay whole
  ([1, 0, 0, 0], 16, 4),  # rows of four batches share one
  ([0, 1, 1, 1], 16, 12),  # batches that lost a row are filled up
])  # fmt: skip
def test_batches_are_full_at_every_stage(stays, first, later):
  policy = toy.Policy()
  items = [('full', [2 if stay else 0, 0, 0]) for stay in stays * 16]
  with toy.make_engine(policy, max_pending=64, max_wait=60.0) as engine:
    answers = engine.predict(items)
    fill = policy.monitor.snapshot()['fill']
  assert [a['depth'] for a in answers] == [1 + 2 * stay for stay in stays * 16]
  assert fill == {0: 1.0, 1: 1.0, 2: 1.0}
  assert policy.decided.count((0, 4)) == first
  assert policy.decided.count((1, 4)) == later
  assert all(stays) <= (engine.status()['copies'] == 0)  # handed on as such


def test_a_lone_request_is_never_copied_and_never_waits():
  with toy.make_engine(max_wait=3600.0) as engine:
    for item in toy.random_items(1, 20, 6):
      toy.check(item, engine.submit(item).result(timeout=10))
  assert engine.status()['copies'] == 0


def test_serving_before_warming_up_is_an_error():
  engine = Engine(toy.Chain(), toy.Policy(), (3,), (1,))
  with pytest.raises(RuntimeError, match=r'call warm_up\(\) first'):
    engine.predict([('full', [1])])
  engine.close()


@pytest.mark.parametrize(('name', 'value'), [
  ('lengths', ()), ('lengths', (8, 4)), ('batches', (0, 1)),
  ('batches', (1, 1)), ('max_pending', 0), ('max_wait', -1.0), ('ahead', 9),
  ('max_pool_bytes', -1),
])  # fmt: skip
def test_illegal_arguments_are_named(name, value):
  with pytest.raises(ConfigError, match=f'engine.{name}: expected'):
    Engine(toy.Chain(), toy.Policy(), **dict(lengths=(4,)) | {name: value})


@pytest.mark.parametrize('items', ['text', b'text', {'text': 'one'}])
def test_one_item_is_not_taken_apart_as_several(engine, items):
  assert engine.predict([]) == list(engine.stream([])) == []
  expected = f'expected several .* got one {type(items).__name__}'
  with pytest.raises(TypeError, match=f'engine.predict: {expected}'):
    engine.predict(items)
  with pytest.raises(TypeError, match=f'engine.stream: {expected}'):
    engine.stream(items)  # before anything is read


def test_doubling_ends_with_the_largest():
  assert doubling(1) == (1,)
  assert doubling(12) == (1, 2, 4, 8, 12)
