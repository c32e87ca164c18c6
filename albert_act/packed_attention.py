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
from model_lib.attention import MASKED_SCORE

# Shares of the length that the queries of a row may take in attention, which
# is a small part of the work.
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)


def places_for(rows: int, length: int, least: int, most: int) -> list[int]:
  """How many queries of a row attention may compute, with so many in all rows.

  Args:
    rows: of a batch.
    length: tokens of a row.
    least: tokens that run in all rows, at least.
    most: at most.
  """
  most = min(length, most)
  if rows == 1:
    return [most]
  mean = -(-least // rows)  # the row with the most has no fewer
  shares = {max(1, round(share * length)) for share in SHARES}
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
    values: of all tokens; zero for those that are not valid.
    valid: which tokens may be attended to.
    least: no fewer tokens than this run.

  Returns:
    A function of queries `[1, N, M, H]`; other arguments are not read.
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

  def attend(query: Array, *_: Any, **__: Any) -> tuple[Array, None]:
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

  There are half as many numbers to divide then and one pass less over the
  weights: on a CPU a quarter of the time of attention over 64 places and more.

  Args:
    query: queries, heads before the length.
    keys: keys.
    values: zero where not valid, so that a row without a valid token gets zero.
    valid: which keys may be read.
  """
  scale = jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
  scores = jnp.einsum(
    'bnah,bnlh->bnal',
    query * scale,
    keys,
    preferred_element_type=jnp.float32,
  )
  scores = jnp.where(valid[:, None, None, :], scores, MASKED_SCORE)
  weights = jnp.exp(scores - scores.max(-1, keepdims=True))
  out = jnp.einsum('bnal,bnlh->bnah', weights.astype(values.dtype), values)
  total = weights.sum(-1, keepdims=True)
  return (out.astype(jnp.float32) / total).astype(values.dtype)
