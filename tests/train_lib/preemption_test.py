"""Signals: the first asks, the second has its default effect."""

import concurrent.futures
import os
import signal

import pytest

from train_lib.trainer import SIGNALS, PreemptionGuard


def handlers():
  return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize('number', SIGNALS)
def test_the_first_signal_stops_and_the_second_is_not_handled(number):
  before = handlers()
  with PreemptionGuard() as guard:
    assert not guard.should_stop()
    assert before != handlers()
    os.kill(os.getpid(), number)
    assert before == handlers()
    assert guard.should_stop()
    assert guard.should_stop()
  with PreemptionGuard() as guard:
    assert not guard.should_stop()
  assert before == handlers()


def test_a_guard_in_another_thread_leaves_signals_alone():
  before = handlers()
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    guard = pool.submit(PreemptionGuard().__enter__).result()
  assert not guard.should_stop()
  assert before == handlers()
