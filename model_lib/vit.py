"""The Vision Transformer, a plain Transformer on symbols, and their tokens.

ViT (Dosovitskiy et al. 2021) with pre-LN blocks. Every model is called as
`model(inputs, row_keys) -> (logits, out)`; `out['features']` is the input of
the head, float32 as the logits. `row_keys` (one per row) turn dropout on.
"""

from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Interval
from jaxtyping import Array, Float, Int

from core.errors import ConfigError
from model_lib import flops, sizes, token_encoder
from model_lib.layers import build, pool_and_classify
from model_lib.logical import constrain, partitioned, partitioned_dense
from model_lib.row_random import RowKeys
from model_lib.sizes import Rate, Size
from model_lib.token_encoder import Encoder, TokenEncoder
from model_lib.tokens import Layers, Ratios

MAX_PERIOD = 10_000.0


class PatchEmbed(nn.Module):
  """Projection of non-overlapping square patches, in row-major order."""

  width: int
  patch_size: int  # side of a patch in pixels; divides the image's sides
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, images: Float[Array, 'B H W E']) -> Float[Array, 'B L D']:
    """Turns images into `H * W / patch_size**2` tokens."""
    flat = patches(images, self.patch_size)
    return partitioned_dense(
      self.width, 'patch', 'embed', 'projection', dtype=self.dtype
    )(flat)


def patches(
  images: Float[Array, 'B H W E'], patch_size: int
) -> Float[Array, 'B L P']:
  """Cuts images into flattened patches of `patch_size**2 * E` numbers."""
  batch, height, width, depth = images.shape
  p = patch_size
  if height % p or width % p:
    expected = f'a divisor of the image sides {height} x {width}'
    raise ConfigError('patch_size', p, expected)
  grid = images.reshape(batch, height // p, p, width // p, p, depth)
  flat = grid.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, p * p * depth)
  return constrain(flat, 'batch', 'length', 'patch')


class LearnedPositions(nn.Module):
  """A trainable vector for each position, standard deviation 0.02."""

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    """Adds the embedding; `L` is fixed by initialisation."""
    init = partitioned(nn.initializers.normal(0.02), None, 'length', 'embed')
    embedding = self.param('embedding', init, (1, *x.shape[1:]))
    return x + embedding.astype(x.dtype)


def sincos1d(
  positions: Float[Array, ' L'] | Float[np.ndarray, ' L'], width: int
) -> Float[Array, 'L D']:
  """Returns sines, then cosines ("Attention is all you need", 3.5)."""
  if width % 2 or width < 4:
    raise ConfigError('width', width, 'an even number >= 4 for sine positions')
  exponents = np.arange(width // 2) / (width // 2 - 1)
  frequencies = (MAX_PERIOD**-exponents).astype(np.float32)
  angles = jnp.asarray(positions)[:, None] * frequencies[None, :]
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


def sincos2d(height: int, width_tokens: int, width: int) -> Float[Array, 'L D']:
  """Returns sines and cosines of column and row of each patch, row by row."""
  if width % 4:
    raise ConfigError('width', width, 'a multiple of 4 for 2-D positions')
  rows, columns = np.mgrid[:height, :width_tokens].astype(np.float32)
  halves = [sincos1d(axis.reshape(-1), width // 2) for axis in (columns, rows)]
  return jnp.concatenate(halves, axis=1)


class ImageTokens(nn.Module):
  """Patches with positions, after a [CLS] token if the pool is 'cls'."""

  width: int
  patch_size: int
  pool: str = 'cls'  # or 'gap'
  positions: str = 'learned'  # or 'sincos2d' (fixed)
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, images: Float[Array, 'B H W E']) -> Float[Array, 'B L D']:
    """Turns images into tokens."""
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
  """Embedded symbols after a trainable [CLS] token."""

  width: int
  vocab_size: int = 3
  stddev: float = 0.02  # of the embedding at initialisation
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens: Int[Array, 'B N']) -> Float[Array, 'B L D']:
    """Embeds the symbols; an id >= `vocab_size` gives NaN."""
    init = partitioned(nn.initializers.normal(self.stddev), None, 'embed')
    embedding = self.param('embedding', init, (self.vocab_size, self.width))
    x = jnp.take(embedding, tokens, axis=0, mode='fill')
    token = class_token(self, x.shape[0], self.width)
    x = jnp.concatenate([token, x], axis=1).astype(self.dtype)
    return constrain(x, 'batch', 'length', 'embed')


def class_token(
  module: nn.Module, batch: Any, width: int, name: str = 'cls'
) -> Float[Array, 'B 1 D']:
  """Declares a trainable token of `module`, tiled; `batch` may be symbolic."""
  # Not zeros: LayerNorm of a zero vector has gradients of `1 / sqrt(epsilon)`.
  init = partitioned(nn.initializers.normal(0.02), None, None, 'embed')
  token = module.param(name, init, (1, 1, width))
  return jnp.broadcast_to(token, (batch, 1, width))


class ImageModel(nn.Module, kw_only=True):
  """A classifier of image patches; subclasses define `_encode`."""

  num_classes: int
  variant: str = ''  # sizes that are None, as 'B/16'
  width: Size = None
  mlp_dim: Size = None  # hidden width of the feed-forward networks
  num_heads: Size = None
  patch_size: Size = None  # in pixels
  pool: Literal['cls', 'gap'] = 'cls'  # [CLS], or the mean of all patches
  positions: Literal['learned', 'sincos2d'] = 'learned'

  def __post_init__(self):
    sizes.VIT.complete(self)
    super().__post_init__()

  @nn.compact
  def __call__(
    self, images: Float[Array, 'B H W E'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies images; `out['features']` is `[B, D]`."""
    x = build(ImageTokens, self, name='tokens')(images)
    x, out = self._encode(x, row_keys)
    logits, features = pool_and_classify(x, self.pool, self.num_classes)
    return logits, {'features': features, **out}

  def _encode(self, x: Any, row_keys: Any) -> tuple[Any, dict[str, Any]]:
    """Returns encoded tokens `[B, L, D]`, and what they add to `out`."""
    raise NotImplementedError

  def image_tokens(self, input_shape: tuple[int, ...]) -> int:
    """Returns the number of tokens of an image `[H, W, E]`."""
    patches = flops.num_patches(input_shape, self.patch_size)
    return patches + (self.pool == 'cls')

  def image_flops(
    self, input_shape: tuple[int, ...], count: flops.Count
  ) -> float:
    """Returns the FLOPs of embedding, a number of blocks, and head."""
    tokens = self.image_tokens(input_shape)
    return (
      flops.patch_embed(input_shape, self.patch_size, self.width)
      + count * flops.block(tokens, self.width, self.mlp_dim)
      + flops.dense(1, self.width, self.num_classes)
    )


class ViT(ImageModel):
  """The Vision Transformer; may prune or merge tokens, for fewer FLOPs.

  Layers are counted from 1. Shares of tokens are of those but [CLS].
  """

  ENCODER: ClassVar[type[Encoder]] = Encoder
  SHRINKS: ClassVar[bool] = True  # False: the fields of tokens must be unset

  num_classes: int
  variant: str = ''  # sizes that are None, as 'B/16'
  depth: Size = None  # number of blocks
  # Exact, or 'gelu_new' by tanh, as vit_jax and big_vision compute it.
  activation: Literal['gelu', 'gelu_new'] = 'gelu'
  dropout: Rate = 0.0  # in the blocks
  dtype: Any = jnp.float32  # of the computation
  prune_layers: Layers = ()  # layers after which tokens are pruned
  prune_ratios: Ratios = ()  # share of the tokens that each prunes
  # Attention received from all tokens, or from [CLS]; or the states' L2 norm.
  prune_scores: Literal['attention', 'cls', 'norm'] = 'attention'
  prune_masked: bool = False  # mask pruned tokens: equal results, not faster
  merge_layers: Layers = ()  # layers in which tokens are merged, as in ToMe
  merge_count: Annotated[int, Interval(ge=0, le=2**20)] = 0  # tokens in each

  def __post_init__(self):
    super().__post_init__()
    token_encoder.check(self)
    if not self.SHRINKS and (layers := self._shrinking()):
      expected = f'() in {type(self).__name__}'
      raise ConfigError('prune_layers, merge_layers', layers, expected)

  def _shrinking(self) -> tuple[int, ...]:
    return *self.prune_layers, *self.merge_layers

  def _encode(self, x: Any, row_keys: Any) -> tuple[Any, dict[str, Any]]:
    if not self._shrinking():
      return build(self.ENCODER, self, name='encoder')(x, None, row_keys), {}
    encoder = build(TokenEncoder, self, name='encoder')
    x, tokens = encoder(x, row_keys)
    return x, {'positions': tokens.positions, 'length': tokens.length}

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one image `[H, W, E]` forward; see `flops`."""
    total, tokens = 0.0, self.image_tokens(input_shape)
    for attended, fed in token_encoder.counts(self, tokens):
      total += flops.attention(attended, self.width)
      total += flops.mlp(fed, self.width, self.mlp_dim)
    return self.image_flops(input_shape, 0) + total


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
    self, tokens: Int[Array, 'B N'], row_keys: RowKeys = None
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
