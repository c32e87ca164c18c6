"""The running tokens of a batch, packed behind each other, and back."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model_lib import halting


@dataclasses.dataclass(frozen=True)
class Packed:
  """Where the running tokens of a batch stand behind each other.

  Attributes:
    running: which tokens run, `[B, L]`.
    index: number of each packed token among all, int32 `[M]`; behind the last
      running one stand numbers of no token.
  """

  running: Bool[Array, 'B L']
  index: Int[Array, ' M']

  @classmethod
  def of(cls, running: Bool[Array, 'B L'], size: int) -> 'Packed':
    """Packs up to `size` tokens, in the order of the rows.

    With room for all of them each stays where it is, running or not.
    """
    places = jnp.arange(size, dtype=jnp.int32)
    if size == running.size:
      return cls(running, places)
    count = jnp.cumsum(running.reshape(-1), dtype=jnp.int32)
    # The m-th running token is the first up to which there are m.
    index = jnp.searchsorted(count, places + 1).astype(jnp.int32)
    # Numbers of no token differ, too, for `unpack`.
    index = jnp.where(places < count[-1], index, running.size + places)
    return cls(running, index)

  @property
  def whole(self) -> bool:
    """Whether there is room for all tokens: nothing has to move then."""
    return self.index.size == self.running.size

  @property
  def row(self) -> Int[Array, ' M']:
    """The row of each packed token; the last one for those of no token."""
    rows, length = self.running.shape
    return jnp.minimum(self.index // length, rows - 1)

  def pack(self, leaf: Array) -> Array:
    """`[B, L, ...]` to `[M, ...]`."""
    flat = leaf.reshape(-1, *leaf.shape[2:])
    if self.whole:
      return flat
    return jnp.take(flat, self.index, axis=0, mode='clip')

  def unpack(self, packed: Array, old: Array) -> Array:
    """`[M, ...]` to `[B, L, ...]`; tokens that do not run keep the old."""
    if self.whole:
      running = halting.align(self.running, old)
      return jnp.where(running, packed.reshape(old.shape), old)
    flat = old.reshape(-1, *old.shape[2:])
    new = flat.at[self.index].set(packed, mode='drop', unique_indices=True)
    return new.reshape(old.shape)

  def unpack_heads(
    self, packed: Float[Array, 'N M H'], old: Float[Array, 'B N L H']
  ) -> Float[Array, 'B N L H']:
    """Keys or values to the rows; tokens that do not run keep the old."""
    by_token = packed.transpose(1, 0, 2)
    rows, heads, length, features = old.shape
    if self.whole:
      new = by_token.reshape(rows, length, heads, features)
      running = self.running[:, None, :, None]
      return jnp.where(running, new.transpose(0, 2, 1, 3), old)
    row, column = self.index // length, self.index % length
    place = old.at[row, :, column]
    return place.set(by_token, mode='drop', unique_indices=True)
