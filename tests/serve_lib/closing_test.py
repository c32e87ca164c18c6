"""Closing while busy, and a thread that ends or cannot start."""

import threading
import time

import pytest

from serve_lib import worker
from serve_lib.chain import ClosedError
from tests.serve_lib import toy
from tests.serve_lib.faulty import GOOD, VARIABLES, WAIT

pytestmark = pytest.mark.usefixtures('no_thread_stays')


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


def test_closing_ends_the_wait_for_room(engines):
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
  engine = engines()  # not closed
  for _ in range(3):
    toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])
    engine._thread.join(WAIT)
    assert not engine._thread.is_alive()


@pytest.mark.parametrize('method', ['_next', '_step'])
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


def test_a_thread_that_cannot_start_is_an_error(engines, monkeypatch):
  def broken(thread):
    raise RuntimeError("can't start new thread")

  engine = engines()
  with monkeypatch.context() as patch:
    patch.setattr(threading.Thread, 'start', broken)
    with pytest.raises(RuntimeError, match="can't start"):
      engine.predict([GOOD] * 10)
  status = engine.status()
  assert status['pending'] == status['queued_rows'] == 0
  assert status['queue_bytes'] == 0
  toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])
  engine.close()
