"""Faults of running trainings: peers, signals, full disks, stuck inputs.

A run ends soon, with one line on stderr and its own exit code, and continues
bit-identically.
"""

import functools
import signal
import time

import pytest

from tests.launch.resume_test import (
  EVERY_7,
  start_two,
)

FAULTY = '--config.dataset.name=tests.fakes:FaultyParity'
ENDLESS = (
  EVERY_7, '--config.stages.stage1.steps=1000000', '--config.log_every=50',
  '--config.evals.test.every_steps=0',
)  # fmt: skip
PEER, STUCK = 8, 9
AT_NIGHT = functools.partial(pytest.param, marks=pytest.mark.nightly)
PROMISE = 30.0  # seconds until the other processes have ended


def ended(processes, seconds):
  """Waits for processes; returns (exit codes, error lines)."""
  deadline = time.monotonic() + seconds
  try:
    for process in processes:
      process.wait(max(0.1, deadline - time.monotonic()))
  finally:
    for process in processes:
      process.kill()
  errors = [process.communicate()[1] for process in processes]
  lines = [
    [line for line in text.splitlines() if line.startswith('error: ')]
    for text in errors
  ]
  return [process.returncode for process in processes], lines, errors


def wait_for_step(workdir, step, *processes):
  path = workdir / 'metrics.jsonl'
  while not path.exists() or f'"step": {step},' not in path.read_text():
    assert all(process.poll() is None for process in processes)
    time.sleep(0.05)


def one_line(text):
  assert text.startswith('error: '), text
  assert text.count('\n') == 1, text
  return text


@pytest.mark.slow
def test_a_stuck_peer_ends_all_within_the_watchdog(tmp_path):
  flags = (FAULTY, '--config.watchdog_seconds=5')
  two = start_two(tmp_path, *flags, faults=('', 'stuck'))
  wait_for_step(tmp_path, 5, *two)
  codes, _, errors = ended(two, 60)
  assert codes == [STUCK, STUCK]
  for error in errors:
    line = one_line(error)
    assert 'process 1 is stuck at step 2' in line
    assert 'reading its batch' in line
    assert 'process 0' not in line


@pytest.mark.slow
@pytest.mark.parametrize(
  'victim', [1, pytest.param(0, marks=pytest.mark.nightly)]
)
def test_a_stopped_peer_ends_and_the_run_continues(tmp_path, victim):
  two = start_two(tmp_path, *ENDLESS)
  wait_for_step(tmp_path, 50, *two)
  two[victim].send_signal(signal.SIGSTOP)
  codes, _, errors = ended(two, PROMISE)
  assert codes[victim] == -signal.SIGKILL  # by its peer
  assert codes[1 - victim] == PEER
  assert f'process {victim} ' in one_line(errors[1 - victim])


@pytest.mark.slow
@pytest.mark.parametrize(
  'fault',
  [
    'exception',
    *(pytest.param(f, marks=pytest.mark.nightly) for f in ('exit', 'kill')),
  ],
)
@pytest.mark.parametrize(
  'victim', [1, pytest.param(0, marks=pytest.mark.nightly)]
)
def test_a_peer_that_dies_ends_the_other(tmp_path, fault, victim):
  faults = ['', '']
  faults[victim] = fault
  two = start_two(tmp_path, *ENDLESS, FAULTY, faults=faults)
  if fault == 'kill':
    wait_for_step(tmp_path, 50, *two)
    two[victim].kill()
  two[victim].wait(100)
  codes, _, errors = ended(two, PROMISE)
  print(codes, errors)
  code = {'exception': 1, 'exit': 9, 'kill': -signal.SIGKILL}[fault]
  assert codes[victim] == code
  if victim == 0 and fault != 'exception':
    # The coordination service is gone: JAX aborts the process.
    assert codes[1] in (PEER, -signal.SIGABRT)
  else:
    assert codes[1 - victim] == PEER
    assert f'process {victim} ' in one_line(errors[1 - victim])
