"""Attention within a distance, in blocks of queries.

Valid tokens are in the order of their positions, so that tokens whose positions
are at most `reach` apart are at most `reach` places apart, also after pruning.
Each block of `reach` tokens reads itself and its two neighbours.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Bool, Float, Int, Shaped

Implementation = Literal['auto', 'block', 'dense']


def blocks(x: Shaped[Array, '*B L H'], size: Any) -> Shaped[Array, '*B Q I H']:
  """Cuts the length into blocks of `size`, padded by one at each end."""
  *outer, length, width = x.shape
  count = (length + size - 1) // size
  ends = (0, 0), (size, count * size - length + size), (0, 0)
  padded = jnp.pad(x, [(0, 0)] * (len(outer) - 1) + [*ends])
  return padded.reshape(*outer, count + 2, size, width)


@dataclasses.dataclass(frozen=True)
class Local:
  """Tokens that attend to those whose positions are at most `reach` apart.

  `implementation` 'dense' masks the scores of all pairs, 'block' computes those
  of blocks; 'auto' is 'block' from four blocks on, and for a symbolic length.
  """

  positions: Int[Array, 'B S']
  reach: int
  implementation: Implementation = 'auto'

  def arranged(
    self,
    query: Float[Array, 'B L D'],
    key: Float[Array, 'B S D'],
    value: Float[Array, 'B S D'],
    valid: Bool[Array, 'B S'] | None,
    whole_rows: bool = False,
  ) -> tuple[Any, ...]:
    """Returns queries, keys, values, and which keys are valid and read.

    The masks are `[B, S]` and `[B, L, S]`. In blocks, unless `whole_rows` are
    needed or only the leading tokens are queries, each of Q blocks is a row:
    `[B*Q, I, D]`, keys and values `[B*Q, 3*I, D]`, and masks of these.
    """
    batch, length, _ = query.shape
    if (
      whole_rows
      or length != key.shape[1]
      or not _is_in_blocks(length, self.reach, self.implementation)
    ):
      near = self._near(self.positions[:, :length], self.positions)
      return query, key, value, valid, near
    size = jax.core.min_dim(max(self.reach, 1), length)
    if valid is None:
      valid = jnp.ones((batch, length), bool)

    def cut(x: Any, *places: int) -> Any:
      """Joins for each block those at `places` from its left neighbour."""
      padded = blocks(x, size)
      count = padded.shape[1] - 2
      parts = [
        jax.lax.slice_in_dim(padded, place, place + count, axis=1)
        for place in places
      ]
      joined = jnp.concatenate(parts, axis=2)
      return joined.reshape(batch * count, *joined.shape[2:])

    def center(x: Any) -> Any:
      return cut(x, 1)

    def read(x: Any) -> Any:
      return cut(x, 0, 1, 2)

    places = self.positions[..., None]
    near = self._near(center(places)[..., 0], read(places)[..., 0])
    masks = read(valid[..., None])[..., 0], near
    return center(query), read(key), read(value), *masks

  def _near(self, mine: Any, theirs: Any) -> Any:
    return jnp.abs(mine[:, :, None] - theirs[:, None]) <= self.reach


def local_scores(tokens: int, reach: int, implementation: str) -> int:
  """Returns the number of scores per head, masked and padded ones included."""
  if not _is_in_blocks(tokens, reach, implementation):
    return tokens**2
  size = min(max(reach, 1), tokens)
  return -(-tokens // size) * 3 * size**2


def _is_in_blocks(length: Any, reach: int, implementation: str) -> bool:
  if implementation != 'auto':
    return implementation == 'block'
  return export.is_symbolic_dim(length) or length > 3 * reach
