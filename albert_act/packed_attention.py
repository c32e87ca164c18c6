"""Running tokens of a batch packed into one axis, and their attention.

Only for attention they are unpacked into rows, padded to one of a few static
numbers of queries.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from halting import loop
from model_lib.attention import attend, split_heads

# Queries of a row as shares of the length: few sizes, as attention is a small
# part of the work.
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)


@dataclasses.dataclass(frozen=True)
class Packed:
  """The indices of the running tokens of a batch."""

  running: Bool[Array, 'B L']
  # Indices into the B * L tokens, padded with unique out-of-range indices.
  index: Int[Array, ' M']

  @classmethod
  def of(cls, running: Bool[Array, 'B L'], size: int) -> 'Packed':
    """Packs up to `size` tokens in order; B * L keeps all of them in place."""
    places = jnp.arange(size, dtype=jnp.int32)
    if size == running.size:
      return cls(running, places)
    count = jnp.cumsum(running.reshape(-1), dtype=jnp.int32)
    # The m-th running token: first index where the cumulative count is m.
    index = jnp.searchsorted(count, places + 1).astype(jnp.int32)
    # Unique past the end too, for the scatter of `unpack`.
    index = jnp.where(places < count[-1], index, running.size + places)
    return cls(running, index)

  @property
  def whole(self) -> bool:
    """True if all tokens are packed, in place."""
    return self.index.size == self.running.size

  @property
  def row(self) -> Int[Array, ' M']:
    """The row of each packed token; of padding the last row."""
    rows, length = self.running.shape
    return jnp.minimum(self.index // length, rows - 1)

  @property
  def first(self) -> Int[Array, ' M']:
    """The place of the first packed token of each one's row."""
    if self.whole:
      return self.row * self.running.shape[1]
    count = self.running.sum(1, dtype=jnp.int32)
    return (jnp.cumsum(count) - count)[self.row]

  def pack(self, leaf: Array) -> Array:
    """Gathers `[M, ...]` from `[B, L, ...]`."""
    flat = leaf.reshape(-1, *leaf.shape[2:])
    if self.whole:
      return flat
    return jnp.take(flat, self.index, axis=0, mode='clip')

  def unpack(self, packed: Array, old: Array) -> Array:
    """Scatters `[M, ...]` into `[B, L, ...]`; halted tokens keep `old`."""
    if self.whole:
      running = loop.align(self.running, old)
      return jnp.where(running, packed.reshape(old.shape), old)
    flat = old.reshape(-1, *old.shape[2:])
    new = flat.at[self.index].set(packed, mode='drop', unique_indices=True)
    return new.reshape(old.shape)


def query_sizes(rows: int, length: int, least: int, most: int) -> list[int]:
  """Returns the static numbers of queries of a row, ascending.

  `least` to `most` tokens run in all rows in total; one row may have all.
  """
  most = min(length, most)
  if rows == 1:
    return [most]
  mean = -(-least // rows)  # the row with the most has no fewer
  sizes = {max(1, round(share * length)) for share in SHARES}
  return sorted({most} | {size for size in sizes if mean <= size < most})


@dataclasses.dataclass(frozen=True, eq=False)
class PackedAttention:
  """Attention of packed tokens to their rows: `MultiHeadAttention.attend`."""

  packed: Packed  # the tokens that attend
  keys: Any  # of all tokens, `[B, L, D]`
  values: Any
  valid: Any  # True for tokens that are attended to, `[B, L]`
  least: int  # least number of running tokens

  def __call__(
    self, query: Float[Array, '1 N M H'], *unused: Any, **options: Any
  ) -> tuple[Float[Array, '1 N M H'], None]:
    """Attends to the fields' keys, without dropout and `received`."""
    rows, length = self.packed.running.shape
    if self.packed.whole:
      heads, features = query.shape[1], query.shape[3]
      by_row = query.reshape(heads, rows, length, features)
      return self._attend(by_row)[None], None
    sizes = query_sizes(rows, length, self.least, query.shape[2])
    count = self.packed.running.sum(1, dtype=jnp.int32)
    first = jnp.cumsum(count) - count
    if len(sizes) == 1:
      return self._attend_in_rows(sizes[0], query, first), None
    branches = [functools.partial(self._attend_in_rows, size) for size in sizes]
    chosen = jnp.searchsorted(jnp.asarray(sizes), count.max())
    return jax.lax.switch(chosen, branches, query, first), None

  def _attend_in_rows(self, size: int, query: Array, first: Array) -> Array:
    """Unpacks the queries into rows of `size` places, attends, and packs."""
    places = jnp.arange(size, dtype=jnp.int32)
    numbers = first[:, None] + places[None]
    flat = self._attend(jnp.take(query[0], numbers, axis=1, mode='clip'))
    row = self.packed.row
    place = jnp.arange(query.shape[2], dtype=jnp.int32) - first[row]
    where = row * size + jnp.clip(place, 0, size - 1)
    return jnp.take(flat, where, axis=1, mode='clip')[None]

  def _attend(self, query: Array) -> Array:
    """Returns `[N, B * A, H]` for queries `[N, B, A, H]`."""
    heads, features = query.shape[0], query.shape[-1]
    by_row = query.transpose(1, 0, 2, 3)
    keys, values = (split_heads(x, heads) for x in (self.keys, self.values))
    out, _ = attend(by_row, keys, values, self.valid)
    return out.transpose(1, 0, 2, 3).reshape(heads, -1, features)
