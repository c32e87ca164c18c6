"""Run directories: what is written, refused, locked and confined."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from dataset_lib.errors import InvalidDataError
from launch import command_line
from train_lib import run_directory
from train_lib.run_directory import (
  ConfigChangedError,
  RunDirectory,
  RunLockedError,
)

CONFIG = {
  'seed': 0,
  'log_every': 50,
  'optimizer': {'name': 'adamw', 'lr': 1e-3},
  'mesh': {'data': -1},
  'stages': {},
  'sizes': (1, 2),
}


def changed(**changes):
  return {**CONFIG, **changes}


def enter(workdir, config=None):
  with RunDirectory(workdir, config or CONFIG) as run:
    return run


def saved_config(workdir):
  return json.loads((workdir / 'config.json').read_text())


def begin(tmp_path):
  enter(tmp_path)
  (tmp_path / 'checkpoints' / '10').mkdir(parents=True)


def python(repository, code, *arguments):
  return subprocess.Popen(
    [sys.executable, '-c', code, *arguments],
    cwd=repository,
    stdout=subprocess.PIPE,
    text=True,
  )


def test_writes_configuration_and_versions(tmp_path, repository):
  run = enter(tmp_path / 'a' / 'run')
  assert saved_config(run.workdir) == {**CONFIG, 'sizes': [1, 2]}
  versions = json.loads(run.path('versions.json').read_text())
  assert versions['python'] == sys.version.split()[0]
  assert versions['packages']['jax'] == jax.__version__
  revision = subprocess.run(
    ['git', 'rev-parse', 'HEAD'], cwd=repository, capture_output=True, text=True
  ).stdout.strip()
  assert versions['git']['revision'] == (revision or None)
  assert versions['git']['dirty'] in (True, False, None)


def test_results_are_written_atomically_by_the_primary_process(tmp_path):
  with RunDirectory(tmp_path, CONFIG) as run:
    run.write('result.json', {'accuracy': 0.5, 'loss': math.inf})
    # Other processes of the same run are not refused.
    with RunDirectory(tmp_path, changed(seed=1), primary=False) as other:
      other.write('never.json', {})
      other.metrics.write(1, {})
  text = (tmp_path / 'result.json').read_text()
  assert json.loads(text) == {'accuracy': 0.5, 'loss': 'Infinity'}
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {'config.json', 'result.json', 'run.lock', 'versions.json'}
  assert saved_config(tmp_path)['seed'] == 0


HOLD = """
import sys, time
from train_lib.run_directory import RunDirectory, versions
versions()
with RunDirectory(sys.argv[1], {}):
  print('jax' in sys.modules, flush=True)
  time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(
  tmp_path, repository
):
  with python(repository, HOLD, str(tmp_path)) as process:
    # No device is touched for a lock and the versions.
    assert process.stdout.readline() == 'False\n'
    with pytest.raises(RunLockedError) as error:
      enter(tmp_path)
    fields = json.loads((tmp_path / 'run.lock').read_text())
    assert fields['pid'] == process.pid
    for part in (
      str(tmp_path),
      f'process {process.pid} on host {socket.gethostname()}',
      fields['started'],
    ):
      assert part in str(error.value)
    os.kill(process.pid, signal.SIGKILL)
  # The content of the killed process remains, and does not lock.
  assert json.loads((tmp_path / 'run.lock').read_text()) == fields
  with RunDirectory(tmp_path, CONFIG):
    assert json.loads((tmp_path / 'run.lock').read_text())['pid'] == os.getpid()
    with pytest.raises(RunLockedError, match=f'process {os.getpid()}'):
      enter(tmp_path)
  assert (tmp_path / 'run.lock').read_text() == ''
  enter(tmp_path)


def test_a_recent_lock_of_another_host_is_respected(tmp_path):
  path, metrics = tmp_path / 'run.lock', tmp_path / 'metrics.jsonl'
  path.write_text('{"pid": 1, "host": "elsewhere", "started": "then"}')
  metrics.write_text('')
  old = time.time() - 1000
  os.utime(path, (old, old))
  with pytest.raises(RunLockedError, match='process 1 on host elsewhere'):
    enter(tmp_path)
  os.utime(path, (old, old))
  os.utime(metrics, (old, old))
  enter(tmp_path)


@pytest.mark.parametrize('content', [b'{"pid": 1', b'\xff\xfe', b'[]'])
def test_a_damaged_lock_does_not_lock(tmp_path, content):
  (tmp_path / 'run.lock').write_bytes(content)
  with RunDirectory(tmp_path, CONFIG):
    assert json.loads((tmp_path / 'run.lock').read_text())['pid'] == os.getpid()


@pytest.mark.parametrize('name', ['run.lock', 'config.json'])
@pytest.mark.parametrize('checkpoints', [False, True])
def test_a_directory_in_place_of_a_file_is_named(tmp_path, name, checkpoints):
  if checkpoints:
    begin(tmp_path)
    (tmp_path / name).unlink()
  (tmp_path / name).mkdir()
  with pytest.raises(InvalidDataError, match=name):
    enter(tmp_path)


@pytest.mark.parametrize('content', [b'', b'{', b'[1]', b'null', b'\xff\xfe'])
def test_a_damaged_configuration_is_named_and_kept(tmp_path, content, capsys):
  begin(tmp_path)
  path = tmp_path / 'config.json'
  path.write_bytes(content)
  with pytest.raises(SystemExit) as stop:
    command_line.run(lambda: enter(tmp_path))
  assert stop.value.code == command_line.DATA
  (line,) = capsys.readouterr().err.splitlines()
  assert f'{path} is damaged' in line
  assert path.read_bytes() == content


def test_resuming_with_another_configuration_is_refused(tmp_path):
  begin(tmp_path)
  other = changed(
    seed=1, optimizer={'name': 'adamw', 'lr': 2e-3, 'b1': 0.9}, stages={'a': 1}
  )
  with pytest.raises(ConfigChangedError) as error:
    enter(tmp_path, other)
  message = str(error.value)
  assert 'seed: saved 0, given 1' in message
  assert 'optimizer.lr: saved 0.001, given 0.002' in message
  assert 'optimizer.b1: saved nothing, given 0.9' in message
  assert 'optimizer.name' not in message
  assert saved_config(tmp_path)['seed'] == 0
  # The lock was released, and harmless changes are taken over.
  enter(tmp_path, changed(log_every=1, mesh={'data': 2}))
  config = saved_config(tmp_path)
  assert (config['log_every'], config['mesh']) == (1, {'data': 2})


def test_without_checkpoints_any_configuration_may_start(tmp_path):
  enter(tmp_path)
  (tmp_path / 'checkpoints' / '10.orbax-checkpoint-tmp').mkdir(parents=True)
  enter(tmp_path, changed(seed=1))
  assert saved_config(tmp_path)['seed'] == 1


def test_changes_compares_leaf_by_leaf():
  assert run_directory.changes({'a': {}}, {'a': {'b': math.nan}}, ()) == [
    'a: saved {}, given nothing',
    'a.b: saved nothing, given "NaN"',
  ]
  assert not run_directory.changes({'a': [1, None]}, {'a': (1, None)}, ())
  assert not run_directory.changes({'x': {'y': 1}}, {}, (r'x\..*',))


@pytest.mark.parametrize('name', ['../x', '/etc/x', 'a/../../x', 'link/x'])
def test_names_that_lead_out_are_refused(tmp_path, name):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  (workdir / 'link').symlink_to(tmp_path)
  run = RunDirectory(workdir, CONFIG)
  assert run.path('profile/x') == workdir / 'profile' / 'x'
  with pytest.raises(ValueError, match='leads out of the run directory'):
    run.path(name)
