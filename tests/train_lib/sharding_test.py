"""Layouts over 8 fake devices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib.errors import ConfigError
from train_lib import sharding


@pytest.mark.parametrize(
  ('sizes', 'expected'),
  [
    (dict(data=-1), (8, 1, 1)),
    (dict(data=2, fsdp=2, tensor=2), (2, 2, 2)),
    (dict(data=2, fsdp=-1), (2, 4, 1)),
    (dict(data=3), (3, 1, 1)),
    (dict(data=16), None),
    (dict(data=-1, fsdp=-1), None),
    (dict(data=0), None),
    (dict(fsdp=-1, data=3), None),
  ],
)
def test_mesh_sizes(sizes, expected):
  if not expected:
    with pytest.raises(ConfigError, match='mesh'):
      sharding.make_mesh(sizes)
    return
  mesh = sharding.make_mesh(sizes)
  assert tuple(mesh.shape[axis] for axis in sharding.AXES) == expected


def placed(shape, names, sizes=None):
  """An array with these axes on a mesh."""
  array = jax.ShapeDtypeStruct(shape, jnp.float32)
  boxed = {'x': nn.LogicallyPartitioned(array, names)}
  mesh = sizes and sharding.make_mesh(sizes)
  return sharding.abstract(boxed, mesh)['x']


@pytest.mark.parametrize(
  ('sizes', 'shape', 'names', 'expected'),
  [
    (dict(data=2, fsdp=2, tensor=2), (4, 8), ('embed', 'mlp'),
     ('fsdp', 'tensor')),
    # A dimension that the mesh does not divide.
    (dict(fsdp=2, tensor=4), (6, 10), ('embed', 'classes'), ('fsdp', None)),
    # Factored statistics have another rank than their parameter.
    (dict(fsdp=8), (8,), ('embed', 'mlp'), ()),
  ],
)  # fmt: skip
def test_arrays_follow_their_logical_names(sizes, shape, names, expected):
  found = placed(shape, names, sizes)
  assert (found.shape, found.dtype) == (shape, jnp.float32)
  assert tuple(found.sharding.spec) == expected


def test_a_misspelt_axis_is_an_error_and_not_replicated():
  with pytest.raises(ValueError, match='embde'):
    placed((4,), ('embde',), dict(data=8))
  first = placed((4,), ('embed',)).sharding.device_set  # without a mesh
  assert first == {jax.devices()[0]}


def test_rows_keep_their_order_over_devices():
  mesh = sharding.make_mesh(dict(data=4, fsdp=2))
  batch = sharding.put_batch({'x': np.arange(16)}, mesh)
  assert len(batch['x'].addressable_shards) == 8
  np.testing.assert_array_equal(batch['x'], np.arange(16))
