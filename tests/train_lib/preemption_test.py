"""Signals: the first asks, the second kills, processes agree."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from train_lib.preemption import PREEMPTED, Preempted, PreemptionGuard

LOOP = """
import sys, time
from train_lib.preemption import PREEMPTED, Preempted, PreemptionGuard

def loop():
  with PreemptionGuard() as guard:
    step = 0
    while True:
      step += 1
      time.sleep(0.05)
      if guard.should_stop(step):
        print(f'saved {step}', flush=True)
        if 'hang' in sys.argv:
          time.sleep(60)
        raise Preempted(step)
      print(step, flush=True)

if 'distributed' in sys.argv:
  import jax
  jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
try:
  loop()
except Preempted as event:
  print(event, flush=True)
  sys.exit(PREEMPTED)
"""


def start(repository, *arguments):
  return subprocess.Popen(
    [sys.executable, '-c', LOOP, *arguments], cwd=repository, text=True,
    env=os.environ | {'XLA_FLAGS': ''}, stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )  # fmt: skip


def wait_for_step(process, step):
  for line in process.stdout:
    if line == f'{step}\n':
      return


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step_with_its_own_exit_code(
  repository, number
):
  with start(repository) as process:
    wait_for_step(process, 3)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
  assert process.returncode == PREEMPTED == 75, errors
  *steps, saved, message = output.splitlines()
  last = int(saved.removeprefix('saved '))
  assert [int(step) for step in steps] == list(range(4, last))
  assert last <= 6
  assert f'step {last} is saved' in message


def test_a_second_signal_ends_a_process_that_hangs(repository):
  with start(repository, 'hang') as process:
    wait_for_step(process, 2)
    process.send_signal(signal.SIGTERM)
    for line in process.stdout:
      if line.startswith('saved'):
        break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
  assert process.returncode == -signal.SIGTERM


def handlers():
  return [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]


def test_handlers_come_back():
  before = handlers()
  with PreemptionGuard() as guard:
    assert not guard.should_stop(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert guard.should_stop(2)
    assert guard.should_stop(3)
  assert before == handlers()
  assert not PreemptionGuard().should_stop(1)
  assert Preempted(7).step == 7


def test_a_guard_in_another_thread_leaves_signals_alone():
  before = handlers()
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    guard = pool.submit(PreemptionGuard().__enter__).result()
  assert not guard.should_stop(1)
  assert before == handlers()


@pytest.mark.nightly
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('hit', [0, 1])
def test_two_processes_stop_at_the_same_step(repository, number, hit):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  processes = [
    start(repository, 'distributed', address, str(index)) for index in range(2)
  ]
  for process in processes:
    wait_for_step(process, 3)
  time.sleep(0.2)
  processes[hit].send_signal(number)
  outputs = [process.communicate(timeout=60) for process in processes]
  assert [p.returncode for p in processes] == [PREEMPTED] * 2, outputs
  saved = [output.splitlines()[-2] for output, _ in outputs]
  assert saved[0] == saved[1]
  assert saved[0].startswith('saved')
