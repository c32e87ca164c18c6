"""A checkpoint is where a reader finds it, or not committed at all."""

import pytest

from launch import sweep, train
from tests.train_lib import states
from train_lib import checkpoint_io
from train_lib.checkpoint import Checkpointer, CheckpointError

LOST = ['run[1]', '[ab]/run', '[!a]', 'a\\b']
REFUSED = [*LOST, 'a*b', '**', 'a?', 'gs:/x', 'a\udc80b']
CONFIG = '--config=configs/adatape/parity.py'


@pytest.mark.parametrize('name', REFUSED)
@pytest.mark.parametrize('inside', [False, True])
def test_a_command_refuses_a_pattern(
  name, inside, tmp_path, monkeypatch, refused
):
  """Given as a path, or as the place of a relative one."""
  (tmp_path / name).mkdir(parents=True)
  monkeypatch.chdir(tmp_path / name if inside else tmp_path)
  workdir = '--workdir=' + ('run' if inside else name)
  sweeps = '--metric=test/accuracy', '--overrides=list.txt'
  for main, flags in ((train.main, ()), (sweep.main, sweeps)):
    words = ['error: --workdir: expected a path in UTF-8']
    refused(main, [CONFIG, workdir, *flags], words)


@pytest.mark.parametrize('name', [*LOST, 'x]', 'a b', 'a#b', 'é', "a'b"])
def test_what_is_committed_is_read(name, tmp_path):
  state = states.make_state(1)
  with Checkpointer(tmp_path / name) as checkpointer:
    checkpointer.save(1, state)
    if name in LOST:
      with pytest.raises(CheckpointError, match=r'manifest\.ocdbt'):
        checkpointer.wait()
      assert not checkpoint_io.steps_in(tmp_path / name)
      return
  found = checkpoint_io.flatten(checkpoint_io.find(tmp_path / name).read())
  assert sorted(found) == sorted(checkpoint_io.flatten(state))
