"""Back pressure, streams, closing and the thread: no answer is lost."""

import concurrent.futures
import contextlib
import gc
import threading
import time

import pytest

from serve_lib import pool, turns
from serve_lib.chain import ClosedError, Encoded, OverloadedError, Row
from tests.serve_lib import toy
from tests.serve_lib.toy import GOOD, HOLDS, WAIT, faulty, hold

pytestmark = pytest.mark.usefixtures('no_thread_stays')


def started(call, **arguments):
  thread = threading.Thread(target=call, kwargs=arguments)
  thread.start()
  return thread


def wait_until(condition):
  deadline = time.monotonic() + WAIT
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.001)


# -- back pressure


@pytest.mark.parametrize('closes', [False, True])
def test_submit_blocks_at_the_limit_until_there_is_room_or_an_end(closes):
  with faulty(max_pending=2) as engine:
    held, second, third = hold(engine), engine.submit(GOOD), []
    with pytest.raises(OverloadedError, match=r'max_pending: 2 rows'):
      engine.submit(GOOD, timeout=0.05)

    def blocked():
      with contextlib.suppress(ClosedError):
        third.extend(engine.predict([GOOD]))

    thread = started(blocked)
    time.sleep(0.05)
    assert not third
    closer = started(engine.close if closes else bool)
    if closes:
      thread.join(WAIT)
    engine.policy.open.set()
    thread.join(WAIT)
    closer.join(WAIT)
  toy.check(HOLDS, held.result())
  toy.check(GOOD, second.result())
  assert len(third) == (not closes)
  for answer in third:
    toy.check(GOOD, answer)


def test_a_single_request_gets_in_between_a_long_list():
  with faulty(max_pending=4) as engine:
    done = []
    thread = started(lambda: done.extend(engine.predict([GOOD] * 400)))
    wait_until(lambda: engine.status()['pending'] == 4)
    engine.submit(GOOD).result(timeout=WAIT)
    assert not done
    thread.join()


@pytest.mark.parametrize('small', [GOOD, ('full', [2, 0, 0, 0])])
def test_a_row_gets_in_between_those_of_a_long_list(small):
  with faulty(batches=(1,), max_pending=64, ahead=0) as engine:
    hold(engine)
    order, flow = [], turns.Flow(16)
    for number in range(0, 16, 4):
      for future in engine.submit_all([GOOD] * 4, flow=flow):
        future.add_done_callback(lambda _, n=number: order.append(n))
    time.sleep(0.01)  # they are older, and of another length
    engine.submit(small).add_done_callback(lambda _: order.append('small'))
    engine.policy.open.set()
  assert order.index('small') <= 1


@pytest.mark.parametrize(('pause', 'most'), [(60.0, 2), (0.0, 4)])
def test_long_calls_fill_no_batches_while_small_ones_come(
  monkeypatch, pause, most
):
  monkeypatch.setattr(pool, 'PAUSE', pause)
  with faulty(max_pending=64, ahead=0) as engine:
    engine._programs.padding = 1  # tokens; a batch has 8 times that
    hold(engine)
    futures = engine.submit_all([GOOD] * 16)
    engine.policy.open.set()
    for future in futures:
      toy.check(GOOD, future.result(WAIT))
  decided = engine.policy.decided
  assert max(rows for stage, rows in decided if stage == 0) == most


def test_new_small_calls_do_not_hold_up_a_long_one_for_ever():
  requests, flow = pool.RequestQueue(1000), turns.Flow(64)

  def put(count, flow):
    row = Encoded({}, 1, 'full')
    rows = (
      Row(row, 1, concurrent.futures.Future(), 0.0, 0.0) for _ in range(count)
    )
    requests.put([*rows], 0, flow)

  put(64, flow)
  for _ in range(8):
    put(1, turns.Flow(1))
  for _ in range(64 * 3):  # each gets a share of nine
    [group] = requests.groups
    for row in requests.take(group, 4):
      if row.flow is not flow:
        put(1, turns.Flow(1))
  assert len(requests.rows()) == 8


@pytest.mark.parametrize('batches', [(1,), (1, 2, 4)])
def test_a_cancelled_row_leaves_the_engine(batches):
  with faulty(batches=batches, max_pending=9) as engine:
    held = hold(engine)
    futures = [engine.submit(item) for item in [GOOD, ('pruned', [2, 0])] * 4]
    assert held.cancel()  # it is computed now; its answer is dropped
    assert all(future.cancel() for future in futures[2:])
    assert not concurrent.futures.wait(futures[2:], WAIT).not_done
    assert engine.status()['pending'] == 2
    more = engine.submit_all([GOOD] * 7, timeout=0.0)  # there is room
    engine.policy.open.set()
    for future in (*futures[::8], *more):
      toy.check(GOOD, future.result(WAIT))
    assert futures[1].result(WAIT)['depth'] == 3
  assert engine.status()['pending'] == 0
  assert engine.monitor.snapshot()['answers'] == 9
  assert sum(rows for stage, rows in engine.policy.decided if not stage) <= 10


@pytest.mark.parametrize('place', ['open', 'ready', 'retried'])
def test_a_cancelled_row_leaves_the_pool(monkeypatch, place):
  with faulty(max_wait=60.0, ahead=0) as engine:
    scheduler, futures, seen = engine._worker.scheduler, [], []
    rows = {'open': 2, 'ready': 4, 'retried': 3}[place]
    take = scheduler.next

    def next_batch():
      waits = {
        'open': scheduler.pool.open,
        'ready': scheduler.pool.ready,
        'retried': scheduler.retried,
      }
      if waits[place] and not seen:
        seen.append(True)
        futures[0].cancel()
      return take()

    monkeypatch.setattr(scheduler, 'next', next_batch)
    good, bad = [GOOD] * rows, []
    if place == 'retried':
      engine.policy.broken_stage = 0
      good, bad = good[1:], [('full', toy.BREAKS)]
    engine._requests.expect(1)  # one batch of all
    futures += engine.submit_all(good + bad)
    engine._requests.expect(-1)
    for future in futures[1 : len(good)]:
      toy.check(GOOD, future.result(WAIT))
  assert seen
  assert futures[0].cancelled()
  assert engine.status()['pending'] == engine.status()['pooled_rows'] == 0


def test_a_rare_row_is_not_starved_by_common_ones():
  with faulty(max_wait=0.001) as engine:
    stop, served = threading.Event(), []

    def common():
      while not stop.is_set():
        served.extend(engine.predict([('full', [0])] * 64))

    thread = started(common)
    try:
      wait_until(lambda: served)
      # Alone in its variant, at all stages.
      answer = engine.submit(('pruned', [2, 0])).result(timeout=WAIT)
    finally:
      stop.set()
      thread.join()
    toy.check(('pruned', [2, 0]), answer)


def test_a_callback_may_submit_but_never_blocks():
  with faulty(max_pending=1) as engine:
    outcomes = []

    def again(future):
      for call in (engine.submit, engine.predict, engine.stream):
        try:
          call(GOOD if call == engine.submit else [GOOD])
        except (OverloadedError, RuntimeError) as error:
          outcomes.append(type(error))

    # Held, so that the callback is there before the answer.
    hold(engine).add_done_callback(again)
    waiting = started(lambda: engine.predict([GOOD]))
    wait_until(lambda: engine._requests._line)
    engine.policy.open.set()
    waiting.join(WAIT)
  # The room of the row that calls back is for the one that waits.
  assert outcomes == [OverloadedError, RuntimeError, RuntimeError]


# -- streams


@pytest.mark.parametrize('error', [OSError, StopIteration])
def test_a_stream_is_in_order_and_raises_what_its_source_raises(error):
  items = toy.random_items(2, 50, 6)

  def source():
    yield from items
    if error is OSError:
      raise error('the pipe broke')

  with faulty() as engine:
    engine.predict([GOOD])
    before = threading.active_count()
    stream = engine.stream(source(), window=5)
    for item in items:
      toy.check(item, next(stream))
    with pytest.raises(error):
      next(stream)
    assert threading.active_count() == before


def test_a_stream_answers_while_its_source_waits_within_its_window():
  read, threads, go = [], threading.active_count(), threading.Event()

  def source():
    for number in range(1000):
      read.append(number)
      assert number < 8 or go.wait(WAIT)
      yield GOOD

  with faulty() as engine:
    answers = engine.stream(source(), window=4)
    for _ in range(4):
      next(answers)
    time.sleep(0.05)
    assert len(read) <= 4 + 4
    for _ in range(2):
      next(answers)
    wait_until(lambda: len(read) >= 9)
    next(answers)  # while the source waits
    answers.close()  # does not wait for it
    go.set()
  wait_until(lambda: threading.active_count() <= threads)
  assert len(read) == 9
  assert engine.monitor.snapshot()['answers'] == 8


# -- closing, and the thread


@pytest.mark.parametrize('drain', [True, False])
def test_closing_while_busy_drains_or_cancels(drain):
  engine = faulty(max_pending=64)
  futures = [hold(engine), *(engine.submit(GOOD) for _ in range(20))]
  closer = started(engine.close, drain=drain)
  wait_until(lambda: engine._requests.is_closed)
  with pytest.raises(ClosedError):
    engine.submit(GOOD)
  assert not futures[0].done()
  engine.policy.open.set()
  closer.join()
  for future in futures[4:]:
    answer = future.result(timeout=0)
    if drain:
      toy.check(GOOD, answer)
    else:
      assert answer.during == 'close'
      assert isinstance(answer.error, ClosedError)
  engine.close()
  status = engine.status()
  assert status['pending'] == status['pooled_rows'] == 0


def test_an_exception_inside_the_context_cancels():
  with pytest.raises(KeyError), faulty() as engine:  # noqa: PT012
    hold(engine)
    later = engine.submit(GOOD)
    engine.policy.open.set()
    raise KeyError
  assert later.done()


def test_the_thread_of_an_engine_that_is_not_closed_ends_with_it():
  threads, engine = threading.active_count(), faulty()
  future = engine.submit(GOOD)
  del engine
  toy.check(GOOD, future.result(WAIT))
  wait_until(
    lambda: gc.collect() is None or threading.active_count() <= threads
  )
