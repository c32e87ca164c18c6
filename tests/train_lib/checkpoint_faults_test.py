"""Faults are injected: damaged files, a full disk, kill -9."""

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zlib

import pytest

from tests.train_lib.states import folders, noise, restored_step, save_all
from train_lib import checkpoint_io
from train_lib.checkpoint import Checkpointer
from train_lib.checkpoint_io import (
  CheckpointError,
  CheckpointWarning,
  CorruptCheckpointError,
)


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  directory = tmp_path_factory.mktemp('good')
  save_all(directory, [1, 2], noise)
  return directory


@pytest.fixture
def two_steps(good, tmp_path):
  """A copy of a run with the steps 1 and 2."""
  return shutil.copytree(good, tmp_path / 'run')


def hashes(directory):
  return {
    path.relative_to(directory): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in directory.rglob('*')
    if path.is_file()
  }


def flipped(data, rng):
  data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  return data


def zeroed(data, rng):
  start = 0
  while not any(data[start : start + 16]):
    start = rng.randrange(len(data))
  return (
    data[:start] + bytes(len(data[start : start + 16])) + data[start + 16 :]
  )


def replaced(path, change, rng):
  path.write_bytes(change(bytearray(path.read_bytes()), rng))


DAMAGES = {
  'flip': lambda path, rng: replaced(path, flipped, rng),
  'zero': lambda path, rng: replaced(path, zeroed, rng),
  'truncate': lambda path, rng: os.truncate(
    path, rng.randrange(path.stat().st_size)
  ),
  'delete': lambda path, rng: path.unlink(),
  'replace': lambda path, rng: (path.unlink(), path.mkdir()),
}
LATER = checkpoint_io.WRITTEN_LATER


@pytest.mark.parametrize(
  'count', [40, pytest.param(200, marks=pytest.mark.nightly)]
)
def test_all_damage_is_found_named_and_survived(good, tmp_path, count):
  rng = random.Random(count)
  files = [
    path.relative_to(good)
    for path in sorted((good / '2').rglob('*'))
    if path.is_file() and path.name not in LATER
  ]
  damages = list(DAMAGES.values())
  for case in range(count):
    directory = shutil.copytree(good, tmp_path / str(case))
    path = directory / rng.choice(files)
    damages[case % len(damages)](path, rng)
    before = hashes(directory)
    with pytest.warns(CheckpointWarning, match='step 1') as warned:
      assert restored_step(directory) == 1
    assert str(path) in str(warned[0].message)
    assert hashes(directory) == before
    shutil.rmtree(directory)


@pytest.mark.parametrize('damage', DAMAGES.values(), ids=DAMAGES)
def test_files_written_after_the_manifest_are_not_needed(two_steps, damage):
  (two_steps / '2' / 'new').write_bytes(b'a file that is not listed')
  for name in LATER:
    if (two_steps / '2' / name).exists():
      damage(two_steps / '2' / name, random.Random(0))
  assert restored_step(two_steps) == 2


def test_every_bit_of_a_manifest_counts(two_steps):
  path = two_steps / '2' / checkpoint_io.MANIFEST
  text = path.read_bytes()
  for position in range(len(text)):
    damaged = bytearray(text)
    damaged[position] ^= 1 << position % 8
    path.write_bytes(damaged)
    assert checkpoint_io.verify(path.parent), position
    path.write_bytes(text[:position])
    assert checkpoint_io.verify(path.parent), position


@pytest.mark.parametrize(
  'change',
  [
    lambda files: 3,
    lambda files: {},
    lambda files: files | {'_METADATA': 1},
    lambda files: {f'../2/{name}': entry for name, entry in files.items()},
  ],
)
@pytest.mark.parametrize('consistent', [False, True])
def test_a_foreign_manifest_is_damage(two_steps, change, consistent):
  path = two_steps / '2' / checkpoint_io.MANIFEST
  content = json.loads(path.read_text())
  content['files'] = change(content['files'])
  if consistent:
    body = json.dumps(content['files'], sort_keys=True)
    content['crc32'] = f'{zlib.crc32(body.encode()):08x}'
  path.write_text(json.dumps(content, sort_keys=True))
  with pytest.warns(CheckpointWarning, match='step 1'):
    assert restored_step(two_steps) == 1


def test_no_good_checkpoint_is_an_error_that_names_all(two_steps):
  damaged = two_steps / '2' / '_METADATA'
  missing = two_steps / '1' / checkpoint_io.MANIFEST
  missing.unlink()
  os.truncate(damaged, 3)
  with pytest.raises(CorruptCheckpointError) as error:
    restored_step(two_steps)
  assert str(missing) in str(error.value)
  assert str(damaged) in str(error.value)


def test_a_run_sets_a_damaged_step_aside(two_steps):
  for _ in range(2):
    os.truncate(two_steps / '2' / '_METADATA', 3)
    with Checkpointer(two_steps) as checkpointer:
      with pytest.warns(CheckpointWarning):
        checkpointer.restore(noise(0))
      assert folders(two_steps)[:2] == ['1', '2']
      checkpointer.save(2, noise(2))
      checkpointer.wait()
      assert checkpointer.restore(noise(0))[1].step == 2
  assert folders(two_steps) == ['1', '2', 'set_aside']
  assert len(folders(two_steps / 'set_aside')) == 2


# Of several failing writes orbax awaits one; the others end without a loop.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_full_disk_is_a_clear_error_and_saving_resumes(tmp_path):
  """The kernel refuses to let a file grow, as it does on a full disk."""
  size = 1 << 18  # 1 MiB of noise, which cannot be compressed
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, noise(1, size))
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
      checkpointer.save(2, noise(2, size))
      with pytest.raises(CheckpointError, match=r'saving step 2 to .* failed'):
        steps_until_error(checkpointer)
      assert folders(tmp_path) == ['1']
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpointer.restore(noise(0, size))[1].step == 1
    checkpointer.save(2, noise(2, size))
    checkpointer.save(3, noise(3, size))
  assert restored_step(tmp_path, noise(0, size)) == 3
  assert folders(tmp_path) == ['2', '3']


def steps_until_error(checkpointer):
  for _ in range(200):
    time.sleep(0.05)  # a training step
    checkpointer.check()


@pytest.mark.parametrize(
  'surface',
  [
    steps_until_error,
    lambda checkpointer: checkpointer.save(3, noise(3)),
    Checkpointer.wait,
    lambda checkpointer: checkpointer.restore(noise(0)),
    Checkpointer.close,
  ],
)
def test_a_failed_save_surfaces_at_the_next_call(
  tmp_path, monkeypatch, surface
):
  def full(directory, description):
    (directory / 'partial').write_bytes(b'x' * 100)
    raise OSError(errno.ENOSPC, 'No space left on device')

  checkpointer = Checkpointer(tmp_path, keep=1)
  checkpointer.save(1, noise(1))
  checkpointer.wait()
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint_io, 'finish', full)
    checkpointer.save(2, noise(2))
    with pytest.raises(CheckpointError, match=r'step 2 .*No space left'):
      surface(checkpointer)
  # The step that failed may be tried again, and the old one then goes.
  assert restored_step(tmp_path) == 1
  save_all(tmp_path, [2], noise, keep=1)
  assert folders(tmp_path) == ['2']


def test_leftovers_of_a_killed_save_are_removed(two_steps):
  leftover = two_steps / '3.orbax-checkpoint-tmp'
  shutil.copytree(two_steps / '2', leftover)
  with Checkpointer(two_steps) as checkpointer:
    assert not leftover.exists()
    # Or what a failed save wrote after its end.
    shutil.copytree(two_steps / '2', leftover)
    checkpointer.save(3, noise(3))
  assert restored_step(two_steps) == 3
  assert not leftover.exists()


ENDLESS_SAVING = """
import sys
from tests.train_lib.states import noise
from train_lib.checkpoint import Checkpointer

directory, size = sys.argv[1], int(sys.argv[2])
checkpointer = Checkpointer(directory)
restored = checkpointer.restore(noise(0, size))
step = restored[1].step if restored else 0
while True:
  step += 1
  checkpointer.save(step, noise(step, size))
  print(step, flush=True)
"""
KILL_SIZE = 1 << 18


def kill_while_saving(directory, repository, rng):
  """Runs a process that saves all the time, and kills it; the last step."""
  process = subprocess.Popen(
    [sys.executable, '-c', ENDLESS_SAVING, str(directory), str(KILL_SIZE)],
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
    step = kill_while_saving(tmp_path, repository, rng)
    with warnings.catch_warnings():
      warnings.simplefilter('error', CheckpointWarning)  # none is damaged
      # The save before was waited for.
      assert restored_step(tmp_path, noise(0, KILL_SIZE)) >= step - 1
