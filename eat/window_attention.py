"""Attention in a window, with a global [CLS] (EAT, section 3.2).

Every token attends to itself, its neighbours on both sides and [CLS]; [CLS]
attends to all. Positions are those after pruning. Two forms give the same
numbers: 'dense' masks the full score matrix, 'block' needs O(L k) memory.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from model_lib.attention import MASKED_SCORE, attend
from model_lib.local_attention import blocks

# From this length 'auto' computes in blocks. ms of dense / block on a CPU, 12
# heads of 64, k = 32:
#   tokens         128         160        512
#   batch 1  1.1 / 1.2   3.8 / 2.3   16 / 5.0
#   batch 8   8.9 / 12     53 / 48
BLOCK_FROM = 160
# Queries per block; 16, 64 and 128 were slower at 128 to 512 tokens.
_BLOCK = 32

Drop = Callable[[Any], Any]


def window_attend(
  query: Float[Array, 'B N L H'],
  key: Float[Array, 'B N L H'],
  value: Float[Array, 'B N L H'],
  valid: Bool[Array, 'B L'] | None = None,
  *,
  drop: Drop | None = None,
  received: bool = False,
  window: int,
  implementation: str = 'auto',
) -> tuple[Float[Array, 'B N L H'], Float[Array, 'B L'] | None]:
  """Computes `model_lib.attention.attend` within a window.

  Queries, keys and values are of the same tokens; queries without a valid key
  get zeros. `window` is the even width k: k / 2 neighbours on each side;
  `implementation` 'auto' is 'block' from `BLOCK_FROM` tokens. `drop` is called
  once; dropout masks differ between implementations.
  """
  batch, _, length, _ = query.shape
  if not _is_in_blocks(length, implementation):
    place = jnp.arange(length)
    mine, theirs = place[:, None], place[None]
    near = (jnp.abs(mine - theirs) <= window // 2) | (mine == 0) | (theirs == 0)
    near = jnp.broadcast_to(near[None], (batch, length, length))
    options: Any = dict(drop=drop, received=received, near=near)
    return attend(query, key, value, valid, **options)
  if valid is None:
    valid = jnp.ones((batch, length), bool)
  return _attend_in_blocks(query, key, value, valid, drop, received, window)


def window_scores(tokens: int, window: int, implementation: str) -> int:
  """Returns the number of scores per head, masked and padded ones included."""
  if not _is_in_blocks(tokens, implementation):
    return tokens**2
  half = window // 2
  size = max(_BLOCK, half)
  queries = -(-tokens // size) * size
  return queries * (1 + size + 2 * half) + tokens  # of [CLS]: all


def _is_in_blocks(length: Any, implementation: str) -> bool:
  return implementation == 'block' or (
    implementation == 'auto' and length >= BLOCK_FROM
  )


def _attend_in_blocks(query, key, value, valid, drop, received, window):
  """Attends from each block to [CLS], itself and half a window per side."""
  batch, heads, length, width = query.shape
  query = query * jnp.asarray(width**-0.5, query.dtype)
  # Weights of invalid keys are zero, but zero times NaN is not.
  value = jnp.where(valid[:, None, :, None], value, jnp.zeros_like(value))
  half = window // 2
  size = max(_BLOCK, half)
  queries = blocks(query, size)[:, :, 1:-1]
  can_read = _spans(valid[:, None, :, None], size, half)[..., 0]
  near = _in_window(queries.shape[2], size, half)[None, None]
  scores = _product('bnqih,bnqjh->bnqij', queries, _spans(key, size, half))
  band = _weights(scores, near & can_read[:, :, :, None])
  cls = _weights(_product('bnh,bnsh->bns', query[:, :, 0], key), valid[:, None])
  mean = _received_in_blocks(band, cls, valid, half) if received else None
  if drop is not None:
    band, cls = _drop_both(drop, band, cls)
  band, cls = band.astype(value.dtype), cls.astype(value.dtype)
  span = _spans(value, size, half)
  attended = jnp.einsum('bnqij,bnqjh->bnqih', band, span)
  attended = attended.reshape(batch, heads, -1, width)
  of_cls = jnp.einsum('bns,bnsh->bnh', cls, value)
  parts = of_cls[:, :, None], attended[:, :, 1:length]
  return jnp.concatenate(parts, axis=2), mean


def _product(equation: str, x: Array, y: Array) -> Array:
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _weights(
  scores: Float[Array, '*S K'], allowed: Bool[Array, '*A K']
) -> Float[Array, '*S K']:
  """Returns the softmax over the allowed keys; zero where there is none."""
  weights = jax.nn.softmax(jnp.where(allowed, scores, MASKED_SCORE), axis=-1)
  return jnp.where(allowed, weights, 0.0)


def _spans(
  x: Shaped[Array, 'B N L H'], size: int, half: int
) -> Shaped[Array, 'B N Q J H']:
  """Returns the span of each block: [CLS], `half + size + half` tokens."""
  cut = blocks(x, size)
  inner = cut[:, :, 1:-1]
  cls = jnp.broadcast_to(x[:, :, None, :1], (*inner.shape[:3], 1, x.shape[3]))
  before = cut[:, :, :-2, size - half :]
  after = cut[:, :, 2:, :half]
  return jnp.concatenate([cls, before, inner, after], axis=3)


def _in_window(count: int, size: int, half: int) -> Bool[Array, 'Q I J']:
  """Returns True for the slots in each query's window; [CLS] is slot 0."""
  block = jnp.arange(count)[:, None, None]
  query = jnp.arange(size)[None, :, None]
  slot = jnp.arange(1 + size + 2 * half)[None, None]
  offset = slot - 1 - half
  near = (jnp.abs(offset - query) <= half) & (block * size + offset != 0)
  return near & (slot > 0) | (slot == 0)


def _received_in_blocks(
  band: Float[Array, 'B N Q I J'],
  cls: Float[Array, 'B N L'],
  valid: Bool[Array, 'B L'],
  half: int,
) -> Float[Array, 'B L']:
  """Computes `model_lib.attention.mean_received` from the blocks."""
  batch, heads, count, size, _ = band.shape
  length = cls.shape[2]
  reads = valid & (jnp.arange(length)[None] > 0)
  reads = blocks(reads[:, None, :, None], size)[:, :, 1:-1]
  # Selected, not multiplied: an invalid query may hold NaN.
  received = jnp.where(reads, band, 0.0).sum(axis=(1, 3))
  to_cls, before, inner, after = jnp.split(
    received, (1, 1 + half, 1 + half + size), axis=2
  )
  empty = size - half
  before = jnp.pad(before[:, 1:], ((0, 0), (0, 1), (empty, 0)))
  after = jnp.pad(after[:, :-1], ((0, 0), (1, 0), (0, empty)))
  total = (before + inner + after).reshape(batch, count * size)[:, :length]
  total = total + jnp.where(valid[:, :1], cls.sum(1), 0.0)
  total = total.at[:, 0].add(to_cls.sum(axis=(1, 2)))
  queries = valid.astype(jnp.float32).sum(1, keepdims=True)
  return total / (heads * jnp.maximum(queries, 1.0))


def _drop_both(
  drop: Drop, band: Float[Array, 'B ...'], cls: Float[Array, 'B ...']
) -> tuple[Float[Array, 'B ...'], Float[Array, 'B ...']]:
  """Drops both in one call; two would repeat the random numbers."""
  flat = [weights.reshape(weights.shape[0], -1) for weights in (band, cls)]
  dropped = drop(jnp.concatenate(flat, axis=1))
  parts = jnp.split(dropped, (flat[0].shape[1],), axis=1)
  return parts[0].reshape(band.shape), parts[1].reshape(cls.shape)
