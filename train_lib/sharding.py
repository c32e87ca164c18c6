"""Mesh and logical axes: the layout of arrays over devices.

Axes of the mesh: `data` (replicas of the parameters), `fsdp` (batch and
parameters split), `tensor` (matrices split). Models name axes logically;
`RULES` maps the names to the mesh.
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
  """Builds the mesh of `mesh_shape`, by default of all devices.

  A smaller mesh has the first devices, unless there are several processes.
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
      axes = (a if n % parts_of(a, mesh) == 0 else None for n, a in _axes(leaf))
      where = NamedSharding(mesh, PartitionSpec(*axes))
    value = unbox(leaf)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)

  return jax.tree.map(place, boxed, is_leaf=_is_boxed)


def _axes(leaf: Any) -> list[tuple[int, Any]]:
  """Returns the size and mesh axis of each dimension that has a name."""
  names = leaf.names if _is_boxed(leaf) else ()
  if unknown := {*names} - {None, *dict(RULES)}:
    # Unknown names would silently be replicated.
    raise ValueError(f'{sorted(unknown)}: expected axes of sharding.RULES')
  shape, spec = unbox(leaf).shape, nn.logical_to_mesh_axes(names, RULES) or ()
  # Factored optimizer statistics carry a parameter's names but have lower rank.
  return [] if len(spec) > len(shape) else [*zip(shape, spec, strict=False)]


def not_split(boxed: Any, mesh: Mesh) -> list[str]:
  """Lists dimensions of parameters that the mesh should split but cannot."""
  names: dict[str, list[str]] = {}
  leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=_is_boxed)
  for path, leaf in leaves:
    for size, axis in _axes(leaf):
      if size % parts_of(axis, mesh):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        cause = f'{size} of {axis}={parts_of(axis, mesh)}'
        names.setdefault(cause, []).append(name)
  return [
    f'{cause} in {first}' + f' and {len(rest)} more' * bool(rest)
    for cause, (first, *rest) in names.items()
  ]


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device has whole."""
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
  """Raises `ConfigError` unless all devices have whole groups of rows."""
  micro, devices = config.num_micro, mesh.shape['data'] * mesh.shape['fsdp']
  multiple = devices * micro * together
  if config.batch_size % multiple:
    product = f'{devices} devices along data x fsdp times num_micro={micro}'
    if together > 1:
      product += f' times {together} rows that are mixed'
    expected = f'a multiple of {multiple}: {product}'
    raise ConfigError('batch_size', config.batch_size, expected)
