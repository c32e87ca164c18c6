"""Multi-head self-attention with a key mask.

Queries, keys and values have a 2-D kernel each, as in published checkpoints.
Heads precede the length (BHTD), which is 1.2-1.3 times as fast on a CPU.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from model_lib import row_random
from model_lib.local_attention import Local
from model_lib.logical import constrain, partitioned_dense
from model_lib.row_random import RowKeys

# Finite: without a valid key the softmax is uniform, its gradient without NaN.
MASKED_SCORE = -1e30

# Keys and values of all heads.
KeysValues = tuple[Float[Array, 'B S D'], Float[Array, 'B S D']]


def attend(
  query: Float[Array, 'B N L H'],
  key: Float[Array, 'B N S H'],
  value: Float[Array, 'B N S H'],
  valid: Bool[Array, 'B S'] | None = None,
  *,
  drop: Callable[[Any], Any] | None = None,
  received: bool | Literal['cls'] = False,
  sizes: Float[Array, 'B S'] | None = None,
  near: Bool[Array, 'B L S'] | None = None,
) -> tuple[Float[Array, 'B N L H'], Float[Array, 'B S'] | None]:
  """Computes scaled dot-product attention with the softmax in float32.

  Only valid keys are read, by each query those `near` it; `drop` is dropout of
  the weights. If `received`, the second result is `mean_received` of the
  weights before dropout, with 'cls' of the query [CLS] only. A key of size s
  counts as s equal ones (proportional attention; Bolya et al. 2023, section 3).
  """
  scores = masked_scores(query, key, valid, near)
  if sizes is not None:
    scores = scores + jnp.log(sizes)[:, None, None, :]
  if valid is not None:
    # Without a valid key the softmax is uniform; zero values then give a zero
    # result, and keep NaN of masked tokens out of every result.
    value = jnp.where(valid[:, None, :, None], value, jnp.zeros_like(value))
  weights = jax.nn.softmax(scores, axis=-1)
  mean = None
  if received == 'cls':
    mean = weights[:, :, 0].mean(1)
  elif received:
    mean = mean_received(weights, valid)
  if drop is not None:
    weights = drop(weights)
  return jnp.einsum('bnls,bnsh->bnlh', weights.astype(value.dtype), value), mean


def masked_scores(
  query: Float[Array, 'B N L H'],
  key: Float[Array, 'B N S H'],
  valid: Bool[Array, 'B S'] | None = None,
  near: Bool[Array, 'B L S'] | None = None,
) -> Float[Array, 'B N L S']:
  """Returns scaled scores, float32 at least; `MASKED_SCORE` of masked keys."""
  scale = jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
  kind = wide(query.dtype)
  scores = jnp.einsum(
    'bnlh,bnsh->bnls', query * scale, key, preferred_element_type=kind
  )
  masks = [] if valid is None else [valid[:, None, None, :]]
  masks += [] if near is None else [near[:, None]]
  if not masks:
    return scores
  mask = functools.reduce(jnp.logical_and, masks)
  return jnp.where(mask, scores, MASKED_SCORE)


def wide(dtype: Any) -> Any:
  """Returns float32, or float64 of float64."""
  return jnp.float64 if dtype == jnp.float64 else jnp.float32


def mean_received(
  weights: Float[Array, 'B N L S'], valid: Bool[Array, 'B S'] | None = None
) -> Float[Array, 'B S']:
  """Averages the weights on each key over heads and valid queries.

  PoWER-BERT (Goyal et al. 2020, section 3.2) sums them. Zero without a token.
  """
  if valid is None:
    return weights.mean(axis=(1, 2))
  # Selected, not multiplied: an invalid query may hold NaN.
  total = jnp.where(valid[:, :, None], weights.mean(axis=1), 0.0).sum(axis=1)
  count = valid.astype(jnp.float32).sum(axis=1)
  return total / jnp.maximum(count, 1.0)[:, None]


def split_heads(x: Float[Array, 'B L D'], heads: int) -> Any:
  """Returns the features of each head, `[B, N, L, H]`."""
  batch, length, width = x.shape
  return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def join_heads(x: Float[Array, 'B N L H']) -> Any:
  """Returns the features of all heads, `[B, L, D]`."""
  batch, heads, length, features = x.shape
  return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * features)


class Attended(NamedTuple):
  """The output of attention, or of a block with it."""

  x: Any  # tokens [B, Q, D]
  received: Any  # `mean_received` [B, L] float32, None unless asked for
  keys_values: Any  # for a later call


class MultiHeadAttention(nn.Module):
  """Self-attention ("Attention is all you need", section 3.2)."""

  num_heads: int
  attend: Callable[..., Any] = attend
  dropout: float = 0.0  # of the attention weights
  # Of queries and of keys `[B, L, D]`, such as by their positions.
  rotate: Callable[[Any], Any] | None = None
  local: Local | None = None  # the keys that a query reads; None: all
  use_bias: bool = True
  kernel_init: Callable[..., Any] = nn.initializers.xavier_uniform()
  dtype: Any = jnp.float32  # of the matrix products; the softmax is float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    mask: Bool[Array, 'B S'] | Num[Array, 'B S'] | None = None,
    row_keys: RowKeys = None,
    received: bool | Literal['cls'] = False,
    num_queries: int | None = None,
    keys_values: KeysValues | None = None,
  ) -> Attended:
    """Attends from every token to the valid ones.

    Args:
      x: tokens; with `keys_values`, the queries.
      mask: non-zero for a valid key. A row without one has zeros before the
        output projection.
      row_keys: one key per row turns dropout on.
      received: see `attend`.
      num_queries: only the leading tokens attend.
      keys_values: of an earlier call; computed from `x` if None.
    """
    width = x.shape[-1]
    project = functools.partial(
      partitioned_dense, kernel_init=self.kernel_init, dtype=self.dtype,
      use_bias=self.use_bias,
    )  # fmt: skip
    rotate = self.rotate or (lambda x: x)
    queries = x if num_queries is None else x[:, :num_queries]
    query = rotate(project(width, 'embed', 'heads', 'query')(queries))
    if keys_values is None:
      key = rotate(project(width, 'embed', 'heads', 'key')(x))
      keys_values = key, project(width, 'embed', 'heads', 'value')(x)
    key, value = keys_values
    valid = None if mask is None else mask.astype(bool)
    drop = None
    if row_keys is not None and self.dropout:
      drop = functools.partial(
        row_random.drop, rate=self.dropout, row_keys=row_keys, use='weights'
      )
    options: Any = dict(drop=drop, received=received)
    batch, length, _ = query.shape
    if self.local is not None:
      # Dropout of a row, and sums over the queries of a key, need whole rows.
      whole_rows = received or drop is not None
      query, key, value, valid, options['near'] = self.local.arranged(
        query, key, value, valid, bool(whole_rows)
      )
    heads = map(self._split, (query, key, value))
    attended, mean = self.attend(*heads, valid, **options)
    joined = join_heads(attended)
    if query.shape[:2] != (batch, length):
      joined = joined.reshape(batch, -1, width)[:, :length]
    out = project(width, 'heads', 'embed', 'out')(joined)
    out = constrain(out, 'batch', 'length', 'embed')
    return Attended(out, mean, keys_values)

  def _split(self, x: Float[Array, 'B L D']) -> Float[Array, 'B N L H']:
    heads = split_heads(x, self.num_heads)
    return constrain(heads, 'batch', 'heads', 'length', 'kv')
