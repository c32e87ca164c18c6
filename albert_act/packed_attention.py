"""Attention of packed tokens, each to all tokens of its own row.

Only here do the packed tokens stand in rows: padded to the fewest places that
the row with the most of them needs, one of a few static numbers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from albert_act.packed import Packed
from model_lib.attention import masked_scores

# Shares of the length that the queries of a row may take: few, as attention is
# a small part of the work.
PLACES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)


def places_for(rows: int, length: int, least: int, most: int) -> list[int]:
  """The numbers of queries that attention may compute for each row, ascending.

  Args:
    rows: of a batch.
    length: tokens of a row.
    least: tokens that run in all rows together, at least.
    most: at most; a row may have all of them.
  """
  most = min(length, most)
  if rows == 1:
    return [most]
  mean = -(-least // rows)  # the row with the most has no fewer
  shares = {max(1, round(share * length)) for share in PLACES}
  return sorted({most} | {places for places in shares if mean <= places < most})


def attention_to(
  packed: Packed,
  keys: Float[Array, 'B N L H'],
  values: Float[Array, 'B N L H'],
  valid: Bool[Array, 'B L'],
  least: int,
) -> Callable[..., tuple[Float[Array, '1 N M H'], None]]:
  """Attention of packed tokens, for `MultiHeadAttention.attend`.

  Args:
    packed: which tokens attend.
    keys: of all tokens.
    values: of all tokens; zero for those that are not valid, which may hold
      anything in the states.
    valid: which tokens may be attended to.
    least: no fewer tokens than this run.

  Returns:
    A function of the queries of M packed tokens, which does not read the keys
    and values that it is given. It raises ValueError for dropout, and if asked
    for what each token received.
  """
  rows, length = packed.running.shape
  heads, _, features = keys.shape[1:]
  count = packed.running.sum(1, dtype=jnp.int32)
  first = jnp.cumsum(count) - count

  def attended(spread: Array) -> Array:
    """`[N, B * A, H]` for queries `[N, B, A, H]`."""
    out = weighted_values(spread.transpose(1, 0, 2, 3), keys, values, valid)
    return out.transpose(1, 0, 2, 3).reshape(heads, -1, features)

  def whole(query: Array) -> Array:
    return attended(query.reshape(heads, rows, length, features))[None]

  def with_places(places: int, query: Array) -> Array:
    numbers = first[:, None] + jnp.arange(places, dtype=jnp.int32)[None]
    flat = attended(jnp.take(query[0], numbers, axis=1, mode='clip'))
    place = jnp.arange(query.shape[2], dtype=jnp.int32) - first[packed.row]
    where = packed.row * places + jnp.clip(place, 0, places - 1)
    return jnp.take(flat, where, axis=1, mode='clip')[None]

  def attend(
    query: Array,
    key: Any = None,
    value: Any = None,
    valid: Any = None,
    *,
    drop: Any = None,
    received: bool = False,
  ) -> tuple[Array, None]:
    del key, value, valid
    if drop is not None or received:
      raise ValueError(
        'drop, received: expected none for packed tokens, got '
        f'{drop} and {received}'
      )
    if packed.whole:
      return whole(query), None
    options = places_for(rows, length, least, query.shape[2])
    if len(options) == 1:
      return with_places(options[0], query), None
    branches = [functools.partial(with_places, places) for places in options]
    chosen = jnp.searchsorted(jnp.asarray(options), count.max())
    return jax.lax.switch(chosen, branches, query), None

  return attend


def weighted_values(
  query: Float[Array, 'B N A H'],
  keys: Float[Array, 'B N L H'],
  values: Float[Array, 'B N L H'],
  valid: Bool[Array, 'B L'],
) -> Float[Array, 'B N A H']:
  """`model_lib.attention.attend`, divided by the sum of the weights at the end.

  For a query H numbers are divided then instead of L, with one pass less over
  the weights; docs/measured.md has what that saves on a CPU.

  Args:
    query: queries, heads before the length.
    keys: keys.
    values: zero where not valid: a weight of 0 does not take out a NaN.
    valid: which keys may be read.
  """
  scores = masked_scores(query, keys, valid)
  weights = jnp.exp(scores - scores.max(-1, keepdims=True))
  out = jnp.einsum(
    'bnal,bnlh->bnah',
    weights.astype(values.dtype),
    values,
    preferred_element_type=jnp.float32,
  )
  return (out / weights.sum(-1, keepdims=True)).astype(values.dtype)
