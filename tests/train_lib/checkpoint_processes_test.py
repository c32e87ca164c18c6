"""Two processes share a run: they must take the same decisions."""

import socket
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train_lib.states import folders, start_python
from train_lib.checkpoint import Checkpointer

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
