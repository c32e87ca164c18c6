"""Mesh and logical axes: the layout of arrays over devices.

The mesh has the axes `data` (replicas of the parameters), `fsdp` (batch and
parameters both split) and `tensor` (matrices split). Models name the axes of
their arrays logically; `RULES` maps those names to the mesh.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from core.errors import ConfigError
from model_lib.logical import parts_of

AXES = ('data', 'fsdp', 'tensor')
# First match wins and a mesh axis is used once per array. 'batch' takes fsdp
# first, so activations ('batch', 'length', 'embed') are not split over width.
RULES: tuple[tuple[str, Any], ...] = (
  ('batch', ('data', 'fsdp')),
  ('embed', 'fsdp'),
  ('mlp', 'tensor'),
  ('heads', 'tensor'),
  ('classes', 'tensor'),
  *((name, None) for name in ('kv', 'length', 'bank', 'patch')),
)


def mesh_shape(sizes: Any, count: int, is_whole: bool) -> tuple[int, ...]:
  """Returns the sizes of `AXES`; -1 takes the devices that remain of `count`.

  Raises `ConfigError` if they do not fit, or do not use all if `is_whole`.
  """
  shape = [int(sizes.get(a, 1)) for a in AXES]
  if shape.count(-1) == 1:
    rest = -math.prod(shape)
    shape[shape.index(-1)] = count // rest if count % rest == 0 else 0
  size = math.prod(shape)
  fits = size == count or (size < count and not is_whole)
  if min(shape) < 1 or not fits:
    expected = f'sizes of {AXES}, at most one -1, for {count} devices'
    raise ConfigError('mesh', dict(sizes), expected)
  return tuple(shape)


def make_mesh(sizes: Any, devices: Sequence[Any] | None = None) -> Mesh:
  """Builds the mesh; one axis may be -1 and takes the remaining devices.

  If the product is smaller than the device count, the first devices are used;
  with several processes every device must be used. `devices` are all by
  default.
  """
  devices = jax.devices() if devices is None else devices
  shape = mesh_shape(sizes, len(devices), jax.process_count() > 1)
  size = math.prod(shape)
  # Linen's logical partitioning needs Auto axes, not the default.
  types = (AxisType.Auto,) * len(AXES)
  return jax.make_mesh(shape, AXES, axis_types=types, devices=devices[:size])


def _is_boxed(leaf: Any) -> bool:
  return isinstance(leaf, nn.meta.AxisMetadata)


def unbox(tree: Any) -> Any:
  """Removes the logical names from a tree of boxed arrays."""
  # Unlike `nn.meta.unbox`, this adds no sharding constraints under a mesh.
  return jax.tree.map(
    lambda leaf: leaf.value if _is_boxed(leaf) else leaf,
    tree,
    is_leaf=_is_boxed,
  )


def abstract(boxed: Any, mesh: Mesh | None) -> Any:
  """Returns shapes, dtypes and shardings of a tree of boxed arrays, unboxed.

  A dimension that the mesh does not divide is not split, e.g. a head of 10
  classes on 4 devices. Without a mesh all are on the first device.
  """

  def place(leaf: Any) -> jax.ShapeDtypeStruct:
    where: Any = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if mesh is not None:
      where = NamedSharding(mesh, _split(leaf, mesh))
    value = unbox(leaf)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)

  return jax.tree.map(place, boxed, is_leaf=_is_boxed)


def _split(leaf: Any, mesh: Mesh) -> PartitionSpec:
  names = leaf.names if _is_boxed(leaf) else ()
  if unknown := {*names} - {None, *dict(RULES)}:
    # Unknown names would silently be replicated.
    raise ValueError(f'{sorted(unknown)}: expected axes of sharding.RULES')
  shape, spec = unbox(leaf).shape, nn.logical_to_mesh_axes(names, RULES)
  # Factored optimizer statistics carry a parameter's names but have lower rank.
  if spec is None or len(spec) > len(shape):
    return PartitionSpec()
  return PartitionSpec(
    *(
      axis if size % parts_of(axis, mesh) == 0 else None
      for size, axis in zip(shape, spec, strict=False)
    )
  )


def not_split(boxed: Any, mesh: Mesh) -> list[str]:
  """Names the dimensions of parameters that the mesh should split but cannot.

  They are whole on every device, e.g. a head of 10 classes on 4 devices.
  """
  found: dict[str, list[str]] = {}
  leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=_is_boxed)
  for path, leaf in leaves:
    spec = nn.logical_to_mesh_axes(leaf.names, RULES) if _is_boxed(leaf) else ()
    for size, axis in zip(unbox(leaf).shape, spec or (), strict=False):
      if size % parts_of(axis, mesh):
        words = f'{size} of {axis}={parts_of(axis, mesh)}'
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        found.setdefault(words, []).append(name)
  return [
    f'{words} in {names[0]}' + f' and {len(names) - 1} more' * (len(names) > 1)
    for words, names in found.items()
  ]


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array whose rows are split over devices."""
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
  """Splits this process's rows over `data` and `fsdp`, as a global batch."""
  return {
    name: jax.make_array_from_process_local_data(by_rows(mesh), value)
    for name, value in batch.items()
  }


def check_batch_size(
  config: Any, mesh: Mesh | jax.sharding.AbstractMesh, together: int = 1
) -> None:
  """Raises `ConfigError` unless rows divide over devices and micro-batches.

  `together`: rows that one device holds together, 2 for mixup.
  """
  micro, devices = config.num_micro, mesh.shape['data'] * mesh.shape['fsdp']
  multiple = devices * micro * together
  if config.batch_size % multiple:
    product = f'{devices} devices along data x fsdp times num_micro={micro}'
    if together > 1:
      product += f' times {together} rows that are mixed'
    expected = f'a multiple of {multiple}: {product}'
    raise ConfigError('batch_size', config.batch_size, expected)
