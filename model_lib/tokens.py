"""From images and symbols to the tokens of an encoder."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model_lib.layers import PatchEmbed
from model_lib.logical import constrain, partitioned
from model_lib.positions import LearnedPositions, sincos2d

POOLS = ('cls', 'gap')
POSITIONS = ('learned', 'sincos2d')


class ImageTokens(nn.Module):
  """Patches with positions, after a [CLS] token if the pool is 'cls'.

  Positions are added to the patches only: [CLS] is trainable itself. To load
  a checkpoint with a position for [CLS], add that to `cls`.

  Attributes:
    width: width of the tokens.
    patch_size: side of a patch in pixels.
    pool: 'cls' or 'gap'.
    positions: 'learned' or 'sincos2d' (fixed).
    dtype: compute dtype.
  """

  width: int
  patch_size: int
  pool: str = 'cls'
  positions: str = 'learned'
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, images: Float[Array, 'B H W E']) -> Float[Array, 'B L D']:
    """Turns images into tokens.

    Raises:
      ValueError: if `pool` or `positions` is unknown, or `patch_size` does
        not divide the image.
    """
    check_option('pool', self.pool, POOLS)
    check_option('positions', self.positions, POSITIONS)
    x = PatchEmbed(
      self.width, self.patch_size, dtype=self.dtype, name='patch_embed'
    )(images)
    if self.positions == 'learned':
      x = LearnedPositions(name='positions')(x)
    else:
      grid = [side // self.patch_size for side in images.shape[1:3]]
      fixed = sincos2d(grid[0], grid[1], self.width)
      x = x + fixed[None].astype(x.dtype)
    if self.pool == 'cls':
      token = class_token(self, x.shape[0], self.width)
      x = jnp.concatenate([token.astype(x.dtype), x], axis=1)
    return constrain(x, 'batch', 'length', 'embed')


class SymbolTokens(nn.Module):
  """Embedded symbols after a trainable [CLS] token.

  Attributes:
    width: width of the tokens.
    vocab_size: number of symbols.
    stddev: standard deviation of the embedding at initialisation.
    dtype: compute dtype.
  """

  width: int
  vocab_size: int = 3
  stddev: float = 0.02
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens: Int[Array, 'B N']) -> Float[Array, 'B L D']:
    """Embeds the symbols; one outside the vocabulary becomes NaN."""
    init = partitioned(nn.initializers.normal(self.stddev), None, 'embed')
    embedding = self.param('embedding', init, (self.vocab_size, self.width))
    x = jnp.take(embedding, tokens, axis=0, mode='fill')
    token = class_token(self, x.shape[0], self.width)
    x = jnp.concatenate([token, x], axis=1).astype(self.dtype)
    return constrain(x, 'batch', 'length', 'embed')


def class_token(module: nn.Module, batch: int, width: int) -> Array:
  """Declares the trainable [CLS] token; returns it `[B, 1, D]` for each row.

  It starts with standard deviation 0.02 and not at zero: LayerNorm of a zero
  vector has gradients of `1 / sqrt(epsilon)`.

  Args:
    module: the module that owns the parameter 'cls'.
    batch: number of rows.
    width: width of the tokens.
  """
  init = partitioned(nn.initializers.normal(0.02), None, None, 'embed')
  return jnp.tile(module.param('cls', init, (1, 1, width)), (batch, 1, 1))


def check_option(field: str, value: str, legal: tuple[str, ...]) -> None:
  """Raises ValueError, naming the field, if the value is not legal."""
  if value not in legal:
    raise ValueError(f'{field}: expected one of {legal}, got {value!r}')
