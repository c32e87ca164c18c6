"""Runs that are killed, stopped, resumed, and on several devices and processes.

A resumed run is bit-identical to one that was never stopped; devices and
processes change losses by 1e-5 at most.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.marks import first_is_slow
from tests.shell import result, rows
from train_lib.checkpoint_io import find

STEPS = 60
SMALL = (
  '--config=configs/adatape/parity.py:n=8', '--config.batch_size=32',
  f'--config.phases.0.steps={STEPS}', '--config.model.width=16',
  '--config.log_every=1', '--config.tensorboard=false',
  '--config.evals.test.every_steps=20', '--config.dataset.test_examples=32',
  '--config.ema_decay=0.9',
)  # fmt: skip
EVERY_7 = '--config.checkpoint.every_steps=7'
NEVER = '--config.checkpoint.every_steps=0'
FSDP = '--config.mesh.fsdp=2'
CUBE = ('--config.mesh.data=2', FSDP, '--config.mesh.tensor=2')
DIVERGING = (
  '--config.optimizer.lr=1000', '--config.optimizer.name=sgd',
  '--config.optimizer.clip_norm=0', '--config.optimizer.warmup_steps=0',
  '--config.checkpoint.every_steps=1',
)  # fmt: skip


def start(workdir, *extra, devices=1, fault=''):
  # Compiled quickly, as the tests themselves (see conftest.py): small steps run
  # in less time than they take to compile.
  flags = (
    f'--xla_force_host_platform_device_count={devices} '
    '--xla_backend_optimization_level=0'
  )
  command = [sys.executable, '-m', 'launch.train', *SMALL]
  return subprocess.Popen(
    [*command, f'--workdir={workdir}', *extra],
    env=os.environ | {'XLA_FLAGS': flags, 'FAULT': fault},
    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def start_two(workdir, *extra, faults=('', '')):
  """Starts two processes of one run, with two devices each."""
  with socket.socket() as listener:
    listener.bind(('localhost', 0))
    peers = f'--coordinator=localhost:{listener.getsockname()[1]}'
  flags = ('--distributed', peers, '--num_processes=2', *extra)
  return [
    start(workdir, *flags, f'--process_id={n}', devices=2, fault=fault)
    for n, fault in enumerate(faults)
  ]


def finish(*processes, code=0):
  """Waits for processes, all of which end with a code; returns stderr."""
  try:
    errors = [process.communicate(timeout=300)[1] for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert {process.returncode for process in processes} == {code}, errors
  return errors[0]


def run(workdir, *extra, **options):
  finish(start(workdir, *extra, **options))


def wait_for_step(workdir, step, *processes):
  path = workdir / 'metrics.jsonl'
  while not path.exists() or f'"step": {step},' not in path.read_text():
    assert all(process.poll() is None for process in processes)
    time.sleep(0.02)


def stop_at(workdir, step, number, code, *processes, hit=0):
  """Sends a signal to a process after a step of the run."""
  wait_for_step(workdir, step, *processes)
  processes[hit].send_signal(number)
  finish(*processes, code=code)


def flat_params(workdir):
  return jax.tree.leaves(jax.device_get(find(workdir).params()))


def assert_same_losses(workdir, other):
  for name in ('train/loss', 'train/tape_length_mean'):
    losses = [[row[name] for row in rows(w)] for w in (workdir, other)]
    assert len(losses[0]) == STEPS
    np.testing.assert_allclose(*losses, rtol=1e-5)


def assert_same_run(workdir, other):
  assert rows(workdir) == rows(other)
  assert [row['step'] for row in rows(workdir)] == list(range(1, STEPS + 1))
  pairs = zip(flat_params(workdir), flat_params(other), strict=True)
  assert all((a == b).all() for a, b in pairs)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'uninterrupted'
  run(workdir, EVERY_7)
  return workdir


KILL, TERM = signal.SIGKILL, signal.SIGTERM


@pytest.mark.parametrize(
  ('number', 'code', 'step', 'flag', 'saved'),
  [
    # A killed run may not have completed its newest checkpoint.
    (KILL, -KILL, 31, EVERY_7, 21),
    (TERM, 75, 31, NEVER, 21),
  ],
)
@pytest.mark.slow
def test_a_stopped_run_continues_bit_identically(
  number, code, step, flag, saved, uninterrupted, tmp_path
):
  stop_at(tmp_path, step, number, code, start(tmp_path, flag))
  assert not (tmp_path / 'result.json').exists()
  run(tmp_path, flag)
  assert_same_run(uninterrupted, tmp_path)
  assert result(tmp_path)['steps_this_process'] <= STEPS - saved


@pytest.mark.nightly
@pytest.mark.parametrize('seed', range(10))
def test_any_five_kills_are_bit_identical(seed, uninterrupted, tmp_path):
  rng = random.Random(seed)
  for step in sorted(rng.sample(range(1, STEPS - 8), 5)):
    process = start(tmp_path, EVERY_7)
    wait_for_step(tmp_path, step, process)
    time.sleep(rng.uniform(0.0, 0.05))
    process.kill()
    finish(process, code=-KILL)
  run(tmp_path, EVERY_7)
  assert_same_run(uninterrupted, tmp_path)


@pytest.mark.slow
def test_a_finished_run_is_not_run_again(uninterrupted):
  before = rows(uninterrupted)
  run(uninterrupted, EVERY_7)
  assert rows(uninterrupted) == before
  assert result(uninterrupted)['steps_this_process'] == 0
  assert result(uninterrupted)['accuracy'] >= 0.0


def begin(workdir, layout, *extra):
  """Starts a run on a number of devices, or on 'two' processes."""
  if layout == 'two':
    return start_two(workdir, *extra)
  return [start(workdir, *extra, devices=layout)]


@pytest.mark.parametrize(
  ('layout', 'num_micro', 'extra'),
  first_is_slow(
    ('two', 1, ()), (8, 4, [FSDP]), (2, 1, ()), (1, 4, ()), (8, 1, ()),
    (2, 4, ()), (4, 1, ()), (4, 4, ()), (8, 1, CUBE),
  ),
)  # fmt: skip
def test_devices_and_accumulation_give_the_same_losses(
  uninterrupted, tmp_path, layout, num_micro, extra
):
  flag = f'--config.num_micro={num_micro}'
  finish(*begin(tmp_path, layout, flag, *extra))
  assert_same_losses(uninterrupted, tmp_path)
  assert sum('test/accuracy' in row for row in rows(tmp_path)) == 3


@pytest.mark.nightly
@pytest.mark.parametrize('before', [1, 2, 4, 8, 'two'])
def test_a_run_continues_on_other_devices(before, uninterrupted, tmp_path):
  saved = tmp_path / 'saved'
  processes = begin(saved, before, NEVER)
  stop_at(saved, 20, signal.SIGTERM, 75, *processes)
  for after in (1, 2, 4, 8, 'two'):
    workdir = tmp_path / str(after)
    shutil.copytree(saved, workdir)
    finish(*begin(workdir, after, NEVER))
    assert result(workdir)['steps_this_process'] < STEPS - 10
    assert_same_losses(uninterrupted, workdir)


@pytest.mark.nightly
def test_a_signal_to_one_stops_both_at_one_step_and_they_go_on(tmp_path):
  endless = ('phases.0.steps=1000000', 'evals.test.every_steps=0')
  flags = (NEVER, *(f'--config.{field}' for field in endless))
  last = 0
  for number, hit in ((signal.SIGTERM, 1), (signal.SIGINT, 0)):
    step, two = last + 5, start_two(tmp_path, *flags)
    stop_at(tmp_path, step, number, 75, *two, hit=hit)
    last = rows(tmp_path)[-1]['step']
    assert last >= step
  assert [row['step'] for row in rows(tmp_path)] == list(range(1, last + 1))


@pytest.mark.nightly
def test_a_run_that_is_not_finite_stops_and_names_the_step(tmp_path):
  error = finish(start(tmp_path, *DIVERGING), code=3)
  assert 'not finite' in error
  bad_step = int(error.split('step ')[1].split(':')[0])
  assert all(np.isfinite(leaf).all() for leaf in flat_params(tmp_path))
  assert find(tmp_path).step < bad_step
