"""Mesh and logical axes: the layout of arrays over devices.

The mesh has three axes: `data` (replicas of the parameters), `fsdp` (batch
and parameters both split) and `tensor` (matrices split). Models name the axes
of their arrays logically; `RULES` maps those names to the mesh. The same code
runs on one CPU, on fake devices and on a pod.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dataset_lib.errors import ConfigError

AXES = ('data', 'fsdp', 'tensor')
# First match wins and a mesh axis is used once per array, so activations
# ('batch', 'length', 'embed') are split over rows and not over width.
RULES: tuple[tuple[str, Any], ...] = (
  ('batch', ('data', 'fsdp')),
  ('embed', 'fsdp'),
  ('mlp', 'tensor'),
  ('heads', 'tensor'),
  ('classes', 'tensor'),
  ('kv', None),
  ('length', None),
  ('bank', None),
  ('patch', None),
)
BATCH = PartitionSpec(('data', 'fsdp'))


def make_mesh(sizes: Any) -> Mesh:
  """Builds the mesh; one axis may be -1 and takes the remaining devices.

  A product below the number of devices uses the first ones; with several
  processes every device must be used.

  Raises:
    ConfigError: if the sizes do not fit the devices here.
  """
  shape = [int(sizes.get(axis, 1)) for axis in AXES]
  count = jax.device_count()
  if shape.count(-1) == 1:
    rest = -int(np.prod(shape))
    shape[shape.index(-1)] = count // rest if count % rest == 0 else 0
  size = int(np.prod(shape))
  fits = size == count or (size < count and jax.process_count() == 1)
  if min(shape) < 1 or not fits:
    raise ConfigError(
      'mesh',
      dict(sizes),
      f'sizes of {AXES}, at most one of them -1, that multiply to at most '
      f'the {count} devices here',
    )
  # Linen's logical partitioning needs Auto axes; make_mesh defaults to
  # Explicit ones.
  return jax.make_mesh(
    shape,
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=jax.devices()[:size],
  )


def _is_boxed(leaf: Any) -> bool:
  return isinstance(leaf, nn.meta.AxisMetadata)


def unbox(tree: Any) -> Any:
  """Removes the logical names from a tree of boxed arrays."""
  return jax.tree.map(
    lambda leaf: leaf.value if _is_boxed(leaf) else leaf,
    tree,
    is_leaf=_is_boxed,
  )


def tree_sharding(boxed: Any, mesh: Mesh) -> Any:
  """Returns shardings for a tree of boxed arrays, in unboxed structure.

  A dimension that the mesh does not divide is not split: a head of 10 classes
  on 4 devices, for instance.

  Raises:
    ValueError: if an array names a logical axis that no rule maps.
  """

  def leaf_sharding(leaf: Any) -> NamedSharding:
    if not _is_boxed(leaf):
      return replicated(mesh)
    unknown = {*leaf.names} - {None, *(name for name, _ in RULES)}
    if unknown:
      raise ValueError(
        f'{sorted(unknown)}: expected logical axes of sharding.RULES; others '
        'would silently be replicated'
      )
    spec = nn.logical_to_mesh_axes(leaf.names, RULES)
    return NamedSharding(mesh, _divisible(spec, leaf.value.shape, mesh))

  return jax.tree.map(leaf_sharding, boxed, is_leaf=_is_boxed)


def abstract(boxed: Any, mesh: Mesh) -> Any:
  """Returns shapes, dtypes and shardings of a tree of boxed arrays."""
  return jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=where
    ),
    unbox(boxed),
    tree_sharding(boxed, mesh),
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
  """Assembles this process's rows into the global batch on the devices.

  Rows are split over `data` and `fsdp`.
  """
  rows = NamedSharding(mesh, BATCH)
  return {
    name: jax.make_array_from_process_local_data(rows, value)
    for name, value in batch.items()
  }


def check_batch_size(config: Any, mesh: Mesh) -> None:
  """Raises `ConfigError` unless rows divide over devices and micro-batches."""
  devices = mesh.shape['data'] * mesh.shape['fsdp']
  unit = devices * config.num_micro
  if config.batch_size % unit:
    raise ConfigError(
      'batch_size',
      config.batch_size,
      f'a multiple of {unit}: {devices} devices along data x fsdp times '
      f'num_micro={config.num_micro}',
    )


def _divisible(
  spec: PartitionSpec | None, shape: tuple[int, ...], mesh: Mesh
) -> PartitionSpec:
  # Factored optimizer statistics keep the names of a parameter but not its
  # rank: such an array is replicated.
  if spec is None or len(spec) > len(shape):
    return PartitionSpec()
  axes = []
  for size, axis in zip(shape, spec, strict=False):
    names = (axis,) if isinstance(axis, str) else (axis or ())
    parts = int(np.prod([mesh.shape[name] for name in names]))
    axes.append(axis if size % parts == 0 else None)
  return PartitionSpec(*axes)
