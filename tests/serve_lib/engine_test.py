"""The engine against plain NumPy, in any batch; faults fail their rows only."""

import concurrent.futures
import random
import sys

import jax
import numpy as np
import pytest

from core.errors import ConfigError
from serve_lib.chain import ClosedError, Failure, doubling
from serve_lib.engine import Engine
from tests.compilations import compilations
from tests.serve_lib import toy
from tests.serve_lib.toy import BREAKS, GOOD, WAIT, faulty, hold

pytestmark = pytest.mark.usefixtures('no_thread_stays')
LEAVES = ('full', [0])  # after stage 0
LIMIT = 1024  # bytes between stages, hardly more than one batch
BAD = [
  ('pruned', []), ('full', [1] * 7), ('pruned', [1] * 10_000),
  ('nonsense', [1]), ('pruned', b'\xff\xfe'), ('pruned', 'text'), None, 17,
]  # fmt: skip


def check_all(items, answers, failures):
  """Checks answers; `failures` maps the places of bad ones to `during`."""
  for place, (item, answer) in enumerate(zip(items, answers, strict=True)):
    if place in failures:
      assert isinstance(answer, Failure)
      assert answer.during == failures[place]
    else:
      toy.check(item, answer)
      assert isinstance(answer['logits'], np.ndarray)  # on the host


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
    bad = {place: 'encode' for place, item in enumerate(part) if item in BAD}
    check_all(part, engine.predict(part), bad)

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


# -- faults


@pytest.mark.parametrize(('items', 'settings', 'failures', 'words'), [
  ([GOOD, ('full', [toy.POISON]), ('pruned', [7, 7])],
   dict(batches=(1,)), {1: 'stage 0'}, ''),
  # A batch that cannot be padded costs its other rows nothing.
  ([GOOD, LEAVES, ('full', [toy.POISON]), GOOD, GOOD], {}, {2: 'stage 0'}, ''),
  ([('full', [7]), GOOD, LEAVES], {}, {0: 'answer'}, ''),
  ([GOOD, toy.WRONG], {}, {1: 'encode'}, ''),
  ([GOOD, ('full', [])], {}, {1: 'encode'}, 'at least one, got none'),
  ([('full', [1] * 7)], {}, {0: 'encode'}, '1 to 6, the longest bucket, got 7'),
  ([('nonsense', [1])], {}, {0: 'encode'}, "got 'nonsense'"),
  # It would wait for the room that its own item holds.
  ([toy.ASKS, GOOD], dict(max_pending=1), {0: 'encode'}, 'within encode'),
  # A program that is missing is an error and not a compilation.
  ([('full', [1] * 5), GOOD], dict(lengths=(3, 5, 6)), {0: 'stage 0'},
   'compiled by warm_up()'),
])  # fmt: skip
def test_rows_fail_alone(items, settings, failures, words):
  with faulty(**settings) as engine:
    answers = engine.predict(items)
  check_all(items, answers, failures)
  assert all(words in str(answers[place].error) for place in failures)


@pytest.mark.parametrize('stage', [0, 1])
def test_a_row_that_breaks_the_policy_fails_alone(stage):
  with faulty() as engine:
    engine.policy.broken_stage = stage
    items = [LEAVES, ('full', BREAKS), GOOD]
    answers = engine.predict(items)
    check_all(items, answers, {1: f'stage {stage}'})
    assert isinstance(answers[1].error, ZeroDivisionError)
    check_all([GOOD], engine.predict([GOOD]), {})


def test_rows_that_run_again_take_turns_with_the_others():
  with faulty(max_pending=64, ahead=0) as engine:
    order, broken = [], [('full', [toy.POISON, number]) for number in range(16)]
    hold(engine)
    for kind, items in (('bad', broken), ('good', [GOOD] * 16)):
      for item in items:
        engine.submit(item).add_done_callback(
          lambda _, kind=kind: order.append(kind)
        )
    engine.policy.open.set()
  assert sorted(order) == ['bad'] * 16 + ['good'] * 16
  assert 'good' in order[:8]  # and not after all that run again


@pytest.mark.parametrize(('kind', 'rows'), [('gather', 4), ('join', 8)])
def test_rows_of_a_copy_that_fails_are_run_alone(kind, rows):
  """Half of each batch of four goes on, alone in half of it or joined."""

  def broken(*arguments):
    raise MemoryError('no room for a copy')

  with faulty(max_wait=60.0) as engine:
    table = engine._programs._table
    whole = dict(table)
    table.update({entry: broken for entry in table if entry[0] == kind})
    items = [GOOD, LEAVES] * (rows // 2)
    answers = engine.predict(items)
    assert not engine.status()['pooled_rows']
    check_all(items, answers, {})
    assert not engine.monitor.snapshot()['failures']
    table.update(whole)
    check_all([GOOD], engine.predict([GOOD]), {})


def test_an_error_on_the_device_fails_its_batch():
  def explode(code):
    if (code == 6).any():
      raise ValueError('on the device')
    return code

  class Exploding(toy.Chain):
    num_stages = 1
    variants = ('full',)

    def stage(self, index, variant, length):
      plain = super().stage(index, variant, length)

      def run(variables, carry):
        carry, outputs = plain(variables, carry)
        shape = jax.ShapeDtypeStruct(outputs['code'].shape, np.int32)
        code = jax.pure_callback(explode, shape, outputs['code'])
        return carry, outputs | {'code': code}

      return run

  with Engine(Exploding(), toy.Policy(), (3,), (1,)) as engine:
    answers = engine.predict([('full', [1]), ('full', [6]), ('full', [2])])
  assert answers[1].during == 'stage 0'
  assert 'on the device' in str(answers[1].error)
  assert [answers[0]['depth'], answers[2]['depth']] == [1, 1]


def test_a_callback_or_monitor_that_breaks_blocks_no_row(monkeypatch):
  with faulty(max_pending=9) as engine:
    held = hold(engine)
    futures = [engine.submit(GOOD) for _ in range(8)]
    futures[0].add_done_callback(leave)
    monkeypatch.setattr(engine.monitor, 'record_answer', defect)
    engine.policy.open.set()
    check_all([GOOD] * 8, [future.result(WAIT) for future in futures], {})
    assert held.result(WAIT)['depth'] == 2
    check_all([GOOD], engine.predict([GOOD]), {})
  assert engine.status()['pending'] == 0


def defect(*arguments):
  raise RuntimeError('a defect')


def leave(*arguments):
  sys.exit('a defect')


def test_a_program_that_exits_fails_all_rows(monkeypatch):
  engine = faulty()
  monkeypatch.setattr(engine._programs, 'run', leave)
  answers = engine.predict([GOOD] * 3)
  assert {answer.during for answer in answers} == {'engine'}
  with pytest.raises(ClosedError):
    engine.predict([GOOD])
  engine.close()
  assert engine.status()['pending'] == 0


def test_a_defect_and_a_callback_that_exits_block_no_row(monkeypatch):
  engine = faulty(max_pending=9)
  go_on = engine._worker._go_on

  def broken(batch, *arguments):
    go_on(batch, *arguments)
    if len(batch.rows) == 4:  # its rows are in two places now
      raise RuntimeError('a defect')

  monkeypatch.setattr(engine._worker, '_go_on', broken)
  hold(engine)
  futures = [engine.submit(GOOD) for _ in range(8)]
  for future in (futures[0], futures[5]):
    future.add_done_callback(leave)
  engine.policy.open.set()
  answers = [future.result(WAIT) for future in futures]
  assert {answer.during for answer in answers} == {'engine'}
  engine.close()
  status = engine.status()
  assert status['pending'] == status['pooled_rows'] == 0
