"""Logical axis names of parameters and activations, checked when used.

A misspelt name would silently be replicated, and a dimension that the mesh
does not divide would raise deep inside the compiler; both are handled here,
once, for every model.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Shaped

AXES = (
  'batch',
  'length',
  'embed',
  'mlp',
  'heads',
  'kv',
  'bank',
  'classes',
  'patch',
)


def partitioned(
  initializer: Callable[..., Any], *names: str | None
) -> Callable[..., Any]:
  """An initializer whose result carries the logical names of its axes.

  Args:
    initializer: a Flax initializer `(key, shape, dtype) -> array`.
    *names: one of `AXES`, or None, for every dimension.

  Raises:
    ValueError: if a name is not in `AXES`.
  """
  _check(names)
  return nn.with_logical_partitioning(initializer, names)


def constrain(
  x: Shaped[Array, '*S'], *names: str | None
) -> Shaped[Array, '*S']:
  """Constrains the layout of an activation under `jax.set_mesh`.

  Without logical axis rules or without a mesh it returns `x` as it is. A
  dimension that the mesh does not divide stays whole: one row at
  initialisation, or three heads on two devices.

  Args:
    x: the activation.
    *names: one of `AXES`, or None, for every dimension of `x`.

  Raises:
    ValueError: if a name is not in `AXES`, or their number is not the rank.
  """
  _check(names)
  if len(names) != x.ndim:
    raise ValueError(
      f'names: expected one per dimension of {x.shape}, got {names}'
    )
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or not nn.get_logical_axis_rules():
    return x
  spec: Any = nn.logical_to_mesh_axes(names)
  fitting = [
    name if size % _parts(axis, mesh) == 0 else None
    for name, size, axis in zip(names, x.shape, spec, strict=True)
  ]
  return nn.with_logical_constraint(x, tuple(fitting))


def _parts(axis: Any, mesh: Any) -> int:
  parts = 1
  for name in (axis,) if isinstance(axis, str) else (axis or ()):
    parts *= mesh.shape[name]
  return parts


def _check(names: tuple[str | None, ...]) -> None:
  for name in names:
    if name is not None and name not in AXES:
      raise ValueError(
        f'logical axis: expected one of {AXES} or None, got {name!r}'
      )
