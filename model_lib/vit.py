"""The Vision Transformer and a plain Transformer on symbol sequences.

ViT (Dosovitskiy et al. 2021) with pre-LN blocks. Every model is called as
`model(inputs, row_keys) -> (logits, out)`; `out['features']` is what the head
reads. `row_keys` (one key per row) turn dropout on.
"""

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from model_lib import flops, row_random
from model_lib.layers import EncoderBlock, LayerNorm, classifier, masked_mean
from model_lib.logical import constrain
from model_lib.positions import LearnedPositions
from model_lib.sizes import sizes_of_variant
from model_lib.tokens import ImageTokens, SymbolTokens


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of a ViT; `patch_size` in pixels."""

  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  patch_size: int


# Table 1 of the ViT paper; Ti from DeiT (AdaTape's Table 3 prints a width of
# 196, which 3 heads do not divide).
VARIANTS = {
  'Ti': {'width': 192, 'depth': 12, 'mlp_dim': 768, 'num_heads': 3},
  'S': {'width': 384, 'depth': 12, 'mlp_dim': 1536, 'num_heads': 6},
  'B': {'width': 768, 'depth': 12, 'mlp_dim': 3072, 'num_heads': 12},
  'L': {'width': 1024, 'depth': 24, 'mlp_dim': 4096, 'num_heads': 16},
}


def decode_variant(variant: str) -> dict[str, int]:
  """Reads 'B/16': the sizes of B with patches of 16 x 16 pixels.

  Returns:
    The fields of `Sizes`; without '/16' there is no 'patch_size'.

  Raises:
    ValueError: if the variant is unknown or the patch size not a positive
      number.
  """
  match = re.fullmatch(r'([^/]+)(?:/([1-9][0-9]*))?', variant)
  if match is None or match[1] not in VARIANTS:
    raise ValueError(
      f'variant: expected one of {list(VARIANTS)} with a patch size as in '
      f"'B/16', got {variant!r}"
    )
  patch = {'patch_size': int(match[2])} if match[2] else {}
  return VARIANTS[match[1]] | patch


def resolve_sizes(variant: str, **explicit: int) -> Sizes:
  """Sizes of a variant, overridden by the explicit ones that are not 0.

  Args:
    variant: for example 'B/16'; '' if every size is explicit.
    **explicit: fields of `Sizes`; 0 means as in the variant.

  Raises:
    ValueError: if a size is given by neither, or is negative.
  """
  return sizes_of_variant(
    Sizes, decode_variant, variant, explicit, example='B/16'
  )


class Encoder(nn.Module):
  """A stack of encoder blocks and the norm after them.

  Attributes:
    depth: number of blocks.
    num_heads: attention heads.
    mlp_dim: hidden width of the feed-forward networks.
    dropout: rate in the blocks.
    dtype: compute dtype.
  """

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
      x = EncoderBlock(
        num_heads=self.num_heads,
        mlp_dim=self.mlp_dim,
        dropout=self.dropout,
        dtype=self.dtype,
        name=name,
      )(x, mask, keys)
    return LayerNorm(name='norm', dtype=self.dtype)(x)


class ViT(nn.Module):
  """The Vision Transformer.

  Attributes:
    num_classes: number of classes.
    variant: for example 'B/16'; '' if all sizes are given explicitly.
    width: width of the tokens; this and the next four override the variant
      unless 0.
    depth: number of blocks.
    mlp_dim: hidden width of the feed-forward networks.
    num_heads: attention heads.
    patch_size: side of a patch in pixels.
    pool: features are the [CLS] token ('cls') or the mean of all patches
      ('gap').
    positions: 'learned' or 'sincos2d'.
    dropout: rate in the blocks.
    dtype: compute dtype; parameters and logits are float32.
  """

  num_classes: int
  variant: str = ''
  width: int = 0
  depth: int = 0
  mlp_dim: int = 0
  num_heads: int = 0
  patch_size: int = 0
  pool: str = 'cls'
  positions: str = 'learned'
  dropout: float = 0.0
  dtype: Any = jnp.float32

  def sizes(self) -> Sizes:
    """The sizes that the fields describe; see `resolve_sizes`."""
    return resolve_sizes(
      self.variant,
      width=self.width,
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      patch_size=self.patch_size,
    )

  @nn.compact
  def __call__(
    self,
    images: Float[Array, 'B H W E'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies images.

    Returns:
      (logits, out) with `out['features']` `[B, D]`, both float32.
    """
    sizes = self.sizes()
    x = ImageTokens(
      width=sizes.width,
      patch_size=sizes.patch_size,
      pool=self.pool,
      positions=self.positions,
      dtype=self.dtype,
      name='tokens',
    )(images)
    x = Encoder(
      depth=sizes.depth,
      num_heads=sizes.num_heads,
      mlp_dim=sizes.mlp_dim,
      dropout=self.dropout,
      dtype=self.dtype,
      name='encoder',
    )(x, None, row_keys)
    features = masked_mean(x if self.pool == 'gap' else x[:, :1])
    logits = classifier(self.num_classes)(features)
    return constrain(logits, 'batch', 'classes'), {'features': features}

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """FLOPs of one image `[H, W, E]` forward; see `flops`."""
    sizes = self.sizes()
    tokens = flops.num_patches(input_shape, sizes.patch_size)
    tokens += self.pool == 'cls'
    return (
      flops.patch_embed(input_shape, sizes.patch_size, sizes.width)
      + sizes.depth * flops.block(tokens, sizes.width, sizes.mlp_dim)
      + flops.dense(1, sizes.width, self.num_classes)
    )


class TokenTransformer(nn.Module):
  """A plain Transformer on symbol sequences, for parity.

  Attributes:
    num_classes: number of classes.
    depth: number of blocks.
    width: width of the tokens.
    mlp_dim: hidden width of the feed-forward networks.
    num_heads: attention heads.
    vocab_size: number of symbols.
    dropout: rate in the blocks.
    dtype: compute dtype; parameters and logits are float32.
  """

  num_classes: int
  depth: int
  width: int
  mlp_dim: int
  num_heads: int
  vocab_size: int = 3
  dropout: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B N'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies sequences by their [CLS] token.

    Returns:
      (logits, out) with `out['features']` `[B, D]`, both float32.
    """
    x = SymbolTokens(
      width=self.width,
      vocab_size=self.vocab_size,
      dtype=self.dtype,
      name='tokens',
    )(tokens)
    x = LearnedPositions(name='positions')(x)
    x = Encoder(
      depth=self.depth,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      dtype=self.dtype,
      name='encoder',
    )(x, None, row_keys)
    features = x[:, 0].astype(jnp.float32)
    logits = classifier(self.num_classes)(features)
    return constrain(logits, 'batch', 'classes'), {'features': features}

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """FLOPs of one sequence `[N]` forward; see `flops`."""
    block = flops.block(input_shape[0] + 1, self.width, self.mlp_dim)
    return self.depth * block + flops.dense(1, self.width, self.num_classes)
