"""AdaTape for parity: is the number of 1s even? (AdaTape, section 3.2)."""

from typing import Annotated, Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Ge, Gt, Interval
from jaxtyping import Array, Float, Int

from adatape.bank import SymbolBank
from adatape.model import TapeClassifier
from adatape.reading import Reading
from core.errors import ConfigError
from model_lib import flops
from model_lib.layers import build
from model_lib.sizes import Rate, check_heads
from model_lib.vit import class_token


class ParityModel(TapeClassifier):
  """AdaTape with symbol inputs `[B, N]` (int), which are its bank.

  The only input token is a trained [CLS]; the tape comes before the first
  block. The paper takes K = 2, T = N / 2 and tau = N / 4 for N symbols.
  """

  num_classes: int
  max_steps: Annotated[int, Interval(ge=1, le=2**20)]
  threshold: Annotated[int | float, Gt(0)]
  tokens_per_step: Annotated[int, Interval(ge=1, le=2**20)] = 2
  depth: Annotated[int, Interval(ge=1, le=1000)] = 2
  width: Annotated[int, Interval(ge=1, le=2**17)] = 32
  mlp_dim: Annotated[int, Interval(ge=1, le=2**20)] = 64
  num_heads: Annotated[int, Interval(ge=1, le=1024)] = 4
  query_dim: Annotated[int, Interval(ge=1, le=2**17)] = 16
  # Initial scale of the LayerNorm shared by bank and query. With 1 or more the
  # softmax over two unequal symbols saturates: one of them gets weight near 0.
  norm_scale: Annotated[float, Interval(ge=-1e6, le=1e6)] = 0.5
  # Add the embedding of this symbol to [CLS]: the first query then finds it.
  query_symbol: Annotated[int, Ge(0)] | None = None
  vocab_size: Annotated[int, Ge(1)] = 3
  tape_loss: Literal['entropy', 'max'] = 'entropy'  # see `Reading`
  dropout: Rate = 0.0
  dtype: Any = jnp.float32

  def __post_init__(self):
    super().__post_init__()
    check_heads(self)
    self.reading().check_bank(None, self.width)
    if self.query_symbol is not None and self.query_symbol >= self.vocab_size:
      expected = f'a token id in [0, {self.vocab_size - 1}]'
      raise ConfigError('query_symbol', self.query_symbol, expected)

  @nn.nowrap
  def reading(self) -> Reading:
    """Returns the settings of the reading."""
    return build(Reading, self, loss=self.tape_loss)

  def setup(self):
    """Declares the submodules and parameters."""
    super().setup()
    self.tape_bank = build(SymbolBank, self)
    self.token = class_token(self, 1, self.width)

  def embed(
    self, inputs: Int[Array, 'B N']
  ) -> tuple[Float[Array, 'B 1 H'], Float[Array, 'B N H']]:
    """Returns the [CLS] token, and the symbols as the bank."""
    shape = inputs.shape[0], *self.token.shape[1:]
    token = jnp.broadcast_to(self.token, shape)
    if self.query_symbol is not None:
      symbol = jnp.full((inputs.shape[0], 1), self.query_symbol, jnp.int32)
      token = token + self.tape_bank(symbol)
    return token.astype(self.dtype), self.tape_bank(inputs)

  @nn.nowrap
  def flops(
    self, input_shape: tuple[int, ...], tape_length: int | float | None = None
  ) -> float:
    """Returns the FLOPs of one sequence `[N]`; `tape_length` None is T."""
    bank = flops.dense(input_shape[0], self.vocab_size, self.width)
    return bank + self._flops(1, input_shape[0], tape_length)
