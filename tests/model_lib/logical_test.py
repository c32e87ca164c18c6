"""Logical axes: names are checked, constraints reach the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from model_lib import logical, vit

RULES = (
  ('batch', ('data', 'fsdp')), ('embed', 'fsdp'), ('mlp', 'tensor'),
  ('heads', 'tensor'), ('classes', 'tensor'),
)  # fmt: skip
MODEL = vit.ViT(
  num_classes=4, patch_size=4, width=16, depth=2, mlp_dim=32, num_heads=2,
  pool='gap',
)  # fmt: skip


@pytest.fixture(scope='module')
def case():
  """Boxed parameters, images, logits on one device; NumPy to go anywhere."""
  images = np.random.default_rng(0).normal(size=(8, 8, 8, 3))
  images = images.astype(np.float32)
  boxed = jax.jit(MODEL.init)(jax.random.key(1), jnp.asarray(images))
  want = jax.jit(MODEL.apply)(boxed, jnp.asarray(images))[0]
  return jax.tree.map(np.asarray, boxed), images, np.asarray(want)


def test_wrong_names_are_refused():
  with pytest.raises(ValueError, match=r"logical axis: expected.*'embedd'"):
    logical.partitioned(nn.initializers.zeros, 'embedd')
  for names, message in (
    (['bach', None], r"logical axis: expected.*'bach'"),
    (['batch'], 'names: expected one per dimension'),
  ):
    with pytest.raises(ValueError, match=message):
      logical.constrain(jnp.zeros((2, 2)), *names)


def test_is_the_identity_without_mesh_or_rules(mesh):
  x = jnp.ones((8, 2))
  assert logical.constrain(x, 'batch', None) is x


def test_every_parameter_is_named(case):
  boxed = jax.tree.leaves(
    case[0], is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
  )
  assert all(isinstance(leaf, nn.LogicallyPartitioned) for leaf in boxed)
  assert all(len(leaf.names) == leaf.value.ndim <= 3 for leaf in boxed)


def test_sharded_result_equals_a_single_device(case, mesh):
  boxed, images, want = case
  variables = nn.unbox(boxed)
  shardings = nn.logical_to_mesh_sharding(
    nn.get_partition_spec(boxed), mesh, RULES
  )
  rows = NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))
  with nn.logical_axis_rules(RULES):
    forward = jax.jit(
      lambda v, x: MODEL.apply(v, x)[0], in_shardings=(shardings, rows)
    )
    got = forward(variables, images)
  assert not got.sharding.is_fully_replicated
  np.testing.assert_allclose(got, want, atol=1e-5)
