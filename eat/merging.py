"""Merging of removed tokens into kept ones (after ToMe, Bolya et al. 2023).

ToMe matches two halves of the sequence; here the pruning has decided who goes,
and each of these joins the kept token that is most similar to it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_SMALLEST_NORM = 1e-12
_PRECISION = jax.lax.Precision.HIGHEST


def merge_removed(
  x: Float[Array, 'B S D'],
  sizes: Float[Array, 'B S'] | None,
  length: Int[Array, ' B'],
  keep: Bool[Array, 'B S'],
) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S']]:
  """Averages each removed token into its most similar kept one.

  Similar is by cosine; of equally similar ones the first. [CLS] takes part
  only where no other token is kept. The mean weighs each token by how many
  original ones it stands for. A token that nothing joins stays as it is, bit
  for bit.

  Args:
    x: states.
    sizes: original tokens that each stands for; None for one each.
    length: valid tokens of each row, which come first.
    keep: which tokens stay, [CLS] among them.

  Returns:
    States, and how many tokens each stands for now, both at the same places
    as before; removed tokens are unchanged. Computed in float32.
  """
  place = jnp.arange(x.shape[1])
  valid = place[None] < length[:, None]
  if sizes is None:
    sizes = jnp.ones(x.shape[:2], jnp.float32)
  states = jnp.where(valid[..., None], x.astype(jnp.float32), 0.0)
  target = most_similar(states, hosts(keep & valid))
  joins = (target[:, :, None] == place[None, None]) & (valid & ~keep)[..., None]
  weights = jnp.where(joins, sizes[:, :, None], 0.0)
  added = jnp.einsum('brk,brd->bkd', weights, states, precision=_PRECISION)
  total = sizes + weights.sum(1)
  mean = (states * sizes[..., None] + added) / total[..., None]
  joined = joins.any(1)
  merged = jnp.where(joined[..., None], mean.astype(x.dtype), x)
  return merged, jnp.where(joined, total, sizes)


def hosts(keep: Bool[Array, 'B S']) -> Bool[Array, 'B S']:
  """The kept tokens but [CLS]; [CLS] where it is the only one."""
  is_cls = jnp.arange(keep.shape[1])[None] == 0
  others = keep & ~is_cls
  return jnp.where(others.any(1, keepdims=True), others, is_cls)


def most_similar(
  x: Float[Array, 'B S D'], candidates: Bool[Array, 'B S']
) -> Int[Array, 'B S']:
  """The candidate with the largest cosine to each token; no gradient."""
  x = jax.lax.stop_gradient(x)
  norm = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
  x = x / jnp.maximum(norm, _SMALLEST_NORM)
  cosine = jnp.einsum('brd,bkd->brk', x, x, precision=_PRECISION)
  cosine = jnp.where(candidates[:, None], cosine, -jnp.inf)
  return cosine.argmax(-1).astype(jnp.int32)
