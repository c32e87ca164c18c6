"""Faults of running trainings: peers, signals, full disks, stuck inputs.

A run ends soon, with one line on stderr and its own exit code, and continues
bit-identically.
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest

from tests.launch.resume_test import (
  EVERY_7,
  NEVER,
  STEPS,
  assert_same_run,
  finish,
  run,
  start,
  start_two,
  wait_for_step,
)
from tests.marks import first_is_slow
from tests.shell import result, rows
from tests.train_lib import states

FAULTY = '--config.dataset.name=tests.fakes:FaultyParity'
ENDLESS = (
  EVERY_7, '--config.phases.0.steps=1000000', '--config.log_every=50',
  '--config.evals.test.every_steps=0',
)  # fmt: skip
PEER, STUCK = 8, 9
PROMISE = 30.0  # seconds until the other processes have ended


def ended(processes, seconds):
  """Waits for processes; returns their exit codes and what they printed."""
  deadline = time.monotonic() + seconds
  try:
    for process in processes:
      process.wait(max(0.1, deadline - time.monotonic()))
  finally:
    for process in processes:
      process.kill()
  errors = [process.communicate()[1] for process in processes]
  return [process.returncode for process in processes], errors


def one_line(text):
  assert text.startswith('error: '), text
  assert text.count('\n') == 1, text
  return text


@pytest.mark.nightly
def test_a_stuck_peer_ends_all_within_the_watchdog(tmp_path):
  flags = (FAULTY, '--config.watchdog_seconds=5')
  two = start_two(tmp_path, *flags, faults=('', 'stuck'))
  wait_for_step(tmp_path, 5, *two)
  codes, errors = ended(two, 60)
  assert codes == [STUCK, STUCK]
  for error in errors:
    line = one_line(error)
    assert 'process 1 is stuck at step 2' in line
    assert 'reading its batch' in line
    assert 'process 0' not in line


@pytest.fixture(scope='module')
def two_uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('two')
  finish(*start_two(workdir, EVERY_7, FAULTY))
  return workdir


@pytest.mark.nightly
@pytest.mark.parametrize('victim', [1, 0])
def test_a_stopped_peer_ends_and_the_run_continues(
  tmp_path, victim, two_uninterrupted
):
  flags, slow = (EVERY_7, FAULTY), ('slow_train', 'slow_train')
  two = start_two(tmp_path, *flags, faults=slow)
  wait_for_step(tmp_path, 20, *two)
  two[victim].send_signal(signal.SIGSTOP)
  codes, errors = ended(two, PROMISE)
  assert codes[victim] == -signal.SIGKILL  # by its peer
  assert codes[1 - victim] == PEER
  assert f'process {victim} ' in one_line(errors[1 - victim])
  finish(*start_two(tmp_path, *flags))
  assert_same_run(two_uninterrupted, tmp_path)


@pytest.mark.parametrize(
  ('fault', 'victim'),
  first_is_slow(
    ('exception', 1), ('exception', 0), ('exit', 1), ('exit', 0), ('kill', 1),
    ('kill', 0),
  ),
)  # fmt: skip
def test_a_peer_that_dies_ends_the_other(tmp_path, fault, victim):
  faults = ['', '']
  faults[victim] = fault
  two = start_two(tmp_path, *ENDLESS, FAULTY, faults=faults)
  if fault == 'kill':
    wait_for_step(tmp_path, 50, *two)
    two[victim].kill()
  two[victim].wait(100)
  codes, errors = ended(two, PROMISE)
  code = {'exception': 1, 'exit': 9, 'kill': -signal.SIGKILL}[fault]
  assert codes[victim] == code
  if victim == 0 and fault != 'exception':
    # The coordination service is gone: JAX aborts the process.
    assert codes[1] in (PEER, -signal.SIGABRT)
  else:
    assert codes[1 - victim] == PEER
    assert f'process {victim} ' in one_line(errors[1 - victim])


@pytest.mark.nightly
def test_a_signal_during_an_evaluation_saves_first(tmp_path):
  """The evaluation of step 20 reads 100 batches, each in 0.2 s."""
  flags = (NEVER, FAULTY, '--config.dataset.test_examples=3200')
  whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
  run(whole, *flags)
  process = start(stopped, *flags, fault='slow')
  wait_for_step(stopped, 17, process)  # metrics are read 2 steps late
  time.sleep(1.0)
  process.send_signal(signal.SIGTERM)
  assert 'step 20 is saved' in finish(process, code=75)
  run(stopped, *flags)
  assert rows(stopped) == rows(whole)


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 3 MB."""
  place = tmp_path / 'disk'
  place.mkdir()
  command = ['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', str(place)]
  if subprocess.run(command, capture_output=True).returncode:
    pytest.skip('mounting a small file system is not permitted')
  yield place
  subprocess.run(['umount', '--lazy', str(place)], check=True)


def fill(disk):
  """Leaves no space on a disk; returns the file that takes it."""
  path = disk / 'fill'
  with contextlib.suppress(OSError), path.open('wb', buffering=0) as file:
    while file.write(bytes(4096)):
      pass
  return path


@pytest.mark.parametrize('tensorboard', first_is_slow((True,), (False,)))
def test_a_full_disk_ends_with_one_line_and_the_run_continues(
  small_disk, tmp_path, tensorboard
):
  whole, workdir = tmp_path / 'whole', small_disk / 'run'
  run(whole, EVERY_7)
  flags = (EVERY_7, f'--config.tensorboard={tensorboard}')
  process = start(workdir, *flags, FAULTY, fault='slow_train')
  wait_for_step(workdir, 10, process)
  file = fill(small_disk)
  line = one_line(finish(process, code=6))
  assert f'{workdir}' in line
  assert 'No space left on device' in line
  assert (workdir / 'run.lock').read_text() == ''
  file.unlink()
  run(workdir, *flags, FAULTY)
  assert rows(workdir) == rows(whole)


@pytest.mark.nightly
def test_a_checkpoint_carries_the_rows_that_cannot_be_written(tmp_path):
  """The log fails from the 20th batch on, and checkpoints do not."""
  whole, workdir = tmp_path / 'whole', tmp_path / 'run'
  run(whole, NEVER, FAULTY)
  line = one_line(finish(start(workdir, NEVER, FAULTY, fault='no_log'), code=6))
  assert 'metrics.jsonl cannot be written' in line
  run(workdir, NEVER, FAULTY)
  assert result(workdir)['steps_this_process'] < STEPS
  assert rows(workdir) == rows(whole)


@pytest.mark.nightly
def test_the_log_of_one_of_two_processes_fails(tmp_path):
  two = start_two(tmp_path, NEVER, FAULTY, faults=('no_log', ''))
  codes, errors = ended(two, 2 * PROMISE)
  assert codes == [6, PEER]
  assert 'metrics.jsonl cannot be written' in one_line(errors[1])


LEAVING = """
import sys, time
import jax
from train_lib.watchdog import Watchdog
number = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, number)
with Watchdog(60) as watchdog:
  watchdog.progress('the last step')
  time.sleep(0 if number else 26)
print('left', flush=True)
"""


@pytest.mark.nightly
def test_a_process_that_has_finished_is_not_dead(tmp_path):
  with socket.socket() as listener:
    listener.bind(('localhost', 0))
    place = f'localhost:{listener.getsockname()[1]}'
  two = [states.start_python(LEAVING, place, n) for n in range(2)]
  assert [process.communicate(timeout=90)[0] for process in two] == [
    'left\n', 'left\n'
  ]  # fmt: skip
  assert [process.returncode for process in two] == [0, 0]


@pytest.mark.slow
def test_saves_that_keep_failing_stop_the_run(small_disk, tmp_path):
  """Checkpoints lie on another disk, which is full."""
  workdir = tmp_path / 'run'
  (small_disk / 'checkpoints').mkdir()
  workdir.mkdir()
  (workdir / 'checkpoints').symlink_to(small_disk / 'checkpoints')
  fill(small_disk)
  flags = (
    '--config.checkpoint.every_steps=1',
    '--config.checkpoint.max_failures=2',
  )
  line = one_line(finish(start(workdir, *flags), code=6))
  assert line.startswith('error: saving step 3 to ')
  assert 'No space left on device' in line
  assert len(rows(workdir)) == 3


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/maps'), reason='no /proc')
def test_an_interruption_of_imports_is_one_line(tmp_path):
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:  # a shell ignores it in what it starts with `&`
    process = start(tmp_path)
  finally:
    signal.signal(signal.SIGINT, before)
  maps = pathlib.Path(f'/proc/{process.pid}/maps')
  while '/numpy/' not in maps.read_text():
    assert process.poll() is None
    time.sleep(0.005)
  process.send_signal(signal.SIGINT)
  assert finish(process, code=130) == 'error: interrupted\n'
