"""Faults are injected: damaged files, a full disk, kill -9."""

import errno
import hashlib
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from train_lib import checkpoint_io
from train_lib.checkpoint import Checkpointer
from train_lib.checkpoint_io import (
  CheckpointError,
  CheckpointWarning,
  CorruptCheckpointError,
)


def make_state(step, size=256):
  noise = np.random.default_rng(step).normal(size=size)
  return {
    'params': {'w': jnp.asarray(noise, jnp.float32)},
    'step': jnp.int32(step),
  }


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory):
  directory = tmp_path_factory.mktemp('good')
  with Checkpointer(directory) as checkpointer:
    checkpointer.save(1, make_state(1))
    checkpointer.save(2, make_state(2))
  return directory


def _contents(directory):
  return {
    path.relative_to(directory): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in directory.rglob('*')
    if path.is_file()
  }


def _damage(path: pathlib.Path, kind: str, rng: random.Random) -> None:
  """Changes at least one bit of a file, or its size, or its being there."""
  data = bytearray(path.read_bytes())
  position = rng.randrange(len(data))
  if kind == 'delete':
    path.unlink()
    return
  if kind == 'truncate':
    del data[position:]
  elif kind == 'flip':
    data[position] ^= 1 << rng.randrange(8)
  else:
    while not any(data[position : position + 16]):
      position = rng.randrange(len(data))
    end = min(position + 16, len(data))
    data[position:end] = bytes(end - position)
  path.write_bytes(data)


@pytest.mark.parametrize(
  'count', [40, pytest.param(200, marks=pytest.mark.nightly)]
)
def test_all_damage_is_found_named_and_survived(two_steps, tmp_path, count):
  rng = random.Random(count)
  files = [
    path.relative_to(two_steps)
    for path in sorted((two_steps / '2').rglob('*'))
    if path.is_file() and path.parent / path.name not in _later(two_steps)
  ]
  kinds = ('flip', 'truncate', 'delete', 'zero')
  for case in range(count):
    directory = tmp_path / str(case)
    shutil.copytree(two_steps, directory)
    path = directory / rng.choice(files)
    _damage(path, kinds[case % 4], rng)
    before = _contents(directory)
    with (
      Checkpointer(directory) as checkpointer,
      pytest.warns(CheckpointWarning, match='step 1') as warned,
    ):
      restored = checkpointer.restore(make_state(0))
    assert restored.step == 1
    assert str(path) in str(warned[0].message)
    np.testing.assert_array_equal(
      restored.state['params']['w'], make_state(1)['params']['w']
    )
    assert _contents(directory) == before
    shutil.rmtree(directory)


def _later(directory):
  names = checkpoint_io.WRITTEN_LATER
  return [directory / '2' / name for name in names]


def copy_of(two_steps, tmp_path):
  directory = tmp_path / 'run'
  shutil.copytree(two_steps, directory)
  return directory


@pytest.mark.parametrize('kind', ['flip', 'truncate', 'delete', 'zero'])
def test_files_written_after_the_manifest_are_not_needed(
  two_steps, tmp_path, kind
):
  directory = copy_of(two_steps, tmp_path)
  for path in _later(directory):
    _damage(path, kind, random.Random(0))
  with Checkpointer(directory) as checkpointer:
    assert checkpointer.restore(make_state(0)).step == 2


def test_no_good_checkpoint_is_an_error_that_names_all(two_steps, tmp_path):
  directory = copy_of(two_steps, tmp_path)
  damaged = directory / '2' / '_METADATA'
  missing = directory / '1' / checkpoint_io.MANIFEST
  missing.unlink()
  os.truncate(damaged, 3)
  with (
    Checkpointer(directory) as checkpointer,
    pytest.raises(CorruptCheckpointError) as error,
  ):
    checkpointer.restore(make_state(0))
  assert str(missing) in str(error.value)
  assert str(damaged) in str(error.value)


def test_a_run_continues_over_a_damaged_step(two_steps, tmp_path):
  directory = copy_of(two_steps, tmp_path)
  os.truncate(directory / '2' / '_METADATA', 3)
  with Checkpointer(directory) as checkpointer:
    with pytest.warns(CheckpointWarning):
      checkpointer.restore(make_state(0))
    checkpointer.save(2, make_state(2))
    checkpointer.wait()
    assert checkpointer.restore(make_state(0)).step == 2
  assert (directory / 'set_aside' / '2' / checkpoint_io.MANIFEST).exists()
  assert (directory / '1').exists()


# Of several failing writes orbax awaits one; the others end without a loop.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_full_disk_is_a_clear_error_and_saving_resumes(tmp_path):
  """The kernel refuses to let a file grow, as it does on a full disk."""
  size = 1 << 18  # 1 MiB of noise, which cannot be compressed
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_state(1, size))
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
      checkpointer.save(2, make_state(2, size))
      with pytest.raises(CheckpointError, match=r'saving step 2 to .* failed'):
        _steps_until_error(checkpointer)
      assert list(tmp_path.iterdir()) == [tmp_path / '1']
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpointer.restore(make_state(0, size)).step == 1
    checkpointer.save(2, make_state(2, size))
    checkpointer.save(3, make_state(3, size))
    checkpointer.wait()
    assert checkpointer.restore(make_state(0, size)).step == 3
  assert sorted(path.name for path in tmp_path.iterdir()) == ['2', '3']


def _steps_until_error(checkpointer):
  for _ in range(200):
    time.sleep(0.05)  # a training step
    checkpointer.check()


@pytest.mark.parametrize(
  'surface',
  [
    lambda checkpointer: _steps_until_error(checkpointer),
    lambda checkpointer: checkpointer.save(3, make_state(3)),
    lambda checkpointer: checkpointer.wait(),
    lambda checkpointer: checkpointer.restore(make_state(0)),
    lambda checkpointer: checkpointer.close(),
  ],
)
def test_a_failed_save_surfaces_at_the_next_call(
  tmp_path, monkeypatch, surface
):
  def full(directory, description):
    (directory / 'partial').write_bytes(b'x' * 100)
    raise OSError(errno.ENOSPC, 'No space left on device')

  checkpointer = Checkpointer(tmp_path, keep=1)
  checkpointer.save(1, make_state(1))
  checkpointer.wait()
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint_io, 'finish', full)
    checkpointer.save(2, make_state(2))
    with pytest.raises(CheckpointError, match=r'step 2 .*No space left'):
      surface(checkpointer)
  # The step that failed may be tried again, and the old one then goes.
  with Checkpointer(tmp_path, keep=1) as checkpointer:
    assert checkpointer.restore(make_state(0)).step == 1
    checkpointer.save(2, make_state(2))
  assert [path.name for path in tmp_path.iterdir()] == ['2']


def test_leftovers_of_a_killed_save_are_removed(two_steps, tmp_path):
  directory = copy_of(two_steps, tmp_path)
  leftover = directory / '3.orbax-checkpoint-tmp'
  shutil.copytree(directory / '2', leftover)
  with Checkpointer(directory) as checkpointer:
    assert not leftover.exists()
    assert checkpointer.restore(make_state(0)).step == 2
    # Or what a failed save wrote after its end.
    shutil.copytree(directory / '2', leftover)
    checkpointer.save(3, make_state(3))
    checkpointer.wait()
    assert checkpointer.restore(make_state(0)).step == 3
  assert not leftover.exists()


ENDLESS_SAVING = """
import sys
from tests.train_lib import checkpoint_faults_test as test
from train_lib.checkpoint import Checkpointer

checkpointer = Checkpointer(sys.argv[1])
restored = checkpointer.restore(test.make_state(0, test.KILL_SIZE))
step = restored.step if restored else 0
while True:
  step += 1
  checkpointer.save(step, test.make_state(step, test.KILL_SIZE))
  print(step, flush=True)
"""
KILL_SIZE = 1 << 18


def _kill_while_saving(directory, repository, rng) -> int:
  """Runs a process that saves all the time, and kills it; the last step."""
  process = subprocess.Popen(
    [sys.executable, '-c', ENDLESS_SAVING, str(directory)],
    cwd=repository,
    env=os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(repository)},
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    for _ in range(rng.randint(2, 4)):
      step = int(process.stdout.readline())
    time.sleep(rng.uniform(0, 0.3))
    os.kill(process.pid, signal.SIGKILL)
  return step


@pytest.mark.parametrize(
  'kills', [2, pytest.param(20, marks=pytest.mark.nightly)]
)
def test_every_kill_leaves_a_checkpoint_to_go_on_from(
  tmp_path, repository, kills
):
  rng = random.Random(kills)
  for _ in range(kills):
    step = _kill_while_saving(tmp_path, repository, rng)
    with Checkpointer(tmp_path) as checkpointer, warnings.catch_warnings():
      warnings.simplefilter('error', CheckpointWarning)  # none is damaged
      restored = checkpointer.restore(make_state(0, KILL_SIZE))
    assert restored.step >= step - 1  # the one before was waited for
    expected = make_state(restored.step, KILL_SIZE)
    np.testing.assert_array_equal(
      restored.state['params']['w'], expected['params']['w']
    )
