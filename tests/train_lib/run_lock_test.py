"""The lock of a run directory, held by the living only."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from train_lib.run_lock import Lock, RunLockedError

HOLD = """
import pathlib, sys, time
from train_lib.run_lock import Lock

path = pathlib.Path(sys.argv[1])
Lock(path, path.with_name('metrics.jsonl')).acquire()
print('locked', flush=True)
time.sleep(60)
"""


def make_lock(tmp_path):
  return Lock(tmp_path / 'run.lock', tmp_path / 'metrics.jsonl')


def hold(tmp_path, repository):
  process = subprocess.Popen(
    [sys.executable, '-c', HOLD, str(tmp_path / 'run.lock')],
    cwd=repository,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == 'locked\n'
  return process


def test_a_second_process_is_refused_by_name_until_the_first_is_killed(
  tmp_path, repository
):
  with hold(tmp_path, repository) as process:
    with pytest.raises(RunLockedError) as error:
      make_lock(tmp_path).acquire()
    fields = json.loads((tmp_path / 'run.lock').read_text())
    assert fields['pid'] == process.pid
    assert str(tmp_path) in str(error.value)
    assert f'process {process.pid} on host {socket.gethostname()}' in str(
      error.value
    )
    assert fields['started'] in str(error.value)
    os.kill(process.pid, signal.SIGKILL)
  # The stale content of the dead process is still there, and no obstacle.
  assert json.loads((tmp_path / 'run.lock').read_text()) == fields
  lock = make_lock(tmp_path)
  lock.acquire()
  assert json.loads((tmp_path / 'run.lock').read_text())['pid'] == os.getpid()
  lock.release()


def test_a_second_lock_in_the_same_process_is_refused(tmp_path):
  lock = make_lock(tmp_path)
  lock.acquire()
  with pytest.raises(RunLockedError, match='this process'):
    make_lock(tmp_path).acquire()
  lock.release()
  again = make_lock(tmp_path)
  again.acquire()
  again.release()
  again.release()
  assert (tmp_path / 'run.lock').read_text() == ''


def test_a_sign_of_life_from_another_host_is_believed_for_a_while(tmp_path):
  path, metrics = tmp_path / 'run.lock', tmp_path / 'metrics.jsonl'
  path.write_text('{"pid": 1, "host": "elsewhere", "started": "then"}')
  metrics.write_text('')
  old = time.time() - 1000
  os.utime(path, (old, old))
  with pytest.raises(RunLockedError, match='process 1 on host elsewhere'):
    make_lock(tmp_path).acquire()
  os.utime(metrics, (old, old))
  lock = make_lock(tmp_path)
  lock.acquire()
  lock.release()


def test_damaged_content_is_no_obstacle(tmp_path):
  path = tmp_path / 'run.lock'
  path.write_text('{"pid": 1')
  lock = make_lock(tmp_path)
  lock.acquire()
  assert json.loads(path.read_text())['pid'] == os.getpid()
  lock.release()
