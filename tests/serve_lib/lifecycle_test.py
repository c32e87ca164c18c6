"""Back pressure, streams, closing and the thread: no answer is lost."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from serve_lib import worker
from serve_lib.chain import ClosedError, OverloadedError
from tests.serve_lib import toy
from tests.serve_lib.toy import GOOD, VARIABLES, WAIT

pytestmark = pytest.mark.usefixtures('no_thread_stays')
HOLDS = ('full', [5, 5])  # holds the worker until the policy opens


def hold(engine):
  """Submits the item that holds the worker, and waits until it does."""
  future = engine.submit(HOLDS)
  assert engine._policy.reached.wait(WAIT)
  return future


def started(call, **arguments):
  thread = threading.Thread(target=call, kwargs=arguments)
  thread.start()
  return thread


def wait_for_threads(count):
  """Waits until no more threads than this are left."""
  deadline = time.monotonic() + WAIT
  while threading.active_count() > count:
    assert time.monotonic() < deadline
    time.sleep(0.001)


# -- back pressure


def test_submit_blocks_at_the_limit(engines):
  with engines(max_pending=2) as engine:
    held, second, third = hold(engine), engine.submit(GOOD), []
    with pytest.raises(OverloadedError, match=r'max_pending: 2 rows'):
      engine.submit(GOOD, timeout=0.05)
    thread = started(lambda: third.extend(engine.predict([GOOD])))
    time.sleep(0.05)
    assert not third
    engine._policy.open.set()
    thread.join()
  toy.check(VARIABLES, HOLDS, held.result())
  for answer in (second.result(), *third):
    toy.check(VARIABLES, GOOD, answer)


def test_a_single_request_gets_in_between_a_long_list(engines):
  with engines(max_pending=4) as engine:
    done = []
    thread = started(lambda: done.extend(engine.predict([GOOD] * 400)))
    while engine.status()['pending'] < 4:
      time.sleep(0.001)
    engine.submit(GOOD).result(timeout=WAIT)
    assert not done
    thread.join()


@pytest.mark.parametrize('max_wait', [0.0, 0.001])
def test_a_rare_row_is_not_starved_by_common_ones(engines, max_wait):
  with engines(max_wait=max_wait) as engine:
    stop, served = threading.Event(), []

    def common():
      while not stop.is_set():
        served.extend(engine.predict([('full', [0])] * 64))

    thread = started(common)
    try:
      while not served:
        time.sleep(0.001)
      # Alone in its variant, at all stages.
      answer = engine.submit(('pruned', [2, 0])).result(timeout=WAIT)
    finally:
      stop.set()
      thread.join()
    toy.check(VARIABLES, ('pruned', [2, 0]), answer)


def test_a_callback_may_submit_but_never_blocks(engines):
  with engines(max_pending=1) as engine:
    outcomes = []

    def again(future):
      for call in (engine.submit, engine.predict, engine.stream):
        try:
          call(GOOD if call == engine.submit else [GOOD])
        except (OverloadedError, RuntimeError) as error:
          outcomes.append(type(error))

    # Held, so that the callback is there before the answer.
    hold(engine).add_done_callback(again)
    engine._policy.open.set()
    engine.predict([GOOD])
  # The row that calls back is itself still pending.
  assert outcomes == [OverloadedError, RuntimeError, RuntimeError]


# -- streams


@pytest.mark.parametrize('breaks', [False, True])
def test_a_stream_is_in_order_and_raises_what_its_source_raises(
  engines, breaks
):
  items, answers = toy.random_items(2, 50, 6), []

  def source():
    yield from items
    if breaks:
      raise OSError('the pipe broke')

  with engines() as engine:
    engine.predict([GOOD])
    before = threading.active_count()
    stream = engine.stream(source(), window=5)
    answers += [next(stream) for _ in items]
    with pytest.raises(OSError if breaks else StopIteration):
      next(stream)
    assert threading.active_count() == before
  for item, answer in zip(items, answers, strict=True):
    toy.check(VARIABLES, item, answer)


def test_a_stream_answers_while_its_source_waits(engines):
  first_answer = threading.Event()

  def source():
    yield ('full', [1])
    assert first_answer.wait(WAIT)
    yield ('full', [2])

  with engines() as engine:
    answers = engine.stream(source(), window=5)
    assert next(answers)['tokens'] == [1]
    first_answer.set()
    assert [answer['tokens'] for answer in answers] == [[2]]


def test_a_stream_reads_ahead_no_further_than_its_window(engines):
  read, threads = [], threading.active_count()

  def source():
    for number in range(1000):
      read.append(number)
      yield GOOD

  with engines() as engine:
    answers = engine.stream(source(), window=3)
    for _ in range(4):
      next(answers)
    time.sleep(0.05)
    assert len(read) <= 4 + 3
    answers.close()
  wait_for_threads(threads)
  assert len(read) <= 4 + 3 + 1


def test_after_an_early_exit_no_item_is_submitted(engines):
  asked, go = threading.Event(), threading.Event()
  threads = threading.active_count()

  def source():
    yield GOOD
    asked.set()
    assert go.wait(WAIT)
    yield GOOD

  with engines() as engine:
    answers = engine.stream(source(), 4)
    next(answers)
    assert asked.wait(WAIT)
    answers.close()  # does not wait for the source
    go.set()
  wait_for_threads(threads)
  assert engine.monitor.snapshot()['answers'] == 1


PROGRAM = """
import signal
from tests.serve_lib import toy
# Ignored where the tests run in the background of a shell.
signal.signal(signal.SIGINT, signal.default_int_handler)
def items():
  for line in open(0, 'rb', closefd=False):
    yield 'full', [0]
with toy.make_engine() as engine:
  for answer in engine.stream(items(), 4):
    print(answer['depth'], flush=True)
"""


def test_an_interrupt_ends_a_program_whose_source_is_idle(repository):
  with subprocess.Popen(
    [sys.executable, '-c', PROGRAM],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    cwd=repository,
  ) as process:
    try:
      process.stdin.write(b'one\n')
      process.stdin.flush()
      assert process.stdout.readline() == b'1\n'
      process.send_signal(signal.SIGINT)
      assert process.wait(WAIT) == -signal.SIGINT  # and its input is open
      message = process.stderr.read()
    finally:
      process.kill()
  assert message.splitlines()[-1] == b'KeyboardInterrupt'


# -- closing, and the thread


@pytest.mark.parametrize('drain', [True, False])
def test_closing_while_busy_drains_or_cancels(engines, drain):
  engine = engines(max_pending=64)
  futures = [hold(engine), *(engine.submit(GOOD) for _ in range(20))]
  closer = started(engine.close, drain=drain)
  while not engine._requests.is_closed:
    time.sleep(0.001)
  with pytest.raises(ClosedError):
    engine.submit(GOOD)
  assert not futures[0].done()
  engine._policy.open.set()
  closer.join()
  answers = [future.result(timeout=0) for future in futures]
  for answer in answers[4:]:
    if drain:
      toy.check(VARIABLES, GOOD, answer)
    else:
      assert answer.during == 'close'
      assert isinstance(answer.error, ClosedError)
  engine.close()
  status = engine.status()
  assert status['pending'] == status['pooled_rows'] == 0


def test_closing_ends_the_wait_for_room(engines):
  engine = engines(max_pending=1)
  hold(engine)
  outcome = []

  def blocked():
    with pytest.raises(ClosedError):
      engine.predict([GOOD])
    outcome.append('refused')

  thread = started(blocked)
  time.sleep(0.05)
  closer = started(engine.close)
  thread.join(WAIT)
  engine._policy.open.set()
  closer.join()
  assert outcome == ['refused']


def test_an_exception_inside_the_context_cancels(engines):
  with pytest.raises(KeyError), engines() as engine:  # noqa: PT012
    hold(engine)
    later = engine.submit(GOOD)
    engine._policy.open.set()
    raise KeyError
  assert later.done()


def test_the_thread_ends_by_itself_and_comes_back(engines, monkeypatch):
  monkeypatch.setattr(worker, 'LINGER_SECONDS', 0.01)
  engine, threads = engines(), threading.active_count()  # not closed
  for _ in range(3):
    toy.check(VARIABLES, GOOD, engine.predict([GOOD])[0])
    wait_for_threads(threads)


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
  held = hold(engine)  # by a second thread
  go.set()
  first.join(WAIT)
  assert not first.is_alive()
  later = engine.submit(GOOD)
  engine._policy.open.set()
  toy.check(VARIABLES, HOLDS, held.result(WAIT))
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
