"""Parameters alone: from a workdir, averaged, the best, of a damaged step."""

import os

import jax
import numpy as np
import pytest

from tests.train_lib.states import (
  abstract,
  assert_identical,
  make_state,
  save_all,
)
from train_lib.checkpoint import Checkpointer, restore_params
from train_lib.checkpoint_io import (
  CheckpointError,
  CheckpointMismatchError,
  CheckpointWarning,
  CorruptCheckpointError,
)


def test_params_are_restored_from_just_the_workdir(tmp_path):
  state = make_state(2, devices=8)
  with Checkpointer(tmp_path / 'checkpoints') as checkpointer:
    checkpointer.save(2, state, {'stage': 'x'})
  for directory in (tmp_path, tmp_path / 'checkpoints'):
    found = restore_params(directory)
    assert_identical(found.params, jax.tree.map(np.asarray, state.params))
    assert found.model_state == {'count': 2}
    assert (found.step, found.extra) == (2, {'stage': 'x'})
    assert isinstance(found.params['dense']['kernel'], np.ndarray)


def test_params_need_no_byte_of_the_optimizer(tmp_path, monkeypatch):
  from train_lib import checkpoint_io

  save_all(tmp_path, [1])
  read, seen = checkpoint_io.read_arrays, []

  def spy(directory, wanted):
    seen.extend(wanted)
    return read(directory, wanted)

  monkeypatch.setattr(checkpoint_io, 'read_arrays', spy)
  restore_params(tmp_path)
  assert sorted(seen) == [
    'model_state/count',
    'params/dense/bias',
    'params/dense/kernel',
  ]


def test_params_on_devices_average_and_best(tmp_path):
  with Checkpointer(tmp_path, keep=1, best_metric='acc') as checkpointer:
    for step, value in ((1, 0.9), (2, 0.1)):
      state = make_state(step, ema=True)
      checkpointer.save(step, state, metrics={'acc': value})
  target = abstract(make_state(devices=4).params)
  average = restore_params(tmp_path, abstract_params=target)
  assert average.step == 2
  assert_identical(average.params, state.ema_params)
  kernel = average.params['dense']['kernel']
  assert kernel.sharding == target['dense']['kernel'].sharding
  best = restore_params(tmp_path, 'best', average=False)
  assert best.step == 1
  assert_identical(best.params, jax.tree.map(np.asarray, make_state(1).params))
  with pytest.raises(CheckpointMismatchError, match='dense/kernel'):
    restore_params(
      tmp_path, abstract_params=abstract(make_state(width=2).params)
    )


def test_params_of_a_run_without_best_or_checkpoint(tmp_path):
  with pytest.raises(CheckpointError, match='it has none'):
    restore_params(tmp_path)
  save_all(tmp_path, [1])
  with pytest.raises(CheckpointError, match='best_metric'):
    restore_params(tmp_path, 'best')


def test_params_fall_back_only_if_no_step_was_asked_for(tmp_path):
  save_all(tmp_path, [1, 2])
  os.truncate(tmp_path / '2' / '_METADATA', 5)
  with pytest.warns(CheckpointWarning, match='_METADATA'):
    assert restore_params(tmp_path).step == 1
  with pytest.raises(CorruptCheckpointError, match='_METADATA'):
    restore_params(tmp_path, 2)
