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


def split(sizes, shape, *names):
  """How an array with these axes is split over a mesh."""
  array = jax.ShapeDtypeStruct(shape, jnp.float32)
  boxed = {'x': nn.LogicallyPartitioned(array, names)}
  found = sharding.abstract(boxed, sharding.make_mesh(sizes))['x']
  assert (found.shape, found.dtype) == (shape, jnp.float32)
  return tuple(found.sharding.spec)


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
  assert split(sizes, shape, *names) == expected


def test_a_misspelt_axis_is_an_error_and_not_replicated():
  with pytest.raises(ValueError, match='embde'):
    split(dict(data=8), (4,), 'embde')


def test_rows_keep_their_order_over_devices():
  mesh = sharding.make_mesh(dict(data=4, fsdp=2))
  batch = sharding.put_batch({'x': np.arange(16)}, mesh)
  assert len(batch['x'].addressable_shards) == 8
  np.testing.assert_array_equal(batch['x'], np.arange(16))


def test_without_a_mesh_arrays_are_on_the_first_device():
  params = {'x': nn.LogicallyPartitioned(jnp.zeros(4), ('embed',))}
  found = sharding.abstract(params, None)['x'].sharding
  assert found.device_set == {jax.devices()[0]}
