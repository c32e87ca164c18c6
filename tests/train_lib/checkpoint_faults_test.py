"""Faults are injected: damaged files, a full disk, kill -9."""

import errno
import json
import os
import random
import resource
import shutil
import time
import warnings
import zlib

import pytest

from core.errors import UserError
from tests.train_lib import states
from train_lib import checkpoint_io
from train_lib.checkpoint import Checkpointer


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  directory = tmp_path_factory.mktemp('good')
  states.save_all(directory, [1, 2], states.noise)
  return directory


@pytest.fixture
def two_steps(good, tmp_path):
  """A copy of a run with the steps 1 and 2."""
  return shutil.copytree(good, tmp_path / 'run')


def contents(directory):
  files = [path for path in sorted(directory.rglob('*')) if path.is_file()]
  return {path.relative_to(directory): path.read_bytes() for path in files}


def damage(path, kind, rng):
  data = bytearray(path.read_bytes())
  start = rng.randrange(len(data))
  if kind == 'flip':
    data[start] ^= 1 << rng.randrange(8)
  elif kind == 'zero':
    while not any(data[start : start + 16]):
      start = rng.randrange(len(data))
    data[start : start + 16] = bytes(len(data[start : start + 16]))
  elif kind == 'truncate':
    del data[start:]
  path.unlink()
  if kind == 'replace':
    path.mkdir()
  elif kind != 'delete':
    path.write_bytes(data)


DAMAGES = ('flip', 'zero', 'truncate', 'delete', 'replace')
LATER = checkpoint_io.WRITTEN_LATER


@pytest.mark.parametrize(
  'count', [40, pytest.param(200, marks=pytest.mark.nightly)]
)
def test_all_damage_is_found_named_and_survived(good, tmp_path, count):
  rng = random.Random(count)
  files = [path for path in contents(good / '2') if path.name not in LATER]
  for case in range(count):
    directory = shutil.copytree(good, tmp_path / str(case))
    path = directory / '2' / rng.choice(files)
    damage(path, DAMAGES[case % len(DAMAGES)], rng)
    before = contents(directory)
    with pytest.warns(UserWarning, match='step 1') as warned:
      assert states.restored_step(directory) == 1
    assert str(path) in str(warned[0].message)
    assert contents(directory) == before
    shutil.rmtree(directory)


@pytest.mark.parametrize('kind', DAMAGES)
def test_files_written_after_the_manifest_are_not_needed(two_steps, kind):
  (two_steps / '2' / 'new').write_bytes(b'a file that is not listed')
  for name in LATER:
    if (two_steps / '2' / name).exists():
      damage(two_steps / '2' / name, kind, random.Random(0))
  assert states.restored_step(two_steps) == 2


def test_every_bit_of_a_manifest_counts(two_steps):
  path = two_steps / '2' / checkpoint_io.MANIFEST
  text = path.read_bytes()
  for position in range(len(text)):
    flipped = bytearray(text)
    flipped[position] ^= 1 << position % 8
    for damaged in (flipped, text[:position]):
      path.write_bytes(damaged)
      assert checkpoint_io.verify(path.parent), position


def test_a_foreign_manifest_is_damage(two_steps):
  path = two_steps / '2' / checkpoint_io.MANIFEST
  manifest = json.loads(path.read_text())
  content = manifest['content']
  files = content['files']
  elsewhere = {f'../2/{name}': entry for name, entry in files.items()}
  for given in (3, {}, files | {'_METADATA': 1}, elsewhere):
    body = json.dumps(content | {'files': given})
    for crc in (manifest['crc32'], f'{zlib.crc32(body.encode()):08x}'):
      path.write_text(f'{{"crc32": "{crc}", "content": {body}}}')
      with pytest.warns(UserWarning, match='step 1'):
        assert states.restored_step(two_steps) == 1


@pytest.mark.parametrize('part', ['files', 'arrays'])
def test_what_was_signed_again_is_read_as_listed_or_not(two_steps, part):
  path = two_steps / '2'
  if part == 'files':
    tree = path / '_METADATA'
    tree.write_text(tree.read_text().replace('key_type', 'other'))
    change = checkpoint_io._measure_all(path)
  else:
    change = {'params/w': ['float32', [255]], 'step': ['int32', []]}
  checkpoint_io.amend(path, **{part: change})
  with pytest.raises(UserError, match=r'cannot be read|float32\[256\]'):
    checkpoint_io.find(two_steps).read()


def test_no_good_checkpoint_is_an_error_that_names_all(two_steps):
  damaged = two_steps / '2' / '_METADATA'
  missing = two_steps / '1' / checkpoint_io.MANIFEST
  missing.unlink()
  os.truncate(damaged, 3)
  with pytest.raises(checkpoint_io.CorruptCheckpointError) as error:
    states.restored_step(two_steps)
  assert all(str(path) in str(error.value) for path in (missing, damaged))


def test_a_run_sets_a_damaged_step_aside(two_steps):
  for _ in range(2):
    os.truncate(two_steps / '2' / '_METADATA', 3)
    with Checkpointer(two_steps) as checkpointer:
      with pytest.warns(UserWarning, match='DAMAGED'):
        checkpointer.restore(states.noise(0))
      assert states.folders(two_steps)[:2] == ['1', '2']
      checkpointer.save(2, states.noise(2))
      checkpointer.wait()
      assert checkpointer.restore(states.noise(0))[1].step == 2
  assert states.folders(two_steps) == ['1', '2', 'set_aside']
  assert len(states.folders(two_steps / 'set_aside')) == 2


# Of several failing writes orbax awaits one; the others end without a loop.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_full_disk_is_a_clear_error_and_saving_resumes(tmp_path):
  size = 1 << 18  # 1 MiB of noise, which cannot be compressed
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, states.noise(1, size))
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
      checkpointer.save(2, states.noise(2, size))
      with pytest.raises(
        checkpoint_io.CheckpointError, match=r'saving step 2 to .* failed'
      ):
        steps_until_error(checkpointer)
      assert states.folders(tmp_path) == ['1']
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpointer.restore(states.noise(0, size))[1].step == 1
    checkpointer.save(2, states.noise(2, size))
    checkpointer.save(3, states.noise(3, size))
  assert states.restored_step(tmp_path, states.noise(0, size)) == 3
  assert states.folders(tmp_path) == ['2', '3']


def steps_until_error(checkpointer):
  for _ in range(200):
    time.sleep(0.05)  # a training step
    checkpointer.wait(block=False)


@pytest.mark.parametrize(
  'surface',
  [
    steps_until_error,
    lambda checkpointer: checkpointer.save(3, states.noise(3)),
    Checkpointer.wait,
    lambda checkpointer: checkpointer.restore(states.noise(0)),
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
  checkpointer.save(1, states.noise(1))
  checkpointer.wait()
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint_io, 'finish', full)
    checkpointer.save(2, states.noise(2))
    with pytest.raises(
      checkpoint_io.CheckpointError, match=r'step 2 .*No space left'
    ):
      surface(checkpointer)
  # The step that failed may be tried again, and the old one then goes.
  assert states.restored_step(tmp_path) == 1
  states.save_all(tmp_path, [2], states.noise, keep=1)
  assert states.folders(tmp_path) == ['2']


def test_leftovers_of_a_killed_save_are_removed(two_steps):
  leftover = two_steps / '3.orbax-checkpoint-tmp'
  shutil.copytree(two_steps / '2', leftover)
  with Checkpointer(two_steps) as checkpointer:
    assert not leftover.exists()
    # Or what a failed save wrote after its end.
    shutil.copytree(two_steps / '2', leftover)
    checkpointer.save(3, states.noise(3))
  assert states.restored_step(two_steps) == 3
  assert not leftover.exists()


KILL_SIZE = 1 << 18
ENDLESS_SAVING = f"""
import sys
from tests.train_lib.states import noise
from train_lib.checkpoint import Checkpointer

checkpointer = Checkpointer(sys.argv[1])
restored = checkpointer.restore(noise(0, {KILL_SIZE}))
step = restored[1].step if restored else 0
while True:
  step += 1
  checkpointer.save(step, noise(step, {KILL_SIZE}))
  print(step, flush=True)
"""


@pytest.mark.parametrize(
  'kills', [2, pytest.param(20, marks=pytest.mark.nightly)]
)
def test_every_kill_leaves_a_checkpoint_to_go_on_from(tmp_path, kills):
  rng = random.Random(kills)
  for _ in range(kills):
    with states.start_python(ENDLESS_SAVING, tmp_path) as process:
      for _ in range(rng.randint(2, 4)):
        step = int(process.stdout.readline())
      time.sleep(rng.uniform(0, 0.3))
      process.kill()
    with warnings.catch_warnings():
      warnings.simplefilter('error', UserWarning)  # none is damaged
      # The save before was waited for.
      assert (
        states.restored_step(tmp_path, states.noise(0, KILL_SIZE)) >= step - 1
      )


def test_a_checkpoint_under_another_number_is_damage(two_steps):
  shutil.copytree(two_steps / '1', two_steps / '3')
  with pytest.warns(UserWarning, match=r'is that of step 1'):
    assert states.restored_step(two_steps) == 2


def test_amended_metrics_are_restored(two_steps):
  with Checkpointer(two_steps) as checkpointer:
    checkpointer.amend(2, {'a': 1}, {'test/accuracy': 0.5})
  saved = checkpoint_io.find(two_steps)
  assert (saved.extra, saved.metrics) == ({'a': 1}, {'test/accuracy': 0.5})
  assert states.restored_step(two_steps) == 2
