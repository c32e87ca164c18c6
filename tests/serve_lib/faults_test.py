"""Faults: affected rows fail, all others are answered."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from serve_lib.chain import ClosedError, Failure
from serve_lib.engine import Engine
from serve_lib.programs import MissingProgramError
from tests.serve_lib import toy
from tests.serve_lib.toy import BREAKS, GOOD, VARIABLES, WAIT

pytestmark = pytest.mark.usefixtures('no_thread_stays')


def test_a_broken_batch_takes_only_its_own_rows_down(engines):
  with engines(batches=(1,)) as engine:
    items = [GOOD, ('full', [toy.POISON]), GOOD, ('pruned', [7, 7])]
    answers = engine.predict(items)
  assert isinstance(answers[1], Failure)
  assert answers[1].during == 'stage 0'
  assert 'poisoned batch' in str(answers[1].error)
  for place in (0, 2, 3):
    toy.check(VARIABLES, items[place], answers[place])


@pytest.mark.parametrize('stage', [0, 1])
def test_a_policy_that_raises_fails_the_batch(engines, stage):
  with engines() as engine:
    engine._policy.broken_stage = stage
    items = [('full', [0]), ('full', BREAKS), GOOD]
    first, *others = engine.predict(items)
    assert {answer.during for answer in others} == {f'stage {stage}'}
    assert all(isinstance(a.error, ZeroDivisionError) for a in others)
    if stage == 0:
      assert isinstance(first, Failure)
    else:  # it had left before
      toy.check(VARIABLES, items[0], first)
    toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])


def test_an_answer_that_raises_fails_its_row_alone(engines):
  with engines() as engine:
    items = [('full', [7]), GOOD, ('full', [0])]
    failure, *others = engine.predict(items)
  assert failure.during == 'answer'
  for item, answer in zip(items[1:], others, strict=True):
    toy.check(VARIABLES, item, answer)


@pytest.mark.parametrize(
  ('kind', 'rows'), [('open', 4), ('join', 8), ('cut', 4)]
)
def test_a_copy_that_fails_fails_its_rows(engines, kind, rows):
  """Half of each batch of four goes on: opened, cut; a second one joins."""

  def broken(*arguments):
    raise MemoryError('no room for a copy')

  with engines(max_wait=60.0) as engine:
    table = engine._programs._table
    whole = dict(table)
    table.update({entry: broken for entry in table if entry[0] == kind})
    items = [GOOD, ('full', [0])] * (rows // 2)
    answers = engine.predict(items)
    assert not engine.status()['pooled_rows']
    failures = [a for a in answers if isinstance(a, Failure)]
    assert [a.during for a in failures] == ['stage 1'] * (rows // 2)
    assert all(isinstance(a.error, MemoryError) for a in failures)
    for answer in answers[1::2]:
      toy.check(VARIABLES, ('full', [0]), answer)
    table.update(whole)
    toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])


def test_an_error_on_the_device_fails_its_batch(engines):
  def explode(x):
    raise ValueError('on the device')

  chain = toy.Chain()

  class Exploding(toy.Chain):
    num_stages = 1
    variants = ('full',)

    def stage(self, index, variant, length):
      plain = chain.stage(index, variant, length)

      def run(variables, carry):
        carry, outputs = plain(variables, carry)
        shape = jax.ShapeDtypeStruct(outputs['code'].shape, np.int32)
        broken = jax.lax.cond(
          (outputs['code'] == 6).any(),
          lambda code: jax.pure_callback(explode, shape, code),
          lambda code: code,
          outputs['code'],
        )
        return carry, outputs | {'code': broken}

      return run

  with Engine(Exploding(), toy.Policy(), (3,), (1,)) as engine:
    answers = engine.predict([('full', [1]), ('full', [6]), ('full', [2])])
  assert answers[1].during == 'stage 0'
  assert 'on the device' in str(answers[1].error)
  assert [answers[0]['depth'], answers[2]['depth']] == [1, 1]


def test_a_missing_program_is_an_error_and_not_a_compilation(engines):
  with engines(lengths=(3, 5, 6)) as engine:
    answers = engine.predict([('full', [1] * 5), GOOD])
  assert isinstance(answers[0].error, MissingProgramError)
  assert 'compiled by warm_up()' in str(answers[0].error)
  toy.check(VARIABLES, GOOD, answers[1])


def test_inputs_that_are_no_arrays_fail_alone(engines, monkeypatch):
  with engines() as engine:
    encode = engine._policy.encode

    def broken(item):
      encoded = encode(item)
      return encoded if item == GOOD else dataclasses.replace(encoded, inputs=0)

    monkeypatch.setattr(engine._policy, 'encode', broken)
    good, bad = engine.predict([GOOD, ('full', [0])])
  toy.check(VARIABLES, GOOD, good)
  assert bad.during == 'encode'


def test_a_callback_that_exits_blocks_no_row(engines):
  with engines(max_pending=9) as engine:
    held = engine.submit(('full', [5, 5]))
    assert engine._policy.reached.wait(WAIT)
    futures = [engine.submit(GOOD) for _ in range(8)]
    futures[0].add_done_callback(lambda future: sys.exit())
    engine._policy.open.set()
    for future in futures:
      toy.check(VARIABLES, GOOD, future.result(WAIT))
    assert held.result(WAIT)['depth'] == 2
    toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])
  assert engine.status()['pending'] == 0


def test_a_monitor_that_raises_blocks_no_row(engines, monkeypatch):
  with engines() as engine:
    monkeypatch.setattr(engine.monitor, 'record_answer', defect)
    answer = engine.submit(GOOD).result(WAIT)
  toy.check(VARIABLES, GOOD, answer)


def defect(*arguments):
  raise RuntimeError('a defect')


def leave(*arguments):
  sys.exit('a defect')


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
@pytest.mark.parametrize(
  ('part', 'method', 'broken'),
  [('_worker', '_go_on', defect), ('_programs', 'run', leave)],
)
def test_a_defect_of_the_engine_leaves_nobody_waiting(
  engines, monkeypatch, part, method, broken
):
  engine = engines()
  monkeypatch.setattr(getattr(engine, part), method, broken)
  answers = engine.predict([GOOD] * 3)
  assert {answer.during for answer in answers} == {'engine'}
  with pytest.raises(ClosedError):
    engine.predict([GOOD])
  engine.close()
  assert engine.status()['pending'] == 0


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_defect_and_a_callback_that_exits_block_no_row(engines, monkeypatch):
  engine = engines(max_pending=9)
  go_on = engine._worker._go_on

  def broken(batch, *arguments):
    go_on(batch, *arguments)
    if len(batch.rows) == 4:  # its rows are in two places now
      raise RuntimeError('a defect')

  monkeypatch.setattr(engine._worker, '_go_on', broken)
  engine.submit(('full', [5, 5]))
  assert engine._policy.reached.wait(WAIT)
  futures = [engine.submit(GOOD) for _ in range(8)]
  for future in (futures[0], futures[5]):
    future.add_done_callback(lambda future: sys.exit())
  engine._policy.open.set()
  answers = [future.result(WAIT) for future in futures]
  assert {answer.during for answer in answers} == {'engine'}
  engine.close()
  status = engine.status()
  assert status['pending'] == status['pooled_rows'] == 0
