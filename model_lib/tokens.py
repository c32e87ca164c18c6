"""Fewer tokens: prune, merge, compact and restore them, as pure functions.

The valid tokens of row b are its first `length[b]`, before and after pruning,
in their original order. The masked form keeps shapes, with the pruned tokens
after the kept ones; the gathered form is cropped, and keeps the same tokens
(EAT, Algorithm 1). Merging follows ToMe (Bolya et al. 2023): `merge_pairs` is
theirs, `merge_removed` merges the pruned tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Predicate
from jaxtyping import Array, Bool, Float, Int, Shaped

from core.errors import ConfigError

# Ratios are multiples of 1e-4, so that counts are exact: in floats, 30 % of 10
# tokens would leave 8 because of rounding.
_RATIO_STEPS = 10_000
# Scores nearer than this share of one are equal: they differ by rounding.
_TIE = 2.0**-18
_SMALLEST_NORM = 1e-12
_PRECISION = jax.lax.Precision.HIGHEST

Layers = Annotated[Sequence[int], 'a tuple of ascending layers, from 1']
Ratios = Annotated[
  Sequence[float],
  Predicate(lambda ratios: all(0.0 <= ratio < 1.0 for ratio in ratios)),
  'a tuple of shares in [0, 1)',
]


# Fields are Any because JAX builds these trees of other things than arrays.
class Tokens(NamedTuple):
  """The tokens that are not pruned."""

  x: Any  # states `[B, S, D]`; those after `length` are never read
  length: Any  # valid tokens of each row, int32 `[B]`; they come first
  positions: Any  # in the unpruned sequence, int32 `[B, S]`
  # Original tokens merged into each, float32 `[B, S]`; None before any merge.
  sizes: Any = None


def whole(x: Float[Array, 'B S D'], length: Int[Array, ' B']) -> Tokens:
  """Returns tokens of which none is pruned."""
  places = jnp.arange(x.shape[1], dtype=jnp.int32)
  return Tokens(x, length, jnp.broadcast_to(places[None], x.shape[:2]))


def kept_count(
  length: Int[Array, ' B'],
  ratio: Float[Array, ''] | float,
  min_tokens: int = 1,
  first: int = 1,
) -> Int[Array, ' B']:
  """Returns the tokens that a row keeps, `1 + ceil((1 - p) (t - 1))`.

  Computed in integers, for t of at most 200,000, with the share p rounded to
  1e-4 and clipped to [0, 1]. `first` is 0 for rows without [CLS].
  """
  steps = jnp.round(jnp.asarray(ratio, jnp.float32) * _RATIO_STEPS)
  removed = jnp.clip(steps, 0, _RATIO_STEPS).astype(jnp.int32)
  parts = (_RATIO_STEPS - removed) * (length - first)
  # Not //, which takes twelve operations more for negative numbers.
  kept = jax.lax.div(parts + (_RATIO_STEPS - 1), jnp.int32(_RATIO_STEPS))
  return jnp.minimum(jnp.maximum(first + kept, min_tokens), length)


def static_size(
  length: int, ratio: float, min_tokens: int = 1, first: int = 1
) -> int:
  """Returns the length of the gathered form: `kept_count` of the longest row.

  Ratios that float32 may round either way use the smaller removed count.
  """
  steps = math.ceil(ratio * _RATIO_STEPS - 0.502)
  removed = min(max(steps, 0), _RATIO_STEPS)
  kept = -(-(_RATIO_STEPS - removed) * (length - first) // _RATIO_STEPS)
  return min(max(first + kept, min_tokens), length)


def norm_scores(x: Float[Array, 'B S D']) -> Float[Array, 'B S']:
  """Returns the L2 norm of every token, float32, without gradient."""
  x = jax.lax.stop_gradient(x).astype(jnp.float32)
  return jnp.sqrt(jnp.square(x).sum(-1))


def prune(
  tokens: Tokens,
  scores: Float[Array, 'B S'],
  ratio: Float[Array, ''] | float,
  size: Any,
  min_tokens: int = 1,
  merge: bool = False,
  first: int = 1,
) -> Tokens:
  """Keeps [CLS] and the tokens of highest score of each row, in order.

  Differentiable in the states, not in the choice. Tokens with NaN scores are
  kept, so that the NaN reaches the output. See `kept_count`, `merge_removed`.

  `size` tokens are returned, the most that a row keeps: S (masked form) or
  `static_size(S, ratio, min_tokens)` (gathered form). Slots after the kept
  tokens hold discarded ones.
  """
  count = kept_count(tokens.length, ratio, min_tokens, first)
  length = jnp.minimum(count, size)
  keep = best(scores, tokens.length, length, first)
  x, sizes = tokens.x, tokens.sizes
  if merge:
    x, sizes = merge_removed(x, sizes, tokens.length, keep)
  source = kept_first(keep, size)
  sizes = None if sizes is None else take(sizes, source)
  return Tokens(take(x, source), length, take(tokens.positions, source), sizes)


def kept_first(keep: Bool[Array, 'B S'], size: Any) -> Int[Array, 'B K']:
  """Returns `size` places of each row: the kept ones first, each in order."""
  # One sort. Comparisons instead of it are three times as slow.
  place = jnp.arange(keep.shape[1], dtype=jnp.int32)[None]
  order = jnp.sort(jnp.where(keep, place, place + keep.shape[1]), axis=1)
  return jax.lax.rem(order, jnp.int32(keep.shape[1]))[:, :size]


def best(
  scores: Float[Array, 'B S'],
  length: Int[Array, ' B'],
  count: Int[Array, ' B'],
  first: int = 1,
) -> Bool[Array, 'B S']:
  """Returns True for the `count` best of the first `length` tokens.

  The `first` ones are always best, as [CLS]; of tokens that `tied` makes equal,
  the earlier. The rank is the number of better tokens, O(S^2) comparisons in
  one fused loop. A top_k is faster from 512 tokens on, but XLA gathers it to
  every device if rows are sharded.
  """
  place = jnp.arange(scores.shape[1])
  scores = jax.lax.stop_gradient(scores)
  scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
  scores = jnp.where(place[None] < length[:, None], scores, -jnp.inf)
  scores = tied(jnp.where(place[None] < first, jnp.inf, scores))
  mine, theirs = scores[:, :, None], scores[:, None, :]
  earlier = (place[None] < place[:, None])[None]
  ahead = (theirs > mine) | ((theirs == mine) & earlier)
  return ahead.sum(-1, dtype=jnp.int32) < count[:, None]


def tied(scores: Float[Array, 'B S']) -> Float[Array, 'B S']:
  """Raises scores that are equal but for rounding to the largest of them.

  Scores are equal, also in a chain, that differ by at most 2^-18 of their size.
  Rounding to a grid would part equal scores at its borders.
  """
  mine, theirs = scores[:, :, None], scores[:, None, :]
  above = -jnp.where(theirs > mine, -theirs, -jnp.inf).max(-1)
  size = jnp.abs(scores)
  joined = (above - scores <= _TIE * size) & (size < jnp.inf)
  first = (theirs >= mine) & ~joined[:, None, :]
  return -jnp.where(first, -theirs, -jnp.inf).max(-1)


def take(
  values: Shaped[Array, 'B S *D'], source: Int[Array, 'B K']
) -> Shaped[Array, 'B K *D']:
  """Returns `values[b, source[b, k]]`; sources are distinct in a row."""
  return jax.vmap(
    lambda row, places: row.at[places].get(
      mode='promise_in_bounds',
      unique_indices=True,
      wrap_negative_indices=False,
    )
  )(values, source)


def put(
  values: Shaped[Array, 'B S *D'],
  places: Int[Array, 'B K'],
  new: Shaped[Array, 'B K *D'],
) -> Shaped[Array, 'B S *D']:
  """Writes `new[b, k]` to the distinct `values[b, places[b, k]]`, if inside."""
  return jax.vmap(
    lambda row, where, states: row.at[where].set(
      states, mode='drop', unique_indices=True
    )
  )(values, places, new)


def restore(
  full: Float[Array, 'B L D'], tokens: Tokens
) -> Float[Array, 'B L D']:
  """Writes the valid tokens to their original positions.

  Before each pruning and at the end: `full` has the last state of every token.
  """
  slot = jnp.arange(tokens.x.shape[1], dtype=jnp.int32)[None]
  # Others get unique indices past the end, where the scatter drops them.
  places = jnp.where(
    slot < tokens.length[:, None], tokens.positions, full.shape[1] + slot
  )
  return put(full, places, tokens.x.astype(full.dtype))


def merge_removed(
  x: Float[Array, 'B S D'],
  sizes: Float[Array, 'B S'] | None,
  length: Int[Array, ' B'],
  keep: Bool[Array, 'B S'],
) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S']]:
  """Averages each removed token into its most similar kept one.

  That has the largest cosine; [CLS] is a candidate only where no other token is
  kept. The mean is weighted by `sizes` (None: one each), in float32. Other
  tokens are unchanged, bit for bit. `keep` includes [CLS].
  """
  place = jnp.arange(x.shape[1])
  valid = place[None] < length[:, None]
  if sizes is None:
    sizes = jnp.ones(x.shape[:2], jnp.float32)
  states = jnp.where(valid[..., None], x.astype(jnp.float32), 0.0)
  is_cls, kept = place[None] == 0, keep & valid & (place[None] > 0)
  hosts = jnp.where(kept.any(1, keepdims=True), kept, is_cls)
  fixed = _unit(states)
  cosine = jnp.einsum('brd,bkd->brk', fixed, fixed, precision=_PRECISION)
  target = jnp.where(hosts[:, None], cosine, -jnp.inf).argmax(-1)
  joins = (target[:, :, None] == place[None, None]) & (valid & ~keep)[..., None]
  mean, total = _averaged(states, sizes, joins, states, sizes)
  joined = joins.any(1)
  merged = jnp.where(joined[..., None], mean.astype(x.dtype), x)
  return merged, jnp.where(joined, total, sizes)


def merge_pairs(
  tokens: Tokens, metric: Float[Array, 'B S H'], count: int, first: int = 1
) -> Tokens:
  """Merges `count` tokens of every row into others (ToMe, section 3).

  All tokens are valid. Those at even places, but the `first` (0 or 1), are
  merged into the one at an odd place whose `metric` has the largest cosine, the
  most similar first. The rest of the even places comes first, then the odd.
  """
  here, there = (metric[:, n::2].astype(jnp.float32) for n in (0, 1))
  count = merged_count(metric.shape[1], count, first)
  batch, even = here.shape[:2]
  ones = jnp.ones(metric.shape[:2], jnp.float32)
  sizes = ones if tokens.sizes is None else tokens.sizes
  cosine = jnp.einsum(
    'brd,bkd->brk', _unit(here), _unit(there), precision=_PRECISION
  )
  target, near = cosine.argmax(-1), cosine.max(-1)
  lengths = jnp.full((batch,), even, jnp.int32)
  keep = best(-near, lengths, lengths - count, first)
  joins = target[:, :, None] == jnp.arange(there.shape[1])[None, None]
  joins = joins & ~keep[..., None]
  states = tokens.x.astype(jnp.float32)
  mean, total = _averaged(
    states[:, ::2], sizes[:, ::2], joins, states[:, 1::2], sizes[:, 1::2]
  )
  source = kept_first(keep, even - count)

  def joined(every: Any, odd: Any) -> Any:
    return jnp.concatenate([take(every[:, ::2], source), odd], axis=1)

  return Tokens(
    joined(tokens.x, mean.astype(tokens.x.dtype)),
    tokens.length - count,
    joined(tokens.positions, tokens.positions[:, 1::2]),
    joined(sizes, total),
  )


def merged_count(length: int, count: int, first: int = 1) -> int:
  """Returns how many of `length` tokens `merge_pairs` merges."""
  return min(count, (length - first) // 2)


def _unit(x: Float[Array, 'B S D']) -> Float[Array, 'B S D']:
  """Returns vectors of length 1, without gradient."""
  fixed = jax.lax.stop_gradient(x)
  norm = jnp.sqrt(jnp.square(fixed).sum(-1, keepdims=True))
  return fixed / jnp.maximum(norm, _SMALLEST_NORM)


def _averaged(x, sizes, joins, hosts, host_sizes) -> tuple[Array, Array]:
  """Returns means of hosts and the tokens that join them, and their sizes."""
  weights = jnp.where(joins, sizes[:, :, None], 0.0)
  added = jnp.einsum('brk,brd->bkd', weights, x, precision=_PRECISION)
  total = host_sizes + weights.sum(1)
  return (hosts * host_sizes[..., None] + added) / total[..., None], total


def compacted(
  block: Callable[..., Any],
  x: Float[Array, 'B L D'],
  running: Bool[Array, 'B L'],
) -> Float[Array, 'B L D']:
  """Applies a block to the running tokens; the others keep their states.

  They are gathered into a quarter of the length, two, three, or all.
  """
  length = x.shape[1]

  def masked(x: Any, running: Any) -> Any:
    return jnp.where(running[..., None], block(x, running), x)

  def branch(size: int) -> Callable[[Any, Any], Any]:
    def gathered(x: Any, running: Any) -> Any:
      order = kept_first(running, size)
      return put(x, order, masked(take(x, order), take(running, order)))

    if not size:
      return lambda x, running: x
    return gathered if size < length else masked

  sizes = sorted({-(-length * quarter // 4) for quarter in range(5)})
  longest = running.sum(1).max()
  index = (longest > jnp.asarray(sizes)).sum()
  return jax.lax.switch(index, [branch(size) for size in sizes], x, running)


def check_layers(field: str, layers: Sequence[int], depth: int) -> None:
  """Raises ConfigError unless the layers ascend within [1, depth]."""
  if list(layers) != [n for n in range(1, depth + 1) if n in layers]:
    expected = f'ascending layers in [1, {depth}]'
    raise ConfigError(field, tuple(layers), expected)


def check_ratios(ratios: Sequence[float], layers: Sequence[int]) -> None:
  """Raises ConfigError unless there is a ratio for each layer."""
  if len(ratios) != len(layers):
    expected = f'a share in [0, 1) for each of prune_layers={tuple(layers)}'
    raise ConfigError('prune_ratios', tuple(ratios), expected)
