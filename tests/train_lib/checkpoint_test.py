"""Checkpoints: round trips, retention, layouts, mismatches, two processes."""

import os
import re
import socket
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.train_lib import states
from tests.train_lib.states import folders, start_python
from train_lib import checkpoint_io
from train_lib.checkpoint import Checkpointer
from train_lib.train_step import TrainState


def test_a_donated_state_is_saved_as_it_was(tmp_path):
  state = states.make_state(1, devices=2, width=4096)
  expected = jax.tree.map(np.array, state)
  zeros = jax.tree_util.Partial(jax.tree.map, jnp.zeros_like)
  overwrite = jax.jit(zeros, donate_argnums=0)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
    where = states.abstract(state)
    jax.block_until_ready(overwrite(state))
    states.assert_identical(checkpointer.restore(where)[0], expected)


@pytest.mark.parametrize(
  ('saved', 'restored'), [(8, 8), (8, 1), (8, 4), (1, 8), (4, 2)]
)
def test_a_state_is_bit_identical_on_any_devices(tmp_path, saved, restored):
  state = states.make_state(5, devices=saved, ema=True)
  target = states.abstract(states.make_state(0, devices=restored, ema=True))
  with Checkpointer(tmp_path) as checkpointer:
    assert checkpointer.restore(target) is None
    checkpointer.save(5, state, {'stage': 'a', 'knob': [1, float('inf')]})
    found, step = checkpointer.restore(target)
  assert isinstance(found, TrainState)
  states.assert_identical(found, state)
  same = jax.tree.map(lambda x, y: x.sharding == y.sharding, found, target)
  assert all(jax.tree.leaves(same))
  assert len(found.params['dense']['kernel'].addressable_shards) == restored
  assert (step.step, step.extra) == (5, {'stage': 'a', 'knob': [1, 'Infinity']})


NAN = float('nan')


@pytest.mark.parametrize(
  ('mode', 'values', 'left', 'best'),
  [
    ('max', [0.5, 0.9, 0.1, NAN, 0.9, 0.2], ['2', '5', '6'], 2),
    ('min', [3.0, 1.0, 2.0, 2.0], ['2', '3', '4'], 2),
    ('max', [1.0, NAN, 2.0], ['2', '3'], 3),
    ('max', [NAN, NAN, NAN], ['2', '3'], None),
  ],
)
def test_retention_keeps_the_newest_and_the_best(
  tmp_path, mode, values, left, best
):
  metrics = {step: {'a': value} for step, value in enumerate(values, 1)}
  options = dict(keep=2, best_metric='a', best_mode=mode)
  states.save_all(tmp_path, metrics, metrics=metrics, **options)
  assert states.folders(tmp_path) == left
  if best:
    assert checkpoint_io.find(tmp_path, 'best').step == best


def test_a_new_process_knows_the_best_and_may_have_another_metric(tmp_path):
  metrics = {1: {'a': 1.0, 'f1': 0.1}, 2: {'a': 0.1, 'f1': 1.0}}
  states.save_all(tmp_path, metrics, metrics=metrics, best_metric='a')
  for metric, step, left in (('a', 3, [*'123']), ('f1', 4, [*'234'])):
    with Checkpointer(tmp_path, best_metric=metric) as checkpointer:
      checkpointer.restore(states.abstract(states.make_state()))
      checkpointer.save(step, states.make_state(step))
    assert states.folders(tmp_path) == left
    assert checkpoint_io.find(tmp_path, 'best').step == int(left[0])


def test_another_structure_is_an_error_that_names_paths(tmp_path):
  states.save_all(tmp_path, [1])
  without_bias = states.make_state()
  del without_bias.params['dense']['bias']
  for other, message in (
    (states.make_state(dtype=jnp.int32),
     'params/dense/kernel: expected int32[8, 8], got float32[8, 8]'),
    (states.make_state(width=4),
     'params/dense/kernel: expected float32[8, 4], got float32[8, 8]'),
    (states.make_state(ema=True),
     'ema_params/dense/bias: expected bfloat16[3], got nothing'),
    (without_bias, 'params/dense/bias: expected nothing, got bfloat16[3]'),
  ):  # fmt: skip
    with (
      Checkpointer(tmp_path) as checkpointer,
      pytest.raises(
        checkpoint_io.CheckpointMismatchError, match=re.escape(message)
      ),
    ):
      checkpointer.restore(states.abstract(other))


def test_other_leaves_than_plain_arrays_are_refused(tmp_path):
  for state, extra, message in (
    ({'a': {'key': jax.random.key(0)}}, {}, r'a/key: .*key_data'),
    ({'name': 'x'}, {}, 'name: expected an array, got str'),
    ({'x': np.ones(2)}, {'y': np.ones(2)}, 'ndarray'),
  ):
    with (
      Checkpointer(tmp_path) as checkpointer,
      pytest.raises(TypeError, match=message),
    ):
      checkpointer.save(1, state, extra)
    assert states.folders(tmp_path) == []


@pytest.mark.parametrize('subfolder', ['', 'checkpoints'])
@pytest.mark.parametrize('average', [False, True])
def test_params_are_read_without_the_optimizer(
  tmp_path, monkeypatch, subfolder, average
):
  state = states.make_state(2, devices=8, ema=average)
  states.save_all(tmp_path / 'checkpoints', [2], lambda _: state)
  read, seen = ocp.PyTreeCheckpointer.restore, []

  def spy(self, path, args):
    seen.extend(args.item)
    return read(self, path, args=args)

  monkeypatch.setattr(ocp.PyTreeCheckpointer, 'restore', spy)
  saved = checkpoint_io.find(tmp_path / subfolder)
  expected = state.ema_params if average else state.params
  params = saved.params()
  states.assert_identical(params, jax.tree.map(np.asarray, expected))
  assert isinstance(params['dense']['kernel'], np.ndarray)
  assert saved.read('model_state/') == {'count': 2}
  assert (saved.step, saved.extra) == (2, {'stage': 's2'})
  assert seen == ['ema_params' if average else 'params', 'model_state']
  target = states.abstract(states.make_state(devices=4).params)
  params = saved.read('params/', target)
  states.assert_identical(params, state.params)
  kernel = params['dense']['kernel']
  assert kernel.sharding == target['dense']['kernel'].sharding


def test_a_step_that_is_asked_for_has_no_fallback(tmp_path):
  with pytest.raises(
    checkpoint_io.CheckpointError, match=r'has no checkpoint$'
  ):
    checkpoint_io.find(tmp_path)
  states.save_all(tmp_path, [1, 2])
  for step, message in ((7, r'of step 7; it has \[1, 2\]'), ('best', 'metric')):
    with pytest.raises(checkpoint_io.CheckpointError, match=message):
      checkpoint_io.find(tmp_path, step)
  os.truncate(tmp_path / '2' / '_METADATA', 5)
  with pytest.warns(UserWarning, match='_METADATA'):
    assert checkpoint_io.find(tmp_path).step == 1
  with pytest.raises(checkpoint_io.CorruptCheckpointError, match='_METADATA'):
    checkpoint_io.find(tmp_path, 2)


RUN = """
import os, sys, warnings
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from train_lib.checkpoint import Checkpointer

directory, address, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
warnings.simplefilter('default')
jax.distributed.initialize(address, 2, index)
mesh = jax.make_mesh((4,), ('d',), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec('d'))

def make_state(step):
  value = np.arange(16, dtype=np.float32) + step
  return {'w': jax.make_array_from_callback((16,), split, lambda i: value[i])}

abstract = {'w': jax.ShapeDtypeStruct((16,), jnp.float32, sharding=split)}
with Checkpointer(directory, best_metric='a') as checkpointer:
  assert checkpointer.restore(abstract) is None
  for step in (1, 2):
    checkpointer.save(step, make_state(step), metrics={'a': -step})
  checkpointer.wait()
  if index == 0:
    os.truncate(os.path.join(directory, '2', '_METADATA'), 3)
  multihost_utils.sync_global_devices('damaged')
with Checkpointer(directory) as checkpointer:
  state, saved = checkpointer.restore(abstract)
  print('restored', saved.step, flush=True)
  for shard in state['w'].addressable_shards:
    np.testing.assert_array_equal(
      shard.data, np.arange(16)[shard.index] + saved.step
    )
  for step in (2, 3, 4):
    checkpointer.save(step, make_state(step))
    checkpointer.wait(block=False)
"""


@pytest.mark.slow
def test_two_processes_fall_back_to_the_same_step_and_go_on(tmp_path):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    given = tmp_path, f'127.0.0.1:{free.getsockname()[1]}'
  flags = '--xla_force_host_platform_device_count=2'
  options = dict(flags=flags, stderr=subprocess.PIPE)
  processes = [
    start_python(RUN, *given, index, **options) for index in range(2)
  ]
  results = [process.communicate(timeout=120) for process in processes]
  assert [process.returncode for process in processes] == [0, 0], results
  assert [output.splitlines()[-1] for output, _ in results] == [
    'restored 1', 'restored 1'
  ]  # fmt: skip
  assert 'DAMAGED CHECKPOINT' in results[0][1]
  assert folders(tmp_path) == ['3', '4', 'set_aside']
  with Checkpointer(tmp_path) as checkpointer:
    state, _ = checkpointer.restore({'w': jnp.zeros(16)})
  np.testing.assert_array_equal(state['w'], np.arange(16) + 4)
