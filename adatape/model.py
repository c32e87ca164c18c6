"""AdaTape for images: a ViT that appends an adaptive tape (AdaTape, section 2).

Defaults are the paper's learnable bank on images (Table 4): T = 10 steps,
threshold 2, K = T / threshold = 5 and 10,000 tokens, inserted after the first
block. The input-driven bank has 8 x 8 patches: 784 tokens at 224 pixels.
"""

import math
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Gt, Interval
from jaxtyping import Array, Float

from adatape.bank import ImageBank, LearnableBank
from adatape.classifier import TapeClassifier
from adatape.encoder import TapeEncoder
from adatape.reading import Reading
from model_lib import flops, sizes
from model_lib.errors import FieldError
from model_lib.layers import classifier
from model_lib.sizes import Rate, Size
from model_lib.tokens import ImageTokens


class AdaTapeViT(TapeClassifier):
  """AdaTape with image inputs `[B, Y, X, E]` (float) and class logits.

  Attributes:
    num_classes: number of classes.
    variant: sizes that are not given, for example 'B/16'; '' if all are.
    width: width of the tokens, H.
    depth: number of blocks.
    mlp_dim: hidden width of the feed-forward networks.
    num_heads: attention heads.
    patch_size: side of an input patch in pixels.
    pool: the first query and the features are [CLS] ('cls') or the mean of
      the valid tokens ('gap').
    positions: 'learned' or 'sincos2d'.
    bank: 'learnable' (trainable vectors), 'input' (finer patches) or 'none'
      (T trainable tokens, the same for all rows; ablation of Table 2).
    bank_size: tokens in a learnable bank, C.
    bank_patch_size: side of a patch of the input bank in pixels.
    tokens_per_step: bank tokens merged into a tape token, K.
    max_steps: most tape tokens, T.
    threshold: halting threshold tau.
    query_dim: leading features compared between query and bank, h.
    query_update: 'average' or 'replace'.
    tape_loss: 'entropy' or 'max'.
    fixed_length: append the top T tokens without halting (ablation of Table
      2); `tokens_per_step` and `threshold` are unused.
    insert_after: number of blocks before the insertion.
    read_mlp: network applied once to the tape tokens when they are appended:
      '', 'mlp' or 'glu'. Tables 6 and 7 count a 'glu'.
    tape_mlp: network of the tape tokens in every block from the insertion on:
      '' (the MLP of the input tokens), 'mlp' or 'glu' (Table 7).
    query_noise: scale of the noise on the query in training (A.7).
    bank_drop: rate of bank tokens hidden from a row in training (A.7).
    dropout: rate in the blocks.
    dtype: compute dtype; parameters, the reading and logits are float32.

  Raises:
    FieldError: at construction, for fields that contradict each other.
  """

  num_classes: int
  variant: str = ''
  width: Size = None
  depth: Size = None
  mlp_dim: Size = None
  num_heads: Size = None
  patch_size: Size = None
  pool: Literal['cls', 'gap'] = 'cls'
  positions: Literal['learned', 'sincos2d'] = 'learned'
  bank: Literal['learnable', 'input', 'none'] = 'learnable'
  bank_size: Annotated[int, Interval(ge=1, le=2**24)] = 10_000
  bank_patch_size: Annotated[int, Interval(ge=1, le=4096)] = 8
  tokens_per_step: Annotated[int, Interval(ge=1, le=2**20)] = 5
  max_steps: Annotated[int, Interval(ge=1, le=2**20)] = 10
  threshold: Annotated[int | float, Gt(0)] = 2.0
  query_dim: Annotated[int, Interval(ge=1, le=2**17)] = 64
  query_update: Literal['average', 'replace'] = 'average'
  tape_loss: Literal['entropy', 'max'] = 'entropy'
  fixed_length: bool = False
  insert_after: Annotated[int, Interval(ge=0, le=1000)] = 1
  read_mlp: Literal['', 'mlp', 'glu'] = 'glu'
  tape_mlp: Literal['', 'mlp', 'glu'] = ''
  query_noise: Annotated[float, Interval(ge=0.0, le=1e6)] = 0.01
  bank_drop: Rate = 0.1
  dropout: Rate = 0.0
  dtype: Any = jnp.float32

  def __post_init__(self):
    sizes.VIT.complete(self)
    super().__post_init__()
    reading = self.reading()
    if not 0 <= self.insert_after < self.depth:
      expected = f'a number of blocks in [0, {self.depth - 1}]'
      raise FieldError('insert_after', self.insert_after, expected)
    if self.bank != 'none':
      size = self.bank_size if self.bank == 'learnable' else None
      reading.check_bank(size, self.width)

  @nn.nowrap
  def reading(self) -> Reading:
    """Returns the settings of the reading that the fields describe."""
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
    self.tokens = ImageTokens(
      width=self.width,
      patch_size=self.patch_size,
      pool=self.pool,
      positions=self.positions,
      dtype=self.dtype,
    )
    self.tape_bank = self._bank(self.width)
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
    return TapeEncoder(
      depth=self.depth,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
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
    """Returns patches, after [CLS] if pooled by it, and the bank."""
    bank = self.tape_bank(inputs) if self.bank == 'input' else self.tape_bank()
    return self.tokens(inputs), bank

  @nn.nowrap
  def flops(
    self, input_shape: tuple[int, ...], tape_length: int | float | None = None
  ) -> float:
    """Returns the FLOPs of one image `[Y, X, E]` forward.

    Args:
      input_shape: shape of an image.
      tape_length: tape tokens, for example a measured mean; None for the
        most, T.
    """
    tokens = flops.num_patches(input_shape, self.patch_size)
    tokens += self.pool == 'cls'
    total = flops.patch_embed(input_shape, self.patch_size, self.width)
    bank_size = self.bank_size
    if self.bank == 'input':
      bank_size = flops.num_patches(input_shape, self.bank_patch_size)
      total += flops.patch_embed(input_shape, self.bank_patch_size, self.width)
      total += flops.dense(bank_size, self.width, self.width)
    length = self.max_steps if tape_length is None else tape_length
    total += self._encoder().flops(tokens, bank_size, self.width, length)
    return total + flops.dense(1, self.width, self.num_classes)
