"""Faults, back pressure, closing: nobody is lost and nothing stays behind."""

import sys
import threading
import time

import jax
import numpy as np
import pytest

from serve_lib import worker
from serve_lib.chain import ClosedError, Failure, OverloadedError
from serve_lib.engine import Engine
from serve_lib.programs import MissingProgramError
from tests.serve_lib import toy

VARIABLES = toy.make_variables()
GOOD = ('full', [2, 0])  # runs through all stages
WAIT = 20.0
BREAKS = [1, 0]  # leaves at stage 1, unless the policy breaks


class FaultyPolicy(toy.Policy):
  """Breaks, or holds the worker, for items that ask for it."""

  def __init__(self):
    super().__init__()
    self.reached, self.open = threading.Event(), threading.Event()
    self.broken_stage = None

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


@pytest.fixture(scope='module')
def engines():
  toy.compiled()  # before the threads are counted

  def make(**settings):
    return toy.make_engine(FaultyPolicy(), **settings)

  return make


@pytest.fixture(autouse=True)
def no_thread_stays():
  before = threading.active_count()
  yield
  assert threading.active_count() == before


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


def test_a_copy_that_fails_fails_who_was_in_it(engines):
  with engines(max_wait=60.0) as engine:

    def broken(*arguments):
      raise MemoryError('no room for a copy')

    table = engine._programs._table
    for entry in table:
      if entry[0] == 'join':
        table[entry] = broken
    # Half of each batch goes on: the second half-batch has to join the first.
    items = [GOOD, ('full', [0]), GOOD, ('full', [0])] * 2
    answers = engine.predict(items)
    assert not engine.status()['pooled_rows']
    failures = [a for a in answers if isinstance(a, Failure)]
    assert [a.during for a in failures] == ['stage 1'] * 4
    assert all(isinstance(a.error, MemoryError) for a in failures)
    for item, answer in zip(items, answers, strict=True):
      if item != GOOD:
        toy.check(VARIABLES, item, answer)
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


def test_what_is_not_compiled_is_an_error_and_not_a_compilation(engines):
  with engines(lengths=(3, 5, 6)) as engine:
    answers = engine.predict([('full', [1] * 5), GOOD])
  assert isinstance(answers[0].error, MissingProgramError)
  assert 'compiled by warm_up()' in str(answers[0].error)
  toy.check(VARIABLES, GOOD, answers[1])


def test_who_brings_too_much_waits_for_room(engines):
  with engines(max_pending=2) as engine:
    held = engine.submit(('full', [5, 5]))
    assert engine._policy.reached.wait(WAIT)
    second = engine.submit(GOOD)
    with pytest.raises(OverloadedError, match=r'max_pending: 2 rows'):
      engine.submit(GOOD, timeout=0.05)
    third = []
    thread = threading.Thread(
      target=lambda: third.extend(engine.predict([GOOD]))
    )
    thread.start()
    time.sleep(0.05)
    assert not third
    engine._policy.open.set()
    thread.join()
    for item, answer in (
      (('full', [5, 5]), held.result()),
      (GOOD, second.result()),
      (GOOD, third[0]),
    ):
      toy.check(VARIABLES, item, answer)


def test_a_single_request_gets_in_between_a_long_list(engines):
  with engines(max_pending=4) as engine:
    done = []

    def long_list():
      engine.predict([GOOD] * 400)
      done.append('list')

    thread = threading.Thread(target=long_list)
    thread.start()
    while engine.status()['pending'] < 4:
      time.sleep(0.001)
    engine.submit(GOOD).result(timeout=WAIT)
    assert not done
    thread.join()


def test_a_rare_row_is_not_starved_by_common_ones(engines):
  with engines(max_wait=0.001) as engine:
    stop = threading.Event()
    served = []

    def common():
      while not stop.is_set():
        served.extend(engine.predict([('full', [0])] * 64))

    thread = threading.Thread(target=common)
    thread.start()
    try:
      while not served:
        time.sleep(0.001)
      # Alone in its variant, in all its places.
      answer = engine.submit(('pruned', [2, 0])).result(timeout=WAIT)
    finally:
      stop.set()
      thread.join()
    toy.check(VARIABLES, ('pruned', [2, 0]), answer)


def test_a_callback_may_submit_but_never_waits(engines):
  with engines(max_pending=1) as engine:
    outcomes = []

    def again(future):
      try:
        engine.submit(GOOD)
      except OverloadedError as error:
        outcomes.append(error)
      try:
        engine.predict([GOOD])
      except RuntimeError as error:
        outcomes.append(error)

    # Held, so that the callback is there before the answer.
    held = engine.submit(('full', [5, 5]))
    assert engine._policy.reached.wait(WAIT)
    held.add_done_callback(again)
    engine._policy.open.set()
    engine.predict([GOOD])
  # The row that calls back is itself still pending.
  assert [type(error) for error in outcomes] == [OverloadedError, RuntimeError]


def test_closing_while_busy_drains(engines):
  engine = engines(max_pending=64)
  held = [engine.submit(item) for item in [('full', [5, 5]), *[GOOD] * 20]]
  assert engine._policy.reached.wait(WAIT)
  closer = threading.Thread(target=engine.close)
  closer.start()
  while not engine._intake.is_closed:
    time.sleep(0.001)
  with pytest.raises(ClosedError):
    engine.submit(GOOD)
  assert not held[0].done()
  engine._policy.open.set()
  closer.join()
  for future in held[1:]:
    toy.check(VARIABLES, GOOD, future.result(timeout=0))
  engine.close()
  assert engine.status()['pending'] == 0


def test_closing_while_busy_cancels(engines):
  engine = engines(max_pending=64)
  futures = [engine.submit(item) for item in [('full', [5, 5]), *[GOOD] * 20]]
  assert engine._policy.reached.wait(WAIT)
  closer = threading.Thread(target=engine.close, kwargs=dict(drain=False))
  closer.start()
  time.sleep(0.05)
  engine._policy.open.set()
  closer.join()
  answers = [future.result(timeout=0) for future in futures]
  assert {answer.during for answer in answers[4:]} == {'close'}
  assert all(isinstance(a.error, ClosedError) for a in answers[4:])
  status = engine.status()
  assert status['pending'] == status['pooled_rows'] == 0


def test_who_waits_for_room_is_told_of_the_end(engines):
  engine = engines(max_pending=1)
  engine.submit(('full', [5, 5]))
  assert engine._policy.reached.wait(WAIT)
  outcome = []

  def blocked():
    try:
      engine.predict([GOOD])
    except ClosedError as error:
      outcome.append(error)

  thread = threading.Thread(target=blocked)
  thread.start()
  time.sleep(0.05)
  engine._intake.close(cancel=False)
  thread.join(WAIT)
  engine._policy.open.set()
  engine.close()
  assert len(outcome) == 1


def test_an_exception_inside_the_context_cancels(engines):
  with pytest.raises(KeyError), engines() as engine:  # noqa: PT012
    engine.submit(('full', [5, 5]))
    assert engine._policy.reached.wait(WAIT)
    later = engine.submit(GOOD)
    engine._policy.open.set()
    raise KeyError
  assert later.done()


def test_the_thread_ends_by_itself_and_comes_back(engines, monkeypatch):
  monkeypatch.setattr(worker, 'LINGER_SECONDS', 0.01)
  engine = engines()  # and nobody closes it
  for _ in range(3):
    toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])
    engine._thread.join(WAIT)
    assert not engine._thread.is_alive()


@pytest.mark.parametrize('method', ['_next', '_serve'])
def test_a_thread_that_ends_leaves_the_next_alone(engines, monkeypatch, method):
  monkeypatch.setattr(worker, 'LINGER_SECONDS', 0.01)
  engine = engines()
  real = getattr(engine._worker, method)
  decided, go = threading.Event(), threading.Event()

  def slow(*arguments, **more):
    result = real(*arguments, **more)
    if not engine._worker.is_active and not decided.is_set():
      decided.set()
      assert go.wait(WAIT)
    return result

  monkeypatch.setattr(engine._worker, method, slow)
  toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])
  first = engine._thread
  assert decided.wait(WAIT)
  held = engine.submit(('full', [5, 5]))
  second = engine._thread
  assert second is not first
  assert engine._policy.reached.wait(WAIT)  # the second is at work
  go.set()
  first.join(WAIT)
  assert not first.is_alive()
  later = engine.submit(GOOD)
  assert engine._thread is second
  engine._policy.open.set()
  toy.check(VARIABLES, ('full', [5, 5]), held.result(WAIT))
  toy.check(VARIABLES, GOOD, later.result(WAIT))
  engine.close()


def test_a_thread_that_cannot_start_fails_the_rows(engines, monkeypatch):
  def broken(thread):
    raise RuntimeError("can't start new thread")

  engine = engines()
  with monkeypatch.context() as patch:
    patch.setattr(threading.Thread, 'start', broken)
    answers = engine.predict([GOOD] * 10)
  assert {answer.during for answer in answers} == {'engine'}
  assert all("can't start" in str(answer.error) for answer in answers)
  status = engine.status()
  assert status['pending'] == status['queued_rows'] == 0
  assert status['queue_bytes'] == 0
  toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])
  engine.close()


def test_inputs_that_are_no_arrays_leave_nothing_queued(engines, monkeypatch):
  with engines() as engine:
    encode = engine._policy.encode

    def broken(item):
      encoded = encode(item)
      if item != GOOD:
        object.__setattr__(encoded, 'inputs', None)
      return encoded

    monkeypatch.setattr(engine._policy, 'encode', broken)
    with pytest.raises(AttributeError):
      engine.predict([GOOD, ('full', [0])])
    status = engine.status()
    assert status['pending'] == status['queued_rows'] == 0
    toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])


def test_a_callback_that_exits_keeps_nobody_waiting(engines):
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


def test_a_monitor_that_raises_keeps_nobody_waiting(engines, monkeypatch):
  def broken(*arguments):
    raise RuntimeError('a defect')

  with engines() as engine:
    monkeypatch.setattr(engine.monitor, 'record_answer', broken)
    answer = engine.submit(GOOD).result(WAIT)
  toy.check(VARIABLES, GOOD, answer)


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_defect_and_a_callback_that_exits_leave_nobody_waiting(
  engines, monkeypatch
):
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


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_an_exit_in_the_middle_of_a_batch_loses_no_row(engines, monkeypatch):
  engine = engines()
  monkeypatch.setattr(engine._programs, 'run', lambda *_: sys.exit('a defect'))
  futures = engine._admit([GOOD] * 3)
  assert {future.result(WAIT).during for future in futures} == {'engine'}
  engine.close()
  assert engine.status()['pending'] == 0


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_defect_of_the_engine_leaves_nobody_waiting(engines, monkeypatch):
  engine = engines()

  def broken(*arguments):
    raise RuntimeError('a defect')

  monkeypatch.setattr(engine._worker, '_go_on', broken)
  answers = engine.predict([GOOD] * 3)
  assert {answer.during for answer in answers} == {'engine'}
  with pytest.raises(ClosedError):
    engine.predict([GOOD])
  engine.close()
