"""Blocks of a looped model: attention or mixing of cells, and a gated MLP.

The block of TRM (Jolicoeur-Martineau 2025, arXiv 2510.04871) and HRM: no
biases, a norm without weights, SwiGLU, rotary positions.
"""

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model_lib import attention
from model_lib.attention import attend, join_heads, split_heads
from model_lib.logical import constrain, partitioned_dense

EPSILON = 1e-5
THETA = 10_000.0  # of rotary positions (Su et al. 2021)

dense = functools.partial(partitioned_dense, use_bias=False)


def rms_norm(x: Float[Array, '*S D']) -> Float[Array, '*S D']:
  """Divides by the root mean square, in float32 at least."""
  wide = x.astype(attention.wide(x.dtype))
  mean = jnp.square(wide).mean(-1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean + EPSILON)).astype(x.dtype)


def rotate(x: Float[Array, 'B N L H']) -> Float[Array, 'B N L H']:
  """Turns the two halves of the features by angles of the position."""
  length, size = x.shape[2:]
  rates = THETA ** -(jnp.arange(0, size, 2) / size)
  angles = jnp.tile(jnp.outer(jnp.arange(length), rates), 2)
  cosine, sine = (
    f(angles).astype(x.dtype)[None, None] for f in (jnp.cos, jnp.sin)
  )
  first, second = jnp.split(x, 2, axis=-1)
  return x * cosine + jnp.concatenate([-second, first], axis=-1) * sine


def swiglu_width(width: int) -> int:
  """Returns 8/3 of a width, rounded up to a multiple of 256, or 16 below 96."""
  hidden = round(4 * width * 2 / 3)
  multiple = 256 if width >= 96 else 16
  return -(-hidden // multiple) * multiple


class SwiGlu(nn.Module):
  """`down(silu(gate) * up)`, Shazeer 2020; gate and up are one matrix."""

  hidden: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B D']:
    """Applies the network to the last axis."""
    width = x.shape[-1]
    both = dense(2 * self.hidden, 'embed', 'mlp', 'gate_up', dtype=self.dtype)
    gate, up = jnp.split(both(x), 2, axis=-1)
    down = dense(width, 'mlp', 'embed', 'down', dtype=self.dtype)
    return down(jax.nn.silu(gate) * up)


class Attention(nn.Module):
  """Self-attention of all cells; queries, keys and values by one matrix."""

  num_heads: int
  is_rotary: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    """Attends from every cell to every cell."""
    width = x.shape[-1]
    joined = dense(3 * width, 'embed', 'heads', 'qkv', dtype=self.dtype)(x)
    parts = jnp.split(joined, 3, axis=-1)
    query, key, value = (split_heads(part, self.num_heads) for part in parts)
    if self.is_rotary:
      query, key = rotate(query), rotate(key)
    mixed, _ = attend(query, key, value)
    out = dense(width, 'heads', 'embed', 'out', dtype=self.dtype)
    return out(join_heads(mixed))


class Block(nn.Module):
  """Mixes the cells, then the features of each; both residual."""

  num_heads: int
  mlp_dim: int
  mix: Literal['attention', 'cells']
  norm: Literal['post', 'pre']
  is_rotary: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    """Applies the block; after the norm 'post' the mean square is 1."""
    if self.mix == 'attention':
      mix = Attention(self.num_heads, self.is_rotary, self.dtype, name='mix')
      x = self._add(x, mix)
    else:  # the norm, too, is over the cells
      over_cells = SwiGlu(swiglu_width(x.shape[1]), self.dtype, name='mix')
      x = self._add(x.swapaxes(1, 2), over_cells).swapaxes(1, 2)
    x = self._add(x, SwiGlu(self.mlp_dim, self.dtype, name='mlp'))
    return constrain(x, 'batch', 'length', 'embed')

  def _add(self, x: Any, layer: Any) -> Any:
    if self.norm == 'pre':
      return x + layer(rms_norm(x))
    return rms_norm(x + layer(x))
