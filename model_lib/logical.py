"""Layout of parameters and activations over the axes of a mesh.

A name that is not in `LOGICAL_AXES` raises ConfigError; Flax would replicate it
silently. What the mesh does not divide is replicated, with a warning.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Shaped

from core.errors import ConfigError

# Axes of the mesh that the rows of a batch are split over.
BATCH_AXES = ('data', 'fsdp')
LOGICAL_AXES = (
  'batch', 'length', 'embed', 'mlp', 'heads', 'kv', 'bank', 'classes', 'patch',
)  # fmt: skip

LECUN = nn.initializers.lecun_normal()


def partitioned(
  initializer: Callable[..., Any], *names: str | None
) -> Callable[..., Any]:
  """Returns a Flax initializer that attaches the logical names of the axes."""
  _check(names)
  return nn.with_logical_partitioning(initializer, names)


def partitioned_dense(
  features: int,
  inputs: str | None,
  outputs: str | None,
  name: str | None = None,
  *,
  kernel_init: Callable[..., Any] = LECUN,
  bias_init: Callable[..., Any] = nn.initializers.zeros,
  use_bias: bool = True,
  dtype: Any = jnp.float32,
) -> nn.Dense:
  """Returns a dense layer; `inputs` and `outputs` name its logical axes."""
  return nn.Dense(
    features,
    name=name,
    use_bias=use_bias,
    dtype=dtype,
    kernel_init=partitioned(kernel_init, inputs, outputs),
    bias_init=partitioned(bias_init, outputs),
    dot_general=_product,
  )


def _product(x: Any, kernel: Any, _: Any, precision: Any = None) -> Any:
  """Multiplies rows `[*B, D]` by a kernel `[D, O]`, all rows as one axis.

  XLA compiles its gradient for a TPU faster than that of several axes of rows.
  """
  rows = x.reshape(-1, x.shape[-1])
  out = jax.lax.dot(rows, kernel, precision=precision)
  return out.reshape(*x.shape[:-1], kernel.shape[-1])


def constrain(
  x: Shaped[Array, '*S'], *names: str | None
) -> Shaped[Array, '*S']:
  """Constrains an activation, under a mesh and rules of logical axes."""
  _check(names)
  if len(names) != x.ndim:
    raise ConfigError('names', names, f'one per dimension of {x.shape}')
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or not nn.get_logical_axis_rules():
    return x
  spec: Any = nn.logical_to_mesh_axes(names)
  fitting = []
  for name, size, axis in zip(names, x.shape, spec, strict=True):
    divides = size % parts_of(axis, mesh) == 0
    fitting.append(name if divides else None)
    # Models are initialised with one row.
    if not divides and name != 'batch':
      parts = f'the {parts_of(axis, mesh)} parts along {axis}'
      text = f'{size} {name!r} of an activation are whole on every device: '
      warnings.warn(f'{text}{parts} do not divide them', stacklevel=2)
  return nn.with_logical_constraint(x, tuple(fitting))


def over_rows(
  function: Callable[..., Any], batch: Any, by_row: tuple[bool, ...]
) -> Callable[..., Any]:
  """Wraps a function that is independent per row in `jax.shard_map`.

  Otherwise XLA gathers the scores on every device to run top_k. Axis 0 of all
  results and of the arguments marked in `by_row` is the batch. The function
  itself if the mesh does not split the rows evenly.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = tuple(
    axis
    for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if axis in BATCH_AXES and kind != AxisType.Manual
  )
  count = parts_of(axes, mesh)
  if count == 1 or batch % count:
    return function
  rows = PartitionSpec(axes)
  return jax.shard_map(
    function,
    in_specs=tuple(rows if each else PartitionSpec() for each in by_row),
    out_specs=rows,
    axis_names=set(axes),
  )


def parts_of(axes: Any, mesh: Any) -> int:
  """Returns the number of parts that an entry of a PartitionSpec makes."""
  names = (axes,) if isinstance(axes, str) else axes or ()
  return math.prod(mesh.shape[name] for name in names)


def _check(names: tuple[str | None, ...]) -> None:
  for name in names:
    if name is not None and name not in LOGICAL_AXES:
      raise ConfigError('logical axis', name, f'one of {LOGICAL_AXES} or None')
