"""Trained positions of patches, resized bilinearly to another image size.

Corners are aligned, without antialiasing, as in vit_jax and big_vision.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float

from core.errors import ConfigError

Sides = tuple[int, int]  # height and width, of which only the ratio matters
SQUARE = (1, 1)
_EMBEDDING = 'positions/embedding'


def grid(count: int, image: Sides) -> Sides | None:
  """Returns rows and columns of square patches, None if they do not fit."""
  patch = math.sqrt(image[0] * image[1] / max(count, 1))
  rows, columns = (round(side / patch) for side in image)
  return (rows, columns) if rows * columns == count else None


def resize(
  found: Mapping[str, Any], fresh: Mapping[str, Any], old: Sides, new: Sides
) -> dict[str, Any]:
  """Returns the parameters `found`, with positions as in the model `fresh`.

  Both are by path. Positions are of patches if an embedding of patches is in
  the same module; `old` and `new` are sides of the images.
  """
  resized = dict(found)
  for name in {*found} & {*fresh}:
    module = name.removesuffix(_EMBEDDING)
    if module == name or f'{module}patch_embed/projection/kernel' not in fresh:
      continue
    counts = [tree[name].shape[1] for tree in (found, fresh)]
    grids = [*map(grid, counts, (old, new))]
    if None in grids and counts[0] != counts[1]:
      given = f'{counts[0]} for {counts[1]} patches'
      expected = f'grids of images of the sides {old} and {new}'
      raise ConfigError(name, given, expected)
    if grids[0] != grids[1]:
      logging.warning('%s: resized from %s to %s patches', name, *grids)
      resized[name] = _zoom(np.asarray(found[name]), *grids)
  return resized


def _zoom(
  positions: Float[np.ndarray, '1 L D'], old: Any, new: Any
) -> Float[np.ndarray, '1 K D']:
  import scipy.ndimage  # slow to import

  by = *np.divide(new, old), 1
  # 'nearest' differs from vit_jax only if rounding leaves the grid.
  rows = positions.reshape(*old, -1)
  rows = scipy.ndimage.zoom(rows, by, order=1, mode='nearest')
  return rows.reshape(1, new[0] * new[1], -1)
