"""Run directories: what is written, refused and locked; strict JSON."""

import contextlib
import copy
import dataclasses
import errno
import itertools
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from core import files
from core.errors import InvalidDataError, WriteError
from dataset_lib.source import DatasetInfo
from launch import command_line
from tests.train_lib.states import start_python
from train_lib import run_directory
from train_lib.run_directory import (
  METRICS,
  ConfigChangedError,
  RunDirectory,
  RunLockedError,
)

CONFIG = {
  'seed': 0, 'log_every': 50, 'optimizer': {'name': 'adamw', 'lr': 1e-3},
  'mesh': {'data': -1}, 'phases': [], 'sizes': (1, 2),
}  # fmt: skip


def enter(workdir, **changes):
  with RunDirectory(workdir, CONFIG | changes) as run:
    return run


def read(path):
  return json.loads(path.read_text())


def begin(tmp_path):
  """A run that has saved a step."""
  enter(tmp_path)
  (tmp_path / 'checkpoints' / '10').mkdir(parents=True)


def test_writes_configuration_and_versions(tmp_path):
  workdir = enter(tmp_path / 'a' / 'run').workdir
  assert read(workdir / 'config.json') == {**CONFIG, 'sizes': [1, 2]}
  versions = read(workdir / 'versions.json')
  assert versions['python'] == sys.version.split()[0]
  assert versions['packages']['jax'] == jax.__version__
  assert len(versions['git']['revision'] or 40 * '0') == 40
  assert versions['git']['dirty'] in (True, False, None)


@pytest.mark.parametrize('has_step', [False, True])
def test_a_run_refused_before_a_step_leaves_no_directory(has_step, tmp_path):
  workdir = tmp_path / 'a' / 'run'
  with contextlib.suppress(WriteError), RunDirectory(workdir, CONFIG) as run:
    if has_step:
      run.log(1, {})
    raise WriteError('refused')
  assert workdir.exists() == has_step


def test_only_the_primary_process_writes(tmp_path):
  with RunDirectory(tmp_path, CONFIG) as run:
    run.write('result.json', {'accuracy': 0.5, 'loss': math.inf})
    # Other processes of the same run are not refused.
    with RunDirectory(tmp_path, {'seed': 1}, primary=False) as other:
      other.write('never.json', {})
      other.log(1, {})
      other.truncate_log(0)
  assert read(tmp_path / 'result.json') == {'accuracy': 0.5, 'loss': 'Infinity'}
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {'config.json', 'result.json', 'run.lock', 'versions.json'}
  assert read(tmp_path / 'config.json')['seed'] == 0


HOLD = """
import sys, time
from train_lib.run_directory import RunDirectory, versions
versions()
with RunDirectory(sys.argv[1], {}):
  print('jax' in sys.modules, flush=True)
  time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
  lock = tmp_path / 'run.lock'
  with start_python(HOLD, tmp_path) as process:
    # No device is touched for a lock and the versions.
    assert process.stdout.readline() == 'False\n'
    with pytest.raises(RunLockedError) as error:
      enter(tmp_path)
    fields = read(lock)
    assert fields['pid'] == process.pid
    holder = f'process {process.pid} on host {socket.gethostname()}'
    for part in (str(tmp_path), holder, fields['started']):
      assert part in str(error.value)
    os.kill(process.pid, signal.SIGKILL)
  # The content of the killed process remains, and does not lock.
  assert read(lock) == fields
  with RunDirectory(tmp_path, CONFIG):
    assert read(lock)['pid'] == os.getpid()
    lock.unlink()  # lets no second run in
    with pytest.raises(RunLockedError):
      enter(tmp_path)
  assert lock.read_text() == ''
  enter(tmp_path)


FOREIGN = '{"pid": 1, "host": "elsewhere", "started": "then"}'


def no_locks(path):
  raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # as of NFS


@pytest.mark.parametrize(
  ('clock', 'host'), [(-1e4, 'elsewhere'), (1e4, 'elsewhere'), (0, 'here')]
)
def test_a_lock_of_another_host_holds_while_it_is_renewed(
  tmp_path, clock, host, monkeypatch, capsys
):
  """Whatever the clock of that host says; of this one if locks do not work."""
  monkeypatch.setattr(run_directory, 'WATCH_SECONDS', 1.0)
  if host == 'here':
    monkeypatch.setattr(socket, 'gethostname', lambda: 'elsewhere')
    monkeypatch.setattr(files, 'lock_directory', no_locks)
  lock, times = tmp_path / 'run.lock', itertools.count(time.time() + clock)
  lock.write_text(FOREIGN)
  os.utime(lock, (0, next(times)))
  with RunDirectory(tmp_path, CONFIG):  # it is dead
    assert read(lock)['pid'] == os.getpid()
  assert 'of process 1 on host elsewhere' in capsys.readouterr().err
  lock.write_text(FOREIGN)
  done = threading.Event()

  def renew():
    while not done.wait(0.05):
      os.utime(lock, (0, next(times)))

  other = threading.Thread(target=renew)
  other.start()
  try:
    with pytest.raises(RunLockedError, match='process 1 on host elsewhere'):
      enter(tmp_path)
  finally:
    done.set()
    other.join()
  assert lock.read_text() == FOREIGN


def test_a_run_renews_its_lock_and_ends_if_another_has_it(tmp_path):
  lock = tmp_path / 'run.lock'
  quick = 'import train_lib.run_directory as r; r.BEAT_SECONDS = 0.05'
  with start_python(quick + HOLD, tmp_path, stderr=subprocess.PIPE) as process:
    assert process.stdout.readline() == 'False\n'
    text, before = lock.read_text(), lock.stat().st_mtime_ns
    wait_until(lambda: lock.stat().st_mtime_ns > before)
    lock.unlink()
    wait_until(lambda: lock.exists() and lock.read_text() == text)
    lock.write_text(FOREIGN)
    assert process.wait(30) == RunLockedError.exit_code
    line = process.stderr.read()
  assert 'another run took the directory' in line
  assert 'process 1 on host elsewhere' in line
  assert line.count('\n') == 1


def wait_until(happened):
  deadline = time.monotonic() + 30
  while not happened():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def test_a_damaged_lock_does_not_hold(tmp_path):
  lock = tmp_path / 'run.lock'
  for damaged in (b'{"pid": 1', b'\xff\xfe', b'[]'):
    lock.write_bytes(damaged)
    with RunDirectory(tmp_path, CONFIG):
      assert read(lock)['pid'] == os.getpid()


@pytest.mark.parametrize(
  ('name', 'content'),
  [('run.lock', None), ('config.json', None), ('config.json', b'{')],
)
def test_what_cannot_be_read_is_named_and_kept(tmp_path, name, content):
  begin(tmp_path)
  path = tmp_path / name
  path.unlink()
  path.mkdir() if content is None else path.write_bytes(content)
  with pytest.raises(InvalidDataError, match=f'{path}'):
    enter(tmp_path)
  assert path.is_dir() if content is None else path.read_bytes() == content


def test_resuming_with_another_configuration_is_refused(tmp_path):
  (tmp_path / 'checkpoints' / '10.orbax-checkpoint-tmp').mkdir(parents=True)
  enter(tmp_path, seed=1)  # no complete checkpoint: any may start
  begin(tmp_path)
  optimizer = {'name': 'adamw', 'lr': 2e-3, 'b1': 0.9}
  with pytest.raises(ConfigChangedError) as error:
    enter(tmp_path, seed=1, optimizer=optimizer, phases=[{'a': 1}])
  for part in (
    'seed: saved 0, given 1',
    'optimizer.lr: saved 0.001, given 0.002',
    'optimizer.b1: saved nothing, given 0.9',
    'phases.0.a: saved nothing, given 1',
  ):
    assert part in str(error.value)
  assert 'optimizer.name' not in str(error.value)
  assert read(tmp_path / 'config.json')['seed'] == 0
  # The lock was released, and harmless changes are taken over.
  enter(tmp_path, log_every=1, mesh={'data': 2})
  config = read(tmp_path / 'config.json')
  assert (config['log_every'], config['mesh']) == (1, {'data': 2})


@pytest.fixture
def given():
  file = 'configs/recurrent_act/graves.py'
  config = command_line.load_config(file, []).to_dict()
  return config | {'model': dict(config['model'])}


def test_a_field_newer_than_the_run_has_its_default(given):
  old = copy.deepcopy(given)
  del old['optimizer']['scales'], old['model']['halting_bias']
  assert not run_directory.changes(old, given)
  given['model']['halting_bias'] = 0.5
  changed = 'model.halting_bias: saved 1.0, given 0.5'
  assert run_directory.changes(old, given) == [changed]


def test_a_saved_configuration_that_is_no_longer_legal_is_compared_as_it_is(
  given,
):
  old = copy.deepcopy(given)
  old['warm_start']['workdir'] = '/gone'
  changed = 'warm_start.workdir: saved "/gone", given ""'
  assert run_directory.changes(old, given) == [changed]


def test_without_its_contract_a_run_has_that_of_its_checkpoint(tmp_path):
  begin(tmp_path)
  info = DatasetInfo('image', (2, 2, 3), 'uint8', 1, ('a',), 4)
  content = {'content': {'extra': {'contract': dataclasses.asdict(info)}}}
  path = tmp_path / 'checkpoints' / '10' / 'manifest.json'
  files.write_json(path, content)
  for place in (tmp_path, path.parents[1]):
    assert run_directory.trained_on(place) == info
  other = dataclasses.replace(info, class_names=('b',))
  given = CONFIG | {'allow_other_rows': False}
  with pytest.raises(ConfigChangedError, match=r"class_names: .* with 'a'"):
    RunDirectory(tmp_path, given, info=other).__enter__()


def logged(tmp_path, *steps):
  """(run, its file of metrics) after some steps."""
  run = RunDirectory(tmp_path, CONFIG)
  for step in steps:
    run.log(step, {'loss': step / 2})
  return run, tmp_path / METRICS


def steps_of(path):
  return [json.loads(line)['step'] for line in path.read_text().splitlines()]


def test_metrics_are_one_object_per_line_and_later_ones_are_removed(tmp_path):
  RunDirectory(tmp_path, CONFIG).truncate_log(5)
  assert list(tmp_path.iterdir()) == []
  run, path = logged(tmp_path, 1, 2, 3)
  run.log(4, {'loss': math.nan, 'best': -math.inf})
  first, *_, last = map(json.loads, path.read_text().splitlines())
  assert first == {'step': 1, 'loss': 0.5}
  assert last == {'step': 4, 'loss': 'NaN', 'best': '-Infinity'}
  for step, left in ((2, [1, 2]), (0, [])):
    run.truncate_log(step)
    assert steps_of(path) == left


def test_damaged_lines_are_removed(tmp_path):
  run, path = logged(tmp_path, 1, 2, 30)
  good = path.read_bytes()
  for end in range(good.rindex(b'{'), len(good)):  # torn anywhere
    path.write_bytes(good[:end])
    run.truncate_log(30)
    assert steps_of(path) == [1, 2], end
  first, _, last = good.splitlines()
  for damaged in (b'{"step": 2, ', b'[2]', b'{"a": 1}', b'\xff'):
    path.write_bytes(b'\n'.join([first, damaged, last, b'']))
    with pytest.warns(UserWarning, match='line 2 is damaged'):
      run.truncate_log(30)
    assert steps_of(path) == [1, 30]


def test_a_full_disk_leaves_whole_lines(tmp_path):
  run, path = logged(tmp_path, 1, 2)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(
    resource.RLIMIT_FSIZE, (path.stat().st_size + 9, before[1])
  )
  try:
    with pytest.raises(WriteError, match=f'{path} cannot be written'):
      run.log(3, {'loss': 1.5})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert steps_of(path) == [1, 2]
