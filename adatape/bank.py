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
  axes = None, 'embed'
  return partitioned_dense(bank.width, *axes, 'projection', dtype=bank.dtype)
