"""Attention in a window, with a global [CLS] (EAT, section 3.2).

Every token reads itself, its neighbours on both sides and [CLS]; [CLS] reads
all. Positions are those in the sequence as it is now, after pruning. Two
computations of the same numbers: 'dense' masks the full score matrix, 'block'
never makes one and needs O(L k).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from model_lib.attention import MASKED_SCORE, mean_received

IMPLEMENTATIONS = ('auto', 'block', 'dense')
# From this length on 'auto' computes in blocks. Measured on a CPU with two busy
# cores, 12 heads of 64, k = 32, in milliseconds dense / block at batch 1: 1.1 /
# 1.2 at 128 tokens, 3.8 / 2.3 at 160, 3.5 / 2.1 at 256, 16 / 5.0 at 512; with
# the gradient 4.5 / 3.5, 7.8 / 4.7, 20 / 6.3, 360 / 27. At batch 8, 128 tokens
# take 8.9 / 12, and 160 take 53 / 48.
BLOCK_FROM = 160
# Queries of a block: 16, 64 and 128 were slower at 128 to 512 tokens.
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
  """Scaled dot-product attention within a window; softmax in float32.

  Args:
    query: queries, heads before the length.
    key: keys of the same tokens.
    value: values.
    valid: which keys may be read; None for all. A query that may read none
      gets zeros.
    drop: dropout of the weights `[B, ...]`, called once; which weights fall
      depends on the implementation.
    received: whether to return what each token received.
    window: width k: k / 2 neighbours on each side.
    implementation: 'block', 'dense', or 'auto' for the faster by length: in
      blocks from `BLOCK_FROM` tokens on.

  Returns:
    (attended values, received); the latter as in `model_lib.attention.attend`.

  Raises:
    ValueError: if `window` or `implementation` is not legal.
  """
  if window < 2 or window % 2:
    raise ValueError(f'window: expected an even number >= 2, got {window}')
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f'implementation: expected one of {IMPLEMENTATIONS}, got '
      f'{implementation!r}'
    )
  length = query.shape[2]
  if valid is None:
    valid = jnp.ones((query.shape[0], length), bool)
  query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
  # Weights of what is not valid are zero, but zero times NaN is not.
  value = jnp.where(valid[:, None, :, None], value, jnp.zeros_like(value))
  in_blocks = _is_in_blocks(length, implementation)
  attend = _attend_in_blocks if in_blocks else _attend_densely
  return attend(query, key, value, valid, drop, received, window // 2)


def window_scores(tokens: int, window: int, implementation: str) -> int:
  """Scores of a row and head that `window_attend` computes.

  In blocks these are more than the window has: each block of queries reads
  its whole span, also what is masked, and the last block is padded.

  Args:
    tokens: of the row.
    window: width k, not 0.
    implementation: 'auto', 'block' or 'dense'.
  """
  if not _is_in_blocks(tokens, implementation):
    return tokens**2
  half = window // 2
  size = max(_BLOCK, half)
  queries = -(-tokens // size) * size
  return queries * (1 + size + 2 * half) + tokens  # of [CLS]: all


def _is_in_blocks(length: int, implementation: str) -> bool:
  return implementation == 'block' or (
    implementation == 'auto' and length >= BLOCK_FROM
  )


def _attend_densely(query, key, value, valid, drop, received, half):
  place = jnp.arange(query.shape[2])
  mine, theirs = place[:, None], place[None]
  near = (jnp.abs(mine - theirs) <= half) | (mine == 0) | (theirs == 0)
  weights = _weights(
    _product('bnlh,bnsh->bnls', query, key),
    (near[None] & valid[:, None, :])[:, None],
  )
  mean = mean_received(weights, valid) if received else None
  if drop is not None:
    weights = drop(weights)
  weights = weights.astype(value.dtype)
  return jnp.einsum('bnls,bnsh->bnlh', weights, value), mean


def _attend_in_blocks(query, key, value, valid, drop, received, half):
  """Each block of queries reads [CLS], half a window, itself, half a window."""
  batch, heads, length, width = query.shape
  size = max(_BLOCK, half)
  queries = _blocks(query, size)[:, :, 1:-1]
  can_read = _spans(valid[:, None, :, None], size, half)[..., 0]
  band = _weights(
    _product('bnqih,bnqjh->bnqij', queries, _spans(key, size, half)),
    _in_window(queries.shape[2], size, half)[None, None]
    & can_read[:, :, :, None],
  )
  cls = _weights(_product('bnh,bnsh->bns', query[:, :, 0], key), valid[:, None])
  mean = _received_in_blocks(band, cls, valid, half) if received else None
  if drop is not None:
    band, cls = _drop_both(drop, band, cls)
  attended = jnp.einsum(
    'bnqij,bnqjh->bnqih', band.astype(value.dtype), _spans(value, size, half)
  ).reshape(batch, heads, -1, width)
  of_cls = jnp.einsum('bns,bnsh->bnh', cls.astype(value.dtype), value)
  attended = jnp.concatenate(
    [of_cls[:, :, None], attended[:, :, 1:length]], axis=2
  )
  return attended, mean


def _product(equation: str, x: Array, y: Array) -> Array:
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _weights(
  scores: Float[Array, '*S K'], allowed: Bool[Array, '*A K']
) -> Float[Array, '*S K']:
  """Softmax over the allowed keys; zero where there is none."""
  weights = jax.nn.softmax(jnp.where(allowed, scores, MASKED_SCORE), axis=-1)
  return jnp.where(allowed, weights, 0.0)


def _blocks(
  x: Shaped[Array, 'B N L H'], size: int
) -> Shaped[Array, 'B N Q I H']:
  """Cuts the length into blocks of `size`, with an empty one at each end."""
  batch, heads, length, width = x.shape
  behind = -length % size + size
  padded = jnp.pad(x, ((0, 0), (0, 0), (size, behind), (0, 0)))
  return padded.reshape(batch, heads, -1, size, width)


def _spans(
  x: Shaped[Array, 'B N L H'], size: int, half: int
) -> Shaped[Array, 'B N Q J H']:
  """What each block may read: [CLS], then `half + size + half` neighbours."""
  blocks = _blocks(x, size)
  inner = blocks[:, :, 1:-1]
  cls = jnp.broadcast_to(x[:, :, None, :1], (*inner.shape[:3], 1, x.shape[3]))
  before = blocks[:, :, :-2, size - half :]
  after = blocks[:, :, 2:, :half]
  return jnp.concatenate([cls, before, inner, after], axis=3)


def _in_window(count: int, size: int, half: int) -> Bool[Array, 'Q I J']:
  """Which slots of its span each query reads; [CLS] only through the first."""
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
  """What each token received; see `model_lib.attention.mean_received`."""
  batch, heads, count, size, _ = band.shape
  length = cls.shape[2]
  reads = valid & (jnp.arange(length)[None] > 0)
  reads = _blocks(reads[:, None, :, None], size)[:, :, 1:-1]
  # Selected and not multiplied: a query that is not valid may hold NaN.
  given = jnp.where(reads, band, 0.0).sum(axis=(1, 3))
  to_cls, before, inner, after = jnp.split(
    given, (1, 1 + half, 1 + half + size), axis=2
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
  """One call for both: two would repeat the same random numbers."""
  flat = [weights.reshape(weights.shape[0], -1) for weights in (band, cls)]
  dropped = drop(jnp.concatenate(flat, axis=1))
  parts = jnp.split(dropped, (flat[0].shape[1],), axis=1)
  return parts[0].reshape(band.shape), parts[1].reshape(cls.shape)
