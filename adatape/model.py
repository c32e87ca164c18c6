"""AdaTape for images: a ViT that appends an adaptive tape (AdaTape, section 2).

Defaults are the paper's learnable bank on images (Table 4): T = 10 steps,
threshold 2, K = T / threshold = 5 and 10,000 tokens, inserted after the first
block. The input-driven bank takes 8 x 8 patches: 784 at 224 pixels.
"""

import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from adatape.bank import ImageBank, LearnableBank
from adatape.classifier import TapeClassifier
from adatape.encoder import TapeEncoder
from adatape.reading import Reading
from model_lib import flops
from model_lib.layers import TAPE_MLPS, classifier
from model_lib.tokens import POOLS, ImageTokens, check_option
from model_lib.vit import Sizes, resolve_sizes

BANKS = ('learnable', 'input', 'none')


class AdaTapeViT(TapeClassifier):
  """AdaTape with image inputs `[B, Y, X, E]` (float) and class logits.

  Attributes:
    num_classes: number of classes.
    variant: for example 'B/16'; '' if all sizes are given explicitly.
    width: width of the tokens, H; this and the next four override the variant
      unless 0.
    depth: number of blocks.
    mlp_dim: hidden width of the feed-forward networks.
    num_heads: attention heads.
    patch_size: side of an input patch in pixels.
    pool: the first query and the features are [CLS] ('cls') or the mean of
      the valid tokens ('gap').
    positions: 'learned' or 'sincos2d'.
    bank: 'learnable' (trainable vectors), 'input' (finer patches) or 'none'
      (`max_steps` trainable tokens for every row: Table 2 without adaptive
      length and content).
    bank_size: tokens in a learnable bank, C.
    bank_patch_size: side of a patch of the input bank in pixels.
    tokens_per_step: bank tokens merged into a tape token, K.
    max_steps: most tape tokens, T.
    threshold: halting threshold tau.
    query_dim: leading features that query and bank are compared by, h.
    query_update: 'average' or 'replace'.
    tape_loss: 'entropy' or 'max'.
    fixed_length: read T tokens at once instead of until the threshold (Table
      2 without adaptive length); `tokens_per_step` and `threshold` are unused.
    insert_after: number of blocks before the insertion.
    read_mlp: network applied once to the tape tokens when they are appended:
      '', 'mlp' or 'glu'. Tables 6 and 7 count a 'glu'.
    tape_mlp: network of the tape tokens in every block from the insertion on:
      '' shares the input tokens', or 'mlp', or 'glu' (Table 7).
    query_noise: scale of the noise on the query in training (A.7).
    bank_drop: rate of bank tokens hidden from a row in training (A.7).
    dropout: rate in the blocks.
    dtype: compute dtype; parameters, the reading and logits are float32.

  Raises:
    ValueError: at construction, naming the field, for an illegal value.
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
  bank: str = 'learnable'
  bank_size: int = 10_000
  bank_patch_size: int = 8
  tokens_per_step: int = 5
  max_steps: int = 10
  threshold: int | float = 2.0
  query_dim: int = 64
  query_update: str = 'average'
  tape_loss: str = 'entropy'
  fixed_length: bool = False
  insert_after: int = 1
  read_mlp: str = 'glu'
  tape_mlp: str = ''
  query_noise: float = 0.01
  bank_drop: float = 0.1
  dropout: float = 0.0
  dtype: Any = jnp.float32

  def __post_init__(self):
    super().__post_init__()
    sizes, reading = self.sizes(), self.reading()
    _check_fields(self, sizes.depth)
    if self.bank == 'learnable':
      reading.check_bank(self.bank_size, sizes.width)

  @nn.nowrap
  def sizes(self) -> Sizes:
    """The sizes that the fields describe."""
    return resolve_sizes(
      self.variant,
      width=self.width,
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      patch_size=self.patch_size,
    )

  @nn.nowrap
  def reading(self) -> Reading:
    """The settings of the reading that the fields describe."""
    return Reading(
      tokens_per_step=self.tokens_per_step,
      max_steps=self.max_steps,
      threshold=math.inf if self.fixed_length else self.threshold,
      query_dim=self.query_dim,
      query_update=self.query_update,
      loss=self.tape_loss,
    )

  def setup(self):
    """Declares the submodules and parameters."""
    sizes = self.sizes()
    self.tokens = ImageTokens(
      width=sizes.width,
      patch_size=sizes.patch_size,
      pool=self.pool,
      positions=self.positions,
      dtype=self.dtype,
    )
    self.tape_bank = self._bank(sizes.width)
    self.encoder = self._encoder()
    self.head = classifier(self.num_classes)

  @nn.nowrap
  def _bank(self, width: int) -> Any:
    if self.bank == 'input':
      return ImageBank(width, self.bank_patch_size, self.dtype)
    size = self.max_steps if self.bank == 'none' else self.bank_size
    return LearnableBank(size, width)

  @nn.nowrap
  def _encoder(self) -> TapeEncoder:
    sizes = self.sizes()
    return TapeEncoder(
      depth=sizes.depth,
      num_heads=sizes.num_heads,
      mlp_dim=sizes.mlp_dim,
      pool=self.pool,
      reading=None if self.bank == 'none' else self.reading(),
      insert_after=self.insert_after,
      read_mlp=self.read_mlp,
      tape_mlp=self.tape_mlp,
      query_noise=self.query_noise,
      bank_drop=self.bank_drop,
      dropout=self.dropout,
      dtype=self.dtype,
    )

  def embed(
    self, inputs: Float[Array, 'B Y X E']
  ) -> tuple[Float[Array, 'B L H'], Float[Array, '*B C H']]:
    """Patches, after [CLS] if pooled by it, and the bank."""
    bank = self.tape_bank(inputs) if self.bank == 'input' else self.tape_bank()
    return self.tokens(inputs), bank

  @nn.nowrap
  def flops(
    self, input_shape: tuple[int, ...], tape_length: int | float | None = None
  ) -> float:
    """FLOPs of one image `[Y, X, E]` forward.

    Args:
      input_shape: shape of an image.
      tape_length: tape tokens, for example a measured mean; None for the
        most, T.
    """
    sizes = self.sizes()
    tokens = flops.num_patches(input_shape, sizes.patch_size)
    tokens += self.pool == 'cls'
    total = flops.patch_embed(input_shape, sizes.patch_size, sizes.width)
    bank_size = self.bank_size
    if self.bank == 'input':
      bank_size = flops.num_patches(input_shape, self.bank_patch_size)
      total += flops.patch_embed(input_shape, self.bank_patch_size, sizes.width)
      total += flops.dense(bank_size, sizes.width, sizes.width)
    length = self.max_steps if tape_length is None else tape_length
    total += self._encoder().flops(tokens, bank_size, sizes.width, length)
    return total + flops.dense(1, sizes.width, self.num_classes)


def _check_fields(model: AdaTapeViT, depth: int) -> None:
  check_option('bank', model.bank, BANKS)
  check_option('pool', model.pool, POOLS)
  check_option('read_mlp', model.read_mlp, TAPE_MLPS)
  check_option('tape_mlp', model.tape_mlp, TAPE_MLPS)
  if not 0 <= model.insert_after < depth:
    raise ValueError(
      f'insert_after: expected a number of blocks in [0, {depth - 1}], below '
      f'the depth {depth}, got {model.insert_after}'
    )
  for name in ('bank_drop', 'dropout'):
    rate = getattr(model, name)
    if not 0 <= rate < 1:
      raise ValueError(f'{name}: expected a rate in [0, 1), got {rate!r}')
  if model.query_noise < 0:
    raise ValueError(
      f'query_noise: expected a scale >= 0, got {model.query_noise!r}'
    )
