"""Back pressure: `submit` blocks at the limit, and no row starves."""

import threading
import time

import pytest

from serve_lib.chain import OverloadedError
from tests.serve_lib import toy
from tests.serve_lib.faulty import GOOD, VARIABLES, WAIT

pytestmark = pytest.mark.usefixtures('no_thread_stays')


def test_submit_blocks_at_the_limit(engines):
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


def test_a_callback_may_submit_but_never_blocks(engines):
  with engines(max_pending=1) as engine:
    outcomes = []

    def again(future):
      try:
        engine.submit(GOOD)
      except OverloadedError as error:
        outcomes.append(error)
      for waiting in (engine.predict, engine.stream):
        try:
          list(waiting([GOOD]))
        except RuntimeError as error:
          outcomes.append(error)

    # Held, so that the callback is there before the answer.
    held = engine.submit(('full', [5, 5]))
    assert engine._policy.reached.wait(WAIT)
    held.add_done_callback(again)
    engine._policy.open.set()
    engine.predict([GOOD])
  # The row that calls back is itself still pending.
  kinds = [type(error) for error in outcomes]
  assert kinds == [OverloadedError, RuntimeError, RuntimeError]
