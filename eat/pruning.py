"""Token pruning and merging as pure functions (EAT, Algorithm 1).

The valid tokens of row b are its first `length[b]`, before and after pruning,
in their original order. The masked form keeps shapes, with the pruned tokens
after the kept ones; the gathered form is the same computation, cropped. Both
keep the same tokens. Merging follows ToMe (Bolya et al. 2023), but here the
pruned tokens are the merged ones.
"""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from core.errors import ConfigError
from model_lib.logical import partitioned_dense

# Ratios are multiples of 1e-4, so that counts are exact: in floats, 30 % of 10
# tokens would leave 8 because of rounding.
_RATIO_STEPS = 10_000
# Scores nearer than this share of one are equal: they differ by rounding, as
# the norms of LayerNorm without a scale, and by the back end.
_TIE = 2.0**-18
_SMALLEST_NORM = 1e-12
_PRECISION = jax.lax.Precision.HIGHEST


# Fields are Any because JAX builds these trees of other things than arrays.
class Tokens(NamedTuple):
  """The tokens that are not pruned."""

  x: Any  # states `[B, S, D]`; those after `length` are never read
  length: Any  # valid tokens of each row, int32 `[B]`; they come first
  positions: Any  # in the unpruned sequence, int32 `[B, S]`
  # Number of original tokens merged into each, float32 `[B, S]`; None before
  # the first merge.
  sizes: Any = None


def kept_count(
  length: Int[Array, ' B'], ratio: Float[Array, ''] | float, min_tokens: int = 1
) -> Int[Array, ' B']:
  """Returns the tokens that a row keeps, `1 + ceil((1 - p) (t - 1))`.

  Computed in integers, for t of at most 200,000. The share p of the tokens
  except [CLS] is rounded to 1e-4, clipped to [0, 1] and may be traced.
  """
  steps = jnp.round(jnp.asarray(ratio, jnp.float32) * _RATIO_STEPS)
  removed = jnp.clip(steps, 0, _RATIO_STEPS).astype(jnp.int32)
  parts = (_RATIO_STEPS - removed) * (length - 1)
  # Not //, which takes twelve operations more for negative numbers.
  others = jax.lax.div(parts + (_RATIO_STEPS - 1), jnp.int32(_RATIO_STEPS))
  return jnp.minimum(jnp.maximum(1 + others, min_tokens), length)


def static_size(length: int, ratio: float, min_tokens: int = 1) -> int:
  """Returns the length of the gathered form: `kept_count` of the longest row.

  Ratios that float32 may round either way (within 0.002 steps of the middle of
  two multiples of 1e-4) use the smaller removed count.
  """
  steps = math.ceil(ratio * _RATIO_STEPS - 0.502)
  removed = min(max(steps, 0), _RATIO_STEPS)
  others = -(-(_RATIO_STEPS - removed) * (length - 1) // _RATIO_STEPS)
  return min(max(1 + others, min_tokens), length)


def norm_scores(x: Float[Array, 'B S D']) -> Float[Array, 'B S']:
  """Returns the L2 norm of every token, float32, without gradient."""
  x = jax.lax.stop_gradient(x).astype(jnp.float32)
  return jnp.sqrt(jnp.square(x).sum(-1))


class TokenScorer(nn.Module):
  """A learned score of every token, trained through a straight-through gate.

  Forward: the identity. Backward: as `x * (1 + sigmoid(score))`. [CLS] is never
  pruned and has no gate.
  """

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B S D']
  ) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S']]:
    """Returns `x` with the gradient of the gates, and float32 scores."""
    score = partitioned_dense(1, 'embed', None, 'score')
    scores = score(x.astype(jnp.float32))[..., 0]
    gate = jax.nn.sigmoid(scores)
    gate = jnp.where(jnp.arange(x.shape[1])[None] > 0, gate, 0.0)
    factor = 1.0 + (gate - jax.lax.stop_gradient(gate))
    gated = (x.astype(jnp.float32) * factor[..., None]).astype(x.dtype)
    return gated, jax.lax.stop_gradient(scores)


def prune(
  tokens: Tokens,
  scores: Float[Array, 'B S'],
  ratio: Float[Array, ''] | float,
  size: Any,
  min_tokens: int = 1,
  merge: bool = False,
) -> Tokens:
  """Keeps [CLS] and the tokens of highest score of each row, in order.

  Differentiable in the states; the choice itself has no gradient. Tokens with
  NaN scores are kept, so that the NaN reaches the output. See `kept_count` and
  `merge_removed`.

  `size` tokens are returned, the most that a row keeps: S keeps shapes (masked
  form), `static_size(S, ratio, min_tokens)` crops them (gathered form). Slots
  after the kept tokens hold discarded ones.
  """
  if not 1 <= size <= tokens.x.shape[1]:
    expected = f'an integer in [1, {tokens.x.shape[1]}]'
    raise ConfigError('size', size, expected)
  length = jnp.minimum(kept_count(tokens.length, ratio, min_tokens), size)
  keep = best(scores, tokens.length, length)
  x, sizes = tokens.x, tokens.sizes
  if merge:
    x, sizes = merge_removed(x, sizes, tokens.length, keep)
  # One sort; the kept tokens come first, in order. Comparisons instead of the
  # sort are three times as slow.
  place = jnp.arange(keep.shape[1], dtype=jnp.int32)[None]
  order = jnp.sort(jnp.where(keep, place, place + keep.shape[1]), axis=1)
  source = jax.lax.rem(order, jnp.int32(keep.shape[1]))[:, :size]
  sizes = None if sizes is None else take(sizes, source)
  return Tokens(take(x, source), length, take(tokens.positions, source), sizes)


def best(
  scores: Float[Array, 'B S'], length: Int[Array, ' B'], count: Int[Array, ' B']
) -> Bool[Array, 'B S']:
  """Returns True for the `count` best of the first `length` tokens.

  [CLS] is always best; of tokens that `tied` makes equal, the earlier. The rank
  is the number of better tokens: O(S^2) comparisons, which the compiler fuses
  into one loop. A top_k or a second sort is faster from 512 tokens on, but XLA
  gathers it to every device if rows are sharded.
  """
  place = jnp.arange(scores.shape[1])
  scores = jax.lax.stop_gradient(scores)
  scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
  scores = jnp.where(place[None] < length[:, None], scores, -jnp.inf)
  scores = tied(jnp.where(place[None] == 0, jnp.inf, scores))
  mine, theirs = scores[:, :, None], scores[:, None, :]
  earlier = (place[None] < place[:, None])[None]
  ahead = (theirs > mine) | ((theirs == mine) & earlier)
  return ahead.sum(-1, dtype=jnp.int32) < count[:, None]


def tied(scores: Float[Array, 'B S']) -> Float[Array, 'B S']:
  """Raises scores that are equal but for rounding to the largest of them.

  A score is equal to the next larger one, and so to a chain of them, if they
  differ by at most 2^-18 of its size. Rounding to a grid would part equal
  scores at its borders.
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


def restore(
  full: Float[Array, 'B L D'], tokens: Tokens
) -> Float[Array, 'B L D']:
  """Writes the valid tokens to their original positions.

  Called before each pruning and at the end, repeated calls keep the last state
  of every pruned token, for token-level tasks.
  """
  slot = jnp.arange(tokens.x.shape[1], dtype=jnp.int32)[None]
  # Others get unique indices past the end, where the scatter drops them.
  places = jnp.where(
    slot < tokens.length[:, None], tokens.positions, full.shape[1] + slot
  )
  return jax.vmap(
    lambda row, where, states: row.at[where].set(
      states, mode='drop', unique_indices=True
    )
  )(full, places, tokens.x.astype(full.dtype))


def merge_removed(
  x: Float[Array, 'B S D'],
  sizes: Float[Array, 'B S'] | None,
  length: Int[Array, ' B'],
  keep: Bool[Array, 'B S'],
) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S']]:
  """Averages each removed token into its most similar kept one.

  The most similar one has the largest cosine; ties: the first. [CLS] is
  a candidate only where no other token is kept. The mean is weighted by
  `sizes` (None: one each) and computed in float32. Other tokens are unchanged,
  bit for bit, as are positions. `keep` includes [CLS].
  """
  place = jnp.arange(x.shape[1])
  valid = place[None] < length[:, None]
  if sizes is None:
    sizes = jnp.ones(x.shape[:2], jnp.float32)
  states = jnp.where(valid[..., None], x.astype(jnp.float32), 0.0)
  is_cls, others = place[None] == 0, keep & valid & (place[None] > 0)
  hosts = jnp.where(others.any(1, keepdims=True), others, is_cls)
  fixed = jax.lax.stop_gradient(states)
  norm = jnp.sqrt(jnp.square(fixed).sum(-1, keepdims=True))
  fixed = fixed / jnp.maximum(norm, _SMALLEST_NORM)
  cosine = jnp.einsum('brd,bkd->brk', fixed, fixed, precision=_PRECISION)
  target = jnp.where(hosts[:, None], cosine, -jnp.inf).argmax(-1)
  joins = (target[:, :, None] == place[None, None]) & (valid & ~keep)[..., None]
  weights = jnp.where(joins, sizes[:, :, None], 0.0)
  added = jnp.einsum('brk,brd->bkd', weights, states, precision=_PRECISION)
  total = sizes + weights.sum(1)
  mean = (states * sizes[..., None] + added) / total[..., None]
  joined = joins.any(1)
  merged = jnp.where(joined[..., None], mean.astype(x.dtype), x)
  return merged, jnp.where(joined, total, sizes)
