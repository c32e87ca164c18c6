"""Layouts over 8 fake devices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dataset_lib.errors import ConfigError
from train_lib import sharding


def boxed(shape, *names):
  return nn.LogicallyPartitioned(
    jax.ShapeDtypeStruct(shape, jnp.float32), names
  )


def spec_of(array, mesh):
  return sharding.tree_sharding({'x': array}, mesh)['x'].spec


@pytest.mark.parametrize(
  ('sizes', 'expected'),
  [
    (dict(data=-1), (8, 1, 1)),
    (dict(data=2, fsdp=2, tensor=2), (2, 2, 2)),
    (dict(data=2, fsdp=-1), (2, 4, 1)),
    (dict(data=3), (3, 1, 1)),
  ],
)
def test_mesh_sizes(sizes, expected):
  mesh = sharding.make_mesh(sizes)
  assert tuple(mesh.shape[axis] for axis in sharding.AXES) == expected


@pytest.mark.parametrize(
  'sizes',
  [dict(data=16), dict(data=-1, fsdp=-1), dict(data=0), dict(fsdp=-1, data=3)],
)
def test_impossible_mesh_names_the_key(sizes):
  with pytest.raises(ConfigError, match='mesh'):
    sharding.make_mesh(sizes)


def test_parameters_follow_their_logical_names():
  mesh = sharding.make_mesh(dict(data=2, fsdp=2, tensor=2))
  assert spec_of(boxed((4, 8), 'embed', 'mlp'), mesh) == PartitionSpec(
    'fsdp', 'tensor'
  )


def test_a_dimension_the_mesh_does_not_divide_stays_whole():
  mesh = sharding.make_mesh(dict(fsdp=2, tensor=4))
  assert spec_of(boxed((6, 10), 'embed', 'classes'), mesh) == PartitionSpec(
    'fsdp', None
  )


def test_a_misspelt_axis_is_an_error_and_not_replicated():
  mesh = sharding.make_mesh(dict(data=8))
  with pytest.raises(ValueError, match='embde'):
    spec_of(boxed((4,), 'embde'), mesh)


def test_factored_statistics_of_another_rank_are_replicated():
  mesh = sharding.make_mesh(dict(fsdp=8))
  assert spec_of(boxed((8,), 'embed', 'mlp'), mesh) == PartitionSpec()


def test_rows_keep_their_order_over_devices():
  mesh = sharding.make_mesh(dict(data=4, fsdp=2))
  batch = sharding.put_batch({'x': np.arange(16)}, mesh)
  assert len(batch['x'].addressable_shards) == 8
  np.testing.assert_array_equal(batch['x'], np.arange(16))
