"""The Vision Transformer and a plain Transformer on symbol sequences.

ViT (Dosovitskiy et al. 2021) with pre-LN blocks. Every model is called as
`model(inputs, row_keys) -> (logits, out)`; `out['features']` is the input of
the head, float32 as the logits. `row_keys` (one per row) turn dropout on.
"""

from typing import Annotated, Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Ge, Interval
from jaxtyping import Array, Bool, Float, Int, Key, Num

from model_lib import flops, row_random, sizes
from model_lib.layers import EncoderBlock, LayerNorm, build, pool_and_classify
from model_lib.sizes import Rate, Size
from model_lib.tokens import ImageTokens, LearnedPositions, SymbolTokens


class Encoder(nn.Module):
  """A stack of encoder blocks and the norm after them; fields as in `ViT`."""

  depth: int
  num_heads: int
  mlp_dim: int
  dropout: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    mask: Bool[Array, 'B L'] | Num[Array, 'B L'] | None = None,
    row_keys: Key[Array, ' B'] | None = None,
  ) -> Float[Array, 'B L D']:
    """Encodes the tokens; keys with mask 0 are never read."""
    for index in range(self.depth):
      name = f'block_{index}'
      keys = row_keys
      if keys is not None:
        keys = row_random.fold_rows(keys, name)
      x = build(EncoderBlock, self, name=name)(x, mask, keys)
    return LayerNorm(name='norm', dtype=self.dtype)(x)


class ViT(nn.Module):
  """The Vision Transformer."""

  num_classes: int
  variant: str = ''  # sizes that are None, as 'B/16'
  width: Size = None
  depth: Size = None  # number of blocks
  mlp_dim: Size = None  # hidden width of the feed-forward networks
  num_heads: Size = None
  patch_size: Size = None  # in pixels
  pool: Literal['cls', 'gap'] = 'cls'  # [CLS], or the mean of all patches
  positions: Literal['learned', 'sincos2d'] = 'learned'
  dropout: Rate = 0.0  # in the blocks
  dtype: Any = jnp.float32  # of the computation

  def __post_init__(self):
    sizes.VIT.complete(self)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    images: Float[Array, 'B H W E'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies images."""
    x = build(ImageTokens, self, name='tokens')(images)
    x = build(Encoder, self, name='encoder')(x, None, row_keys)
    logits, features = pool_and_classify(x, self.pool, self.num_classes)
    return logits, {'features': features}

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one image `[H, W, E]` forward; see `flops`."""
    tokens = flops.num_patches(input_shape, self.patch_size)
    tokens += self.pool == 'cls'
    return (
      flops.patch_embed(input_shape, self.patch_size, self.width)
      + self.depth * flops.block(tokens, self.width, self.mlp_dim)
      + flops.dense(1, self.width, self.num_classes)
    )


class TokenTransformer(nn.Module):
  """A plain Transformer on symbol sequences, for parity."""

  num_classes: int
  depth: Annotated[int, Interval(ge=1, le=1000)]
  width: Annotated[int, Interval(ge=1, le=2**17)]
  mlp_dim: Annotated[int, Interval(ge=1, le=2**20)]
  num_heads: Annotated[int, Interval(ge=1, le=1024)]
  vocab_size: Annotated[int, Ge(1)] = 3  # number of symbols
  dropout: Rate = 0.0
  dtype: Any = jnp.float32

  def __post_init__(self):
    sizes.check_heads(self)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B N'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies sequences by their [CLS] token."""
    x = build(SymbolTokens, self, name='tokens')(tokens)
    x = LearnedPositions(name='positions')(x)
    x = build(Encoder, self, name='encoder')(x, None, row_keys)
    logits, features = pool_and_classify(x, 'cls', self.num_classes)
    return logits, {'features': features}

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one sequence `[N]` forward; see `flops`."""
    block = flops.block(input_shape[0] + 1, self.width, self.mlp_dim)
    return self.depth * block + flops.dense(1, self.width, self.num_classes)
