"""Signals: the first asks, the second has its default effect."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from train_lib.preemption import PREEMPTED, SIGNALS, Preempted, PreemptionGuard


def handlers():
  return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize('number', SIGNALS)
def test_the_first_signal_stops_and_the_second_is_not_handled(number):
  before = handlers()
  with PreemptionGuard() as guard:
    assert not guard.should_stop(1)
    assert before != handlers()
    os.kill(os.getpid(), number)
    assert before == handlers()
    assert guard.should_stop(2)
    assert guard.should_stop(3)
  with PreemptionGuard() as guard:
    assert not guard.should_stop(1)
  assert before == handlers()


def test_a_guard_in_another_thread_leaves_signals_alone():
  before = handlers()
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    guard = pool.submit(PreemptionGuard().__enter__).result()
  assert not guard.should_stop(1)
  assert before == handlers()


LOOP = """
import sys, time
import jax
from train_lib.preemption import PREEMPTED, Preempted, PreemptionGuard

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
try:
  with PreemptionGuard() as guard:
    for step in range(1, 10_000):
      time.sleep(0.05)
      if guard.should_stop(step):
        raise Preempted(step)
      print(step, flush=True)
except Preempted as event:
  print(event, flush=True)
  sys.exit(PREEMPTED)
"""


@pytest.mark.nightly
@pytest.mark.parametrize('number', SIGNALS)
@pytest.mark.parametrize('hit', [0, 1])
def test_two_processes_stop_at_the_same_step(repository, number, hit):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', LOOP, address, str(index)], cwd=repository,
      env=os.environ | {'XLA_FLAGS': ''}, text=True, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for index in range(2)
  ]  # fmt: skip
  for process in processes:
    while process.stdout.readline() != '3\n':
      pass
  time.sleep(0.2)
  processes[hit].send_signal(number)
  outputs = [process.communicate(timeout=60) for process in processes]
  assert [p.returncode for p in processes] == [PREEMPTED] * 2, outputs
  saved = [output.splitlines()[-1] for output, _ in outputs]
  assert saved[0] == saved[1] == str(Preempted(int(saved[0].split()[5])))
