"""Tape banks: where the tape tokens come from (AdaTape, section 2.2).

A bank returns tokens `[C, H]` for all rows, or `[B, C, H]` per row.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model_lib.layers import build
from model_lib.logical import constrain, partitioned, partitioned_dense
from model_lib.vit import LearnedPositions, PatchEmbed


class LearnableBank(nn.Module):
  """A set of trainable vectors: each row reads some of the parameters."""

  size: int
  width: int

  @nn.compact
  def __call__(self) -> Float[Array, 'C H']:
    """Returns the tokens in float32."""
    init = partitioned(nn.initializers.truncated_normal(0.02), 'bank', 'embed')
    return self.param('tokens', init, (self.size, self.width))


class ImageBank(nn.Module):
  """Finer patches of the image: `Z = h2(h1(X_p) + E_pos)` (appendix A.2)."""

  width: int
  patch_size: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, images: Float[Array, 'B Y X E']) -> Float[Array, 'B C H']:
    """Returns one token per patch, in row-major order."""
    x = build(PatchEmbed, self, name='patch_embed')(images)
    x = LearnedPositions(name='positions')(x)
    return constrain(_projection(self)(x), 'batch', 'length', 'embed')


class SymbolBank(nn.Module):
  """Embedded symbols without positions: equal symbols are equal tokens."""

  width: int
  vocab_size: int = 3
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, symbols: Int[Array, 'B C']) -> Float[Array, 'B C H']:
    """Returns one token per symbol."""
    one_hot = jax.nn.one_hot(symbols, self.vocab_size, dtype=self.dtype)
    return _projection(self)(one_hot)


def _projection(bank: Any) -> nn.Dense:
  return partitioned_dense(
    bank.width, None, 'embed', 'projection', dtype=bank.dtype
  )


class SharedNorm(nn.Module):
  """The LayerNorm that bank and query share, in float32 (section 2.4)."""

  initial_scale: float = 1.0  # initial scores are proportional to scale ** 2
  epsilon: float = 1e-6  # added to the variance

  @nn.compact
  def __call__(
    self, tokens: Float[Array, '*S H'], count: int
  ) -> Float[Array, '*S h']:
    """Returns the leading `count` features of the normalised tokens.

    Mean and variance are of all features.
    """
    width, init = tokens.shape[-1:], nn.initializers
    start = partitioned(init.constant(self.initial_scale), 'embed')
    scale = self.param('scale', start, width)
    bias = self.param('bias', partitioned(init.zeros, 'embed'), width)
    tokens = tokens.astype(jnp.float32)
    mean = tokens.mean(-1, keepdims=True)
    # The mean square minus the squared mean is rounding where that is large.
    variance = jnp.square(tokens - mean).mean(-1, keepdims=True)
    shape = (1,) * (tokens.ndim - 1) + (count,)
    factor = scale[:count].reshape(shape)
    centred = tokens[..., :count] - mean
    normed = centred * jax.lax.rsqrt(variance + self.epsilon) * factor
    return normed + bias[:count].reshape(shape)
