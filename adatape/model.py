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
from model_lib.layers import build, classifier
from model_lib.sizes import Rate, Size
from model_lib.tokens import ImageTokens


class AdaTapeViT(TapeClassifier):
  """AdaTape with image inputs `[B, Y, X, E]` (float) and class logits."""

  num_classes: int
  variant: str = ''  # sizes that are None, as 'B/16'
  width: Size = None  # H
  depth: Size = None  # number of blocks
  mlp_dim: Size = None  # hidden width of the feed-forward networks
  num_heads: Size = None
  patch_size: Size = None  # in pixels
  # The first query and the features: [CLS], or the mean of the valid tokens.
  pool: Literal['cls', 'gap'] = 'cls'
  positions: Literal['learned', 'sincos2d'] = 'learned'
  # Trainable vectors, finer patches, or T trainable tokens that are appended to
  # every row (ablation of Table 2).
  bank: Literal['learnable', 'input', 'none'] = 'learnable'
  # Tokens in a learnable bank, C.
  bank_size: Annotated[int, Interval(ge=1, le=2**24)] = 10_000
  # In pixels, of the input bank.
  bank_patch_size: Annotated[int, Interval(ge=1, le=4096)] = 8
  # The reading; see `Reading`.
  tokens_per_step: Annotated[int, Interval(ge=1, le=2**20)] = 5
  max_steps: Annotated[int, Interval(ge=1, le=2**20)] = 10
  threshold: Annotated[int | float, Gt(0)] = 2.0
  query_dim: Annotated[int, Interval(ge=1, le=2**17)] = 64
  query_update: Literal['average', 'replace'] = 'average'
  tape_loss: Literal['entropy', 'max'] = 'entropy'
  # Append the top T tokens without halting (ablation of Table 2);
  # `tokens_per_step` and `threshold` are unused.
  fixed_length: bool = False
  # Number of blocks before the insertion.
  insert_after: Annotated[int, Interval(ge=0, le=1000)] = 1
  # Network applied once to the tape tokens; Tables 6 and 7 count a 'glu'.
  read_mlp: Literal['', 'mlp', 'glu'] = 'glu'
  # Network of the tape tokens in every block from the insertion on; '' is that
  # of the input tokens.
  tape_mlp: Literal['', 'mlp', 'glu'] = ''
  # Scale of the noise on the query in training (A.7).
  query_noise: Annotated[float, Interval(ge=0.0, le=1e6)] = 0.01
  bank_drop: Rate = 0.1  # of bank tokens hidden from a row in training (A.7)
  dropout: Rate = 0.0  # in the blocks
  dtype: Any = jnp.float32  # of the computation; reading, logits are float32

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
    threshold = math.inf if self.fixed_length else self.threshold
    return build(Reading, self, threshold=threshold, loss=self.tape_loss)

  def setup(self):
    """Declares the submodules and parameters."""
    self.tokens = build(ImageTokens, self)
    if self.bank == 'input':
      self.tape_bank: Any = ImageBank(
        self.width, self.bank_patch_size, self.dtype
      )
    else:
      size = self.max_steps if self.bank == 'none' else self.bank_size
      self.tape_bank = LearnableBank(size, self.width)
    self.encoder = self._encoder()
    self.head = classifier(self.num_classes)

  @nn.nowrap
  def _encoder(self) -> TapeEncoder:
    reading = None if self.bank == 'none' else self.reading()
    return build(TapeEncoder, self, reading=reading)

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

    `tape_length` may be a measured mean; None is the most, T.
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
