"""Checkpoints: round trips, retention, layouts, mismatches, parameters."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train_lib.states import (
  State,
  abstract,
  assert_identical,
  make_state,
  save_all,
)
from train_lib import checkpoint_io
from train_lib.checkpoint import Checkpointer, restore_params
from train_lib.checkpoint_io import (
  CheckpointError,
  CheckpointMismatchError,
  CheckpointWarning,
  CorruptCheckpointError,
)


def folders(directory):
  return sorted(path.name for path in directory.iterdir())


def test_round_trip_is_bit_identical_and_keeps_shardings(tmp_path):
  state = make_state(3, devices=8, ema=True)
  with Checkpointer(tmp_path) as checkpointer:
    assert checkpointer.restore(abstract(state)) is None
    checkpointer.save(3, state, {'stage': 'a', 'knob': [1, float('inf')]})
    restored = checkpointer.restore(abstract(state))
  assert_identical(restored.state, state)
  assert isinstance(restored.state, State)
  same = jax.tree.map(lambda x, y: x.sharding == y.sharding, restored[0], state)
  assert all(jax.tree.leaves(same))
  assert restored.extra == {'stage': 'a', 'knob': [1, 'Infinity']}
  assert restored.step == 3


def test_a_donated_state_is_saved_as_it_was(tmp_path):
  state = make_state(1, devices=2, width=4096)
  expected = jax.tree.map(np.array, state)
  overwrite = jax.jit(
    lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0
  )
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
    where = abstract(state)
    jax.block_until_ready(overwrite(state))
    assert_identical(checkpointer.restore(where).state, expected)


@pytest.mark.parametrize(
  ('saved', 'restored'), [(8, 1), (8, 4), (1, 8), (4, 2)]
)
def test_restores_on_another_number_of_devices(tmp_path, saved, restored):
  state = make_state(5, devices=saved, ema=True)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(5, state)
  target = abstract(make_state(0, devices=restored, ema=True))
  with Checkpointer(tmp_path) as checkpointer:
    found = checkpointer.restore(target).state
  assert_identical(found, state)
  kernel = found.params['dense']['kernel']
  assert kernel.sharding == target.params['dense']['kernel'].sharding
  assert len(kernel.addressable_shards) == restored


def test_retention_keeps_the_newest_and_the_best(tmp_path):
  accuracy = {1: 0.5, 2: 0.9, 3: 0.1, 4: float('nan'), 5: 0.9, 6: 0.2}
  with Checkpointer(tmp_path, keep=2, best_metric='accuracy') as checkpointer:
    for step, value in accuracy.items():
      checkpointer.save(step, make_state(step), metrics={'accuracy': value})
    checkpointer.wait()
    assert folders(tmp_path) == ['2', '5', '6']
  # A new process knows the best of the old one, and does not remove it.
  with Checkpointer(tmp_path, keep=1, best_metric='accuracy') as checkpointer:
    checkpointer.restore(abstract(make_state()))
    checkpointer.save(7, make_state(7))
    checkpointer.wait()
    assert folders(tmp_path) == ['2', '7']


def test_the_best_may_be_the_smallest_and_of_another_metric(tmp_path):
  options = dict(keep=1, best_metric='loss', best_mode='min')
  values = {
    1: dict(loss=3.0),
    2: dict(loss=1.0, f1=0.1),
    3: dict(loss=2.0, f1=1.0),
  }
  with Checkpointer(tmp_path, **options) as checkpointer:
    for step, metrics in values.items():
      checkpointer.save(step, make_state(step), metrics=metrics)
  assert folders(tmp_path) == ['2', '3']
  assert restore_params(tmp_path, 'best').step == 2
  with Checkpointer(tmp_path, keep=3, best_metric='f1') as checkpointer:
    checkpointer.restore(abstract(make_state()))
    checkpointer.save(4, make_state(4))
  assert restore_params(tmp_path, 'best').step == 3


def without_bias():
  state = make_state()
  del state.params['dense']['bias']
  return state


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    (
      lambda: make_state(dtype=jnp.int32),
      r'params/dense/kernel: expected int32\[8, 8\], got float32\[8, 8\]',
    ),
    (
      lambda: make_state(width=4),
      r'params/dense/kernel: expected float32\[8, 4\], got float32\[8, 8\]',
    ),
    (
      lambda: make_state(ema=True),
      r'ema_params/dense/bias: expected bfloat16\[3\], got nothing',
    ),
    (
      without_bias,
      r'params/dense/bias: expected nothing, got bfloat16\[3\]',
    ),
  ],
)
def test_another_structure_is_an_error_that_names_paths(
  tmp_path, other, message
):
  save_all(tmp_path, [1])
  with (
    Checkpointer(tmp_path) as checkpointer,
    pytest.raises(CheckpointMismatchError, match=message),
  ):
    checkpointer.restore(abstract(other()))


def test_other_leaves_than_plain_arrays_are_refused(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(TypeError, match=r'a/key: .*key_data'):
      checkpointer.save(1, {'a': {'key': jax.random.key(0)}})
    with pytest.raises(TypeError, match='name: expected an array, got str'):
      checkpointer.save(1, {'name': 'x'})
    with pytest.raises(TypeError):
      checkpointer.save(1, {'x': jnp.ones(2)}, extra={'y': np.ones(2)})
  assert folders(tmp_path) == []


def test_steps_grow_and_unrestored_checkpoints_are_kept(tmp_path):
  save_all(tmp_path, [4])
  with Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(CheckpointError, match=r'\[4\] that were not restored'):
      checkpointer.save(5, make_state())
    with pytest.raises(CheckpointError, match=r'of step 7; it has \[4\]'):
      checkpointer.restore(abstract(make_state()), 7)
    checkpointer.restore(abstract(make_state()))
    with pytest.raises(ValueError, match='more than 4'):
      checkpointer.save(4, make_state())
    checkpointer.save(5, make_state())
    with pytest.raises(ValueError, match='more than 5'):
      checkpointer.save(5, make_state())


def test_going_back_sets_later_checkpoints_aside(tmp_path):
  save_all(tmp_path, [1, 2, 3], keep=3)
  for _ in range(2):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
      assert checkpointer.restore(abstract(make_state()), 1).step == 1
      assert folders(tmp_path)[:3] == ['1', '2', '3']
      checkpointer.save(2, make_state(2))
      checkpointer.save(3, make_state(3))
      checkpointer.wait()
      assert folders(tmp_path) == ['2', '3', 'set_aside']
    shutil.copytree(tmp_path / 'set_aside' / '2', tmp_path / '1')
  assert len(folders(tmp_path / 'set_aside')) == 4


def test_params_are_restored_from_the_workdir_alone(tmp_path, monkeypatch):
  state = make_state(2, devices=8)
  with Checkpointer(tmp_path / 'checkpoints') as checkpointer:
    checkpointer.save(2, state, {'stage': 'x'})
  read, seen = checkpoint_io.read_arrays, []

  def spy(directory, wanted):
    seen.extend(wanted)
    return read(directory, wanted)

  monkeypatch.setattr(checkpoint_io, 'read_arrays', spy)
  for directory in (tmp_path, tmp_path / 'checkpoints'):
    found = restore_params(directory)
    assert_identical(found.params, jax.tree.map(np.asarray, state.params))
    assert found.model_state == {'count': 2}
    assert (found.step, found.extra) == (2, {'stage': 'x'})
    assert isinstance(found.params['dense']['kernel'], np.ndarray)
  # No byte of the optimizer is read.
  names = {'model_state/count', 'params/dense/bias', 'params/dense/kernel'}
  assert set(seen) == names


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


def test_params_fall_back_only_if_no_step_was_asked_for(tmp_path):
  with pytest.raises(CheckpointError, match='it has none'):
    restore_params(tmp_path)
  save_all(tmp_path, [1, 2])
  with pytest.raises(CheckpointError, match='best_metric'):
    restore_params(tmp_path, 'best')
  os.truncate(tmp_path / '2' / '_METADATA', 5)
  with pytest.warns(CheckpointWarning, match='_METADATA'):
    assert restore_params(tmp_path).step == 1
  with pytest.raises(CorruptCheckpointError, match='_METADATA'):
    restore_params(tmp_path, 2)
