"""Tape banks: where the tape tokens come from (AdaTape, section 2.2).

A bank returns tokens `[C, H]` for all rows, or `[B, C, H]` per row. The reading
normalises them with the LayerNorm that it shares with the query.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
    x = PatchEmbed(
      self.width, self.patch_size, dtype=self.dtype, name='patch_embed'
    )(images)
    x = LearnedPositions(name='positions')(x)
    project = partitioned_dense(
      self.width, None, 'embed', 'projection', dtype=self.dtype
    )
    return constrain(project(x), 'batch', 'length', 'embed')


class SymbolBank(nn.Module):
  """Embedded symbols without positions: equal symbols are equal tokens."""

  width: int
  vocab_size: int = 3
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, symbols: Int[Array, 'B C']) -> Float[Array, 'B C H']:
    """Returns one token per symbol."""
    one_hot = jax.nn.one_hot(symbols, self.vocab_size, dtype=self.dtype)
    project = partitioned_dense(
      self.width, None, 'embed', 'projection', dtype=self.dtype
    )
    return project(one_hot)


class SharedNorm(nn.Module):
  """The LayerNorm that bank and query share, in float32 (section 2.4)."""

  initial_scale: float = 1.0  # initial scores are proportional to scale ** 2
  epsilon: float = 1e-6  # added to the variance

  @nn.compact
  def __call__(
    self, tokens: Float[Array, '*S H'], count: int
  ) -> Float[Array, '*S h']:
    """Returns the leading `count` features of the normalised tokens.

    Mean and variance are of all features. Two passes: the mean of the squares
    minus the squared mean is rounding where the mean is large.
    """
    width = tokens.shape[-1]
    scale_init = nn.initializers.constant(self.initial_scale)
    scale = self.param('scale', partitioned(scale_init, 'embed'), (width,))
    bias_init = nn.initializers.zeros
    bias = self.param('bias', partitioned(bias_init, 'embed'), (width,))
    tokens = tokens.astype(jnp.float32)
    mean = tokens.mean(-1, keepdims=True)
    variance = jnp.square(tokens - mean).mean(-1, keepdims=True)
    shape = (1,) * (tokens.ndim - 1) + (count,)
    factor = scale[:count].reshape(shape)
    centred = tokens[..., :count] - mean
    normed = centred * jax.lax.rsqrt(variance + self.epsilon) * factor
    return normed + bias[:count].reshape(shape)
