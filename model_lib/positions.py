"""Position embeddings: learned, and fixed sines and cosines."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from model_lib.logical import partitioned

MAX_PERIOD = 10_000.0


class LearnedPositions(nn.Module):
  """A trainable vector for each position, standard deviation 0.02."""

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    """Adds the embedding; `L` is fixed by the first call."""
    init = partitioned(nn.initializers.normal(0.02), None, 'length', 'embed')
    embedding = self.param('embedding', init, (1, *x.shape[1:]))
    return x + embedding.astype(x.dtype)


def sincos1d(
  positions: Float[Array, ' L'] | Float[np.ndarray, ' L'], width: int
) -> Float[Array, 'L D']:
  """Sines, then cosines, of positions ("Attention is all you need", 3.5).

  Args:
    positions: positions or step numbers.
    width: width D of the embedding; even, and at least 4.

  Raises:
    ValueError: if the width is odd or below 4.
  """
  if width % 2 or width < 4:
    raise ValueError(
      f'width: expected an even number of at least 4 for sine positions, got '
      f'{width}'
    )
  exponents = np.arange(width // 2) / (width // 2 - 1)
  frequencies = (MAX_PERIOD**-exponents).astype(np.float32)
  angles = jnp.asarray(positions)[:, None] * frequencies[None, :]
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


def sincos2d(height: int, width_tokens: int, width: int) -> Float[Array, 'L D']:
  """Sines and cosines of the row and of the column of each patch.

  Args:
    height: rows of patches.
    width_tokens: columns of patches; patches are numbered row by row.
    width: width D of the embedding; a multiple of 4, and at least 8.

  Raises:
    ValueError: if the width is not such a multiple.
  """
  if width % 4:
    raise ValueError(
      f'width: expected a multiple of 4 for positions in two dimensions, got '
      f'{width}'
    )
  rows, columns = np.mgrid[:height, :width_tokens].astype(np.float32)
  halves = [sincos1d(axis.reshape(-1), width // 2) for axis in (columns, rows)]
  return jnp.concatenate(halves, axis=1)
