"""Kill -9 in the middle and start again: bit-identical to never killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from train_lib.checkpoint import restore_params

STEPS = 60
SMALL = (
  '--config=configs/adatape/parity.py:n=8',
  f'--config.stages.stage1.steps={STEPS}',
  '--config.batch_size=32',
  '--config.model.width=16',
  '--config.log_every=1',
  '--config.tensorboard=false',
  '--config.evals.test.every_steps=20',
  '--config.dataset.test_examples=32',
)


DIGITS = (
  '--config=configs/adatape/digits.py',
  '--config.batch_size=32',
  '--config.stages.stage1.steps=6',
  '--config.stages.stage1.epochs=0',
  '--config.model.width=16',
  '--config.model.mlp_dim=32',
  '--config.model.depth=2',
  '--config.model.query_dim=8',
  '--config.model.query_noise=0.1',
  '--config.model.bank_drop=0.3',
  '--config.log_every=1',
  '--config.tensorboard=false',
)


def command(workdir: pathlib.Path, *extra: str, base=SMALL) -> list[str]:
  return [
    sys.executable, '-m', 'launch.train', *base, f'--workdir={workdir}', *extra
  ]  # fmt: skip


def environment(devices=1):
  # Compiled quickly, as the tests themselves (see conftest.py): 60 small steps
  # run in less time than they take to compile.
  flags = (
    f'--xla_force_host_platform_device_count={devices} '
    '--xla_backend_optimization_level=0'
  )
  return os.environ | {'XLA_FLAGS': flags}


def run(workdir, *extra, devices=1, check=True, base=SMALL):
  return subprocess.run(
    command(workdir, *extra, base=base),
    env=environment(devices),
    capture_output=True,
    text=True,
    check=check,
    timeout=300,
  )


def rows(workdir):
  text = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def flat_params(workdir):
  params = restore_params(workdir).params
  import jax

  return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def wait_for_step(workdir, step, process):
  for _ in range(3000):
    path = workdir / 'metrics.jsonl'
    if path.exists() and f'"step": {step},' in path.read_text():
      return
    assert process.poll() is None, 'ended before it could be killed'
    time.sleep(0.02)
  raise AssertionError(f'step {step} never came')


def kill_at(workdir, step, signal_number, *extra):
  process = subprocess.Popen(
    command(workdir, *extra),
    env=environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
  )
  try:
    wait_for_step(workdir, step, process)
    process.send_signal(signal_number)
    process.communicate(timeout=120)
  finally:
    process.kill()
  return process.returncode


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'uninterrupted'
  run(workdir, '--config.checkpoint.every_steps=7')
  return workdir


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
  monkeypatch.chdir(repository)


def assert_same_run(workdir, other):
  assert rows(workdir) == rows(other)
  assert [row['step'] for row in rows(workdir)] == list(range(1, STEPS + 1))
  pairs = zip(flat_params(workdir), flat_params(other), strict=True)
  assert all((a == b).all() for a, b in pairs)


@pytest.mark.slow
def test_kill_9_and_restart_is_bit_identical(uninterrupted, tmp_path):
  workdir = tmp_path / 'killed'
  every = '--config.checkpoint.every_steps=7'
  assert kill_at(workdir, 31, signal.SIGKILL, every) == -signal.SIGKILL
  assert not (workdir / 'result.json').exists()
  run(workdir, every)
  assert_same_run(uninterrupted, workdir)
  result = json.loads((workdir / 'result.json').read_text())
  assert result['steps_this_process'] < STEPS


@pytest.mark.slow
def test_sigterm_saves_the_step_and_the_same_command_continues(
  uninterrupted, tmp_path
):
  workdir = tmp_path / 'preempted'
  never = '--config.checkpoint.every_steps=0'
  assert kill_at(workdir, 31, signal.SIGTERM, never) == 75
  run(workdir, never)
  result = json.loads((workdir / 'result.json').read_text())
  assert result['steps_this_process'] < STEPS - 20
  assert_same_run(uninterrupted, workdir)


@pytest.mark.slow
def test_a_finished_run_is_not_run_again(uninterrupted):
  before = rows(uninterrupted)
  run(uninterrupted, '--config.checkpoint.every_steps=7')
  assert rows(uninterrupted) == before
  result = json.loads((uninterrupted / 'result.json').read_text())
  assert result['steps_this_process'] == 0
  assert result['accuracy'] >= 0.0


@pytest.mark.nightly
@pytest.mark.parametrize('step', [3, 12, 22, 45, 58])
def test_more_kills(uninterrupted, tmp_path, step):
  workdir = tmp_path / 'killed'
  every = '--config.checkpoint.every_steps=7'
  kill_at(workdir, step, signal.SIGKILL, every)
  run(workdir, every)
  assert_same_run(uninterrupted, workdir)


CUBE = (
  '--config.mesh.data=2',
  '--config.mesh.fsdp=2',
  '--config.mesh.tensor=2',
)


MESHES = [
  (2, 1, ()), (1, 4, ()), (8, 1, ()), (2, 4, ()), (4, 1, ()), (4, 4, ()),
  (8, 1, CUBE),
]  # fmt: skip


@pytest.mark.parametrize(
  ('devices', 'num_micro', 'extra'),
  [
    pytest.param(8, 4, ('--config.mesh.fsdp=2',), marks=pytest.mark.slow),
    *(pytest.param(*mesh, marks=pytest.mark.nightly) for mesh in MESHES),
  ],
)
def test_devices_and_accumulation_give_the_same_losses(
  uninterrupted, tmp_path, devices, num_micro, extra
):
  workdir = tmp_path / 'other'
  micro = f'--config.num_micro={num_micro}'
  run(workdir, micro, *extra, devices=devices)
  losses = [row['train/loss'] for row in rows(uninterrupted)]
  others = [row['train/loss'] for row in rows(workdir)]
  np.testing.assert_allclose(losses, others, rtol=1e-5)


@pytest.mark.nightly
def test_noise_of_a_learnable_bank_does_not_depend_on_the_devices(tmp_path):
  losses = []
  for devices, num_micro in ((1, 1), (8, 4)):
    workdir = tmp_path / f'{devices}'
    micro = f'--config.num_micro={num_micro}'
    run(workdir, micro, devices=devices, base=DIGITS)
    losses.append([row['train/loss'] for row in rows(workdir)])
  assert len(losses[0]) == 6
  np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_a_run_that_is_not_finite_stops_and_names_the_step(tmp_path):
  workdir = tmp_path / 'nan'
  done = run(
    workdir,
    '--config.optimizer.lr=1000',
    '--config.optimizer.name=sgd',
    '--config.optimizer.clip_norm=0',
    '--config.optimizer.warmup_steps=0',
    '--config.checkpoint.every_steps=1',
    check=False,
  )
  assert done.returncode == 3
  assert 'not finite' in done.stderr
  bad_step = int(done.stderr.split('step ')[1].split(':')[0])
  assert all(np.isfinite(leaf).all() for leaf in flat_params(workdir))
  assert restore_params(workdir).step < bad_step
