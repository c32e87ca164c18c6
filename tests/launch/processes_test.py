"""Two processes with two devices each give the losses of one with four."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

STEPS = 20
SMALL = (
  '--config=configs/adatape/parity.py:n=8',
  f'--config.stages.stage1.steps={STEPS}',
  '--config.batch_size=16',
  '--config.model.width=16',
  '--config.log_every=1',
  '--config.evals.test.every_steps=10',
  '--config.dataset.test_examples=32',
)


@pytest.fixture(autouse=True)
def in_the_checkout(repository, monkeypatch):
  monkeypatch.chdir(repository)


def free_port():
  with socket.socket() as listener:
    listener.bind(('localhost', 0))
    return listener.getsockname()[1]


def start(workdir, devices, *extra):
  flag = f'--xla_force_host_platform_device_count={devices}'
  return subprocess.Popen(
    [sys.executable, '-m', 'launch.train', *SMALL, f'--workdir={workdir}',
     *extra],
    env=os.environ | {'XLA_FLAGS': flag},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )  # fmt: skip


def start_two(workdir, *extra):
  peers = ('--distributed', f'--coordinator=localhost:{free_port()}')
  return [
    start(workdir, 2, *peers, '--num_processes=2', f'--process_id={i}', *extra)
    for i in range(2)
  ]


def finish(processes):
  try:
    done = [process.communicate(timeout=240)[1] for process in processes]
  finally:
    for process in processes:
      process.kill()
  return [process.returncode for process in processes], done


def rows(workdir):
  text = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def one_process(in_the_checkout, tmp_path):
  workdir = tmp_path / 'one'
  codes, errors = finish([start(workdir, 4)])
  assert codes == [0], errors
  return workdir


@pytest.mark.slow
def test_two_processes_equal_one(one_process, tmp_path):
  codes, errors = finish(start_two(tmp_path / 'run'))
  assert codes == [0, 0], errors
  ones, twos = rows(one_process), rows(tmp_path / 'run')
  assert [row['step'] for row in twos] == list(range(1, STEPS + 1))
  for name in ('train/loss', 'train/tape_length_mean'):
    np.testing.assert_allclose(
      [row[name] for row in ones], [row[name] for row in twos], rtol=1e-5
    )
  evaluated = [row['test/accuracy'] for row in twos if 'test/accuracy' in row]
  assert len(evaluated) == 2


def stop_at(workdir, step, *extra):
  """Starts two, sends SIGTERM to the second after a step; the saved step."""
  processes = start_two(workdir, *extra)
  path = workdir / 'metrics.jsonl'
  while not path.exists() or f'"step": {step},' not in path.read_text():
    assert all(process.poll() is None for process in processes)
    time.sleep(0.05)
  processes[1].send_signal(signal.SIGTERM)
  codes, errors = finish(processes)
  assert codes == [75, 75], errors
  return rows(workdir)[-1]['step']


@pytest.mark.slow
def test_sigterm_to_one_stops_both_at_one_step_and_they_go_on(tmp_path):
  workdir = tmp_path / 'run'
  endless = (
    '--config.checkpoint.every_steps=0',
    '--config.stages.stage1.steps=1000000',
    '--config.evals.test.every_steps=0',
  )
  first = stop_at(workdir, 5, *endless)
  second = stop_at(workdir, first + 5, *endless)
  assert second > first >= 5
  steps = [row['step'] for row in rows(workdir)]
  assert steps == list(range(1, second + 1))
