"""AdaTape for images: a ViT that appends an adaptive tape (AdaTape, section 2).

Defaults are the paper's learnable bank on images (Table 4): T = 10 steps,
threshold 2, K = T / threshold = 5 and 10,000 tokens.
"""

import math
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Gt, Interval
from jaxtyping import Array, Float, Num

from adatape.bank import ImageBank, LearnableBank
from adatape.encoder import TapeEncoder
from adatape.reading import Reading
from adatape.tape import Tape
from core.errors import ConfigError
from model_lib import flops
from model_lib.layers import build, classifier
from model_lib.logical import constrain
from model_lib.row_random import RowKeys
from model_lib.sizes import Rate, Size
from model_lib.vit import ImageModel, ImageTokens


class TapeClassifier(nn.Module):
  """Base of the classifiers; `__call__` is `read`, then `classify`.

  A subclass has a field `max_steps` (T) and defines `reading` and `embed`.
  `row_keys`, one per row, enable noise and dropout.
  """

  def setup(self):
    """Declares the encoder and the head."""
    self.encoder = self._encoder()
    self.head = classifier(self.num_classes)

  @nn.nowrap
  def reading(self) -> Reading | None:
    """Returns the settings of the reading; None without one."""
    raise NotImplementedError

  @nn.nowrap
  def _encoder(self) -> TapeEncoder:
    return build(TapeEncoder, self, reading=self.reading())

  def embed(self, inputs: Num[Array, 'B ...']) -> tuple[Array, Array]:
    """Returns input tokens `[B, L, H]` and the bank `[C, H]` or `[B, C, H]`."""
    raise NotImplementedError

  def read(
    self,
    inputs: Num[Array, 'B ...'],
    row_keys: RowKeys = None,
    stop_early: bool = False,
  ) -> tuple[Float[Array, 'B L H'], Tape, int]:
    """Returns (tokens, tape, size of the bank) at the insertion."""
    x, bank = self.embed(inputs)
    x, tape = self.encoder.read(x, bank, row_keys, stop_early)
    return x, tape, bank.shape[-2]

  def classify(
    self,
    x: Float[Array, 'B L H'],
    tokens: Float[Array, 'B T H'],
    mask: Float[Array, 'B T'],
    row_keys: RowKeys = None,
  ) -> tuple[Float[Array, 'B O'], Float[Array, 'B H']]:
    """Returns (logits, features), both float32; the tape may be cropped."""
    features = self.encoder.finish(x, tokens, mask, row_keys)
    return constrain(self.head(features), 'batch', 'classes'), features

  def __call__(
    self, inputs: Num[Array, 'B ...'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies with T tape slots; the reference for serving.

    `out['features']` are the pre-logits `[B, H]`, `out['tape']` has fields of
    `Tape`, and `bank_size`.
    """
    x, tape, bank_size = self.read(inputs, row_keys)
    logits, features = self.classify(x, tape.tokens, tape.mask, row_keys)
    out = tape._asdict() | {'bank_size': bank_size}
    del out['tokens'], out['halting']
    return logits, {'features': features, 'tape': out}

  @nn.nowrap
  def _flops(
    self, tokens: int, bank_size: int, tape_length: int | float | None
  ) -> float:
    """FLOPs of encoder and head; `tape_length` None means T."""
    length = self.max_steps if tape_length is None else tape_length
    encoder = self._encoder().flops(tokens, bank_size, self.width, length)
    return encoder + flops.dense(1, self.width, self.num_classes)


class AdaTapeViT(TapeClassifier, ImageModel):
  """AdaTape with image inputs `[B, Y, X, E]` (float) and class logits.

  `pool`, [CLS] or the mean of valid tokens, makes first query and features.
  """

  num_classes: int
  variant: str = ''  # sizes that are None, as 'B/16'
  depth: Size = None  # number of blocks
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
  # End the fixed tape by ACT, whose scores weight its tokens (appendix A.4).
  act: bool = False
  # Number of blocks before the insertion.
  insert_after: Annotated[int, Interval(ge=0, le=1000)] = 1
  # Network applied once to the tape tokens; Tables 6 and 7 count a 'glu'.
  read_mlp: Literal['', 'mlp', 'glu'] = 'glu'
  # Network of the tape tokens in every block from the insertion on; '' shares
  # the input tokens' MLP.
  tape_mlp: Literal['', 'mlp', 'glu'] = ''
  # Scale of the noise on the query in training (A.7).
  query_noise: Annotated[float, Interval(ge=0.0, le=1e6)] = 0.01
  bank_drop: Rate = 0.1  # of bank tokens hidden from a row in training (A.7)
  dropout: Rate = 0.0  # in the blocks
  activation: Literal['gelu', 'gelu_new'] = 'gelu'  # in the blocks; see `ViT`
  dtype: Any = jnp.float32  # of the computation; reading, logits are float32

  def __post_init__(self):
    super().__post_init__()
    if not 0 <= self.insert_after < self.depth:
      expected = f'a number of blocks in [0, {self.depth - 1}]'
      raise ConfigError('insert_after', self.insert_after, expected)
    reading = self.reading()
    if self.act and not (reading and reading.fixed_length):
      raise ConfigError('act', True, 'fixed_length=True and a bank')
    if reading:
      size = self.bank_size if self.bank == 'learnable' else None
      reading.check_bank(size, self.width)

  @nn.nowrap
  def reading(self) -> Reading | None:
    """Returns the settings of the reading; None without one."""
    if self.bank == 'none':
      return None
    threshold = math.inf if self.fixed_length else self.threshold
    return build(Reading, self, threshold=threshold, loss=self.tape_loss)

  def setup(self):
    """Declares the submodules and parameters."""
    super().setup()
    self.tokens = build(ImageTokens, self)
    size = self.max_steps if self.bank == 'none' else self.bank_size
    self.tape_bank: Any = (
      ImageBank(self.width, self.bank_patch_size, self.dtype)
      if self.bank == 'input'
      else LearnableBank(size, self.width)
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
    """Returns the FLOPs of an image `[Y, X, E]`, of a mean `tape_length`."""
    tokens = self.image_tokens(input_shape)
    total = flops.patch_embed(input_shape, self.patch_size, self.width)
    bank_size = self.bank_size
    if self.bank == 'input':
      bank_size = flops.num_patches(input_shape, self.bank_patch_size)
      total += flops.patch_embed(input_shape, self.bank_patch_size, self.width)
      total += flops.dense(bank_size, self.width, self.width)
    return total + self._flops(tokens, bank_size, tape_length)
