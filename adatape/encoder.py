"""The encoder that reads a tape between two blocks and appends it.

Blocks after the insertion attend to `[x ; tape]` (AdaTape, section 2). Serving
crops the tape between `read` and `finish`.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from adatape.bank import SharedNorm
from adatape.reading import Reading, bank_drop, query_noise
from adatape.tape import Tape, read
from halting.rule import weigh
from halting.token_rules import ACT
from model_lib import blocks, flops, layers
from model_lib.layers import EncoderBlock, Mlp, build, masked_mean
from model_lib.row_random import RowKeys, fold_rows


class TapeBlock(EncoderBlock):
  """A block of input tokens and a tape; `tape_mlp` as in `AdaTapeViT`."""

  tape_mlp: str = ''

  def feed_forward(
    self,
    x: Float[Array, 'B L D'],
    row_keys: RowKeys,
    num_input_tokens: int | None = None,
  ) -> Float[Array, 'B L D']:
    """Applies the networks; `num_input_tokens` None: all are input tokens."""
    if not self.tape_mlp:
      return super().feed_forward(x, row_keys)
    count = x.shape[1] if num_input_tokens is None else num_input_tokens
    # Also runs on zero tape tokens, so that its parameters always exist.
    gated = self.tape_mlp == 'glu'
    mlp = build(Mlp, self, name='mlp')
    tape_mlp = build(Mlp, self, name='tape_mlp', gated=gated)
    tape = tape_mlp(x[:, count:], fold_rows(row_keys, 'tape'))
    return jnp.concatenate([mlp(x[:, :count], row_keys), tape], axis=1)


class TapeEncoder(nn.Module):
  """Encoder blocks with a tape inserted between two of them.

  The models have the same fields; tape reading runs in float32.
  """

  depth: int
  num_heads: int
  mlp_dim: int
  reading: Reading | None  # None appends the whole bank to every row
  pool: str = 'cls'
  insert_after: int = 0
  read_mlp: str = ''
  tape_mlp: str = ''
  query_noise: float = 0.0
  bank_drop: float = 0.0
  norm_scale: float = 1.0
  act: bool = False
  dropout: float = 0.0
  activation: str = 'gelu'  # in the blocks
  dtype: Any = jnp.float32

  def setup(self):
    """Declares the submodules and parameters."""
    for index in range(self.depth):
      tape_mlp = self.tape_mlp if index >= self.insert_after else ''
      # The names of the ViT: its parameters load without renaming.
      setattr(self, f'block_{index}', build(TapeBlock, self, tape_mlp=tape_mlp))
    self.norm = layers.LayerNorm(dtype=self.dtype)
    if self.read_mlp:
      gated = self.read_mlp == 'glu'
      self.read_network = Mlp(self.mlp_dim, gated=gated, dtype=self.dtype)
    if self.reading is not None:
      self.tape_norm = SharedNorm(self.norm_scale)
    if self.act:
      self.halt = layers.classifier(1, 'halt')

  def read(
    self,
    x: Float[Array, 'B L H'],
    bank: Float[Array, 'C H'] | Float[Array, 'B C H'],
    row_keys: RowKeys = None,
    stop_early: bool = False,
  ) -> tuple[Float[Array, 'B L H'], Tape]:
    """Runs the blocks before the insertion and reads the tape.

    `row_keys` enable noise and dropout.
    """
    x = self._blocks(x, None, row_keys, range(self.insert_after))
    size = bank.shape[-2]
    if self.reading is None:
      batch = x.shape[0]
      tokens = jnp.tile(bank[None], (batch, 1, 1))
      zeros, length = jnp.zeros((batch,)), jnp.full((batch,), size, jnp.int32)
      ones = jnp.ones((batch, size))
      return x, Tape(tokens, ones, None, zeros, zeros, length)
    query, dropped = masked_mean(self._pooled(x)), None
    if row_keys is not None and self.query_noise:
      keys = fold_rows(row_keys, 'query_noise')
      query = query_noise(keys, query, self.query_noise)
    if row_keys is not None and self.bank_drop:
      keys, keep = fold_rows(row_keys, 'bank_drop'), self.reading.min_bank_size
      dropped = bank_drop(keys, self.bank_drop, size, keep)
    query = self.tape_norm(query, self.reading.query_dim)
    options: Any = dict(normalize=self.tape_norm, dropped=dropped)
    tape = read(bank, query, self.reading, stop_early=stop_early, **options)
    return x, self._halted(tape) if self.act else tape

  def _halted(self, tape: Tape) -> Tape:
    """Ends tapes by ACT: tokens are weighted by trained scores (A.4)."""
    scores = nn.sigmoid(self.halt(tape.tokens)[..., 0])
    state, weights = weigh(ACT(), scores.T, tape.length > 0)
    places = jnp.arange(scores.shape[1])[None]
    return tape._replace(
      tokens=weights.T[..., None] * tape.tokens,
      mask=(places < state.steps[:, None]).astype(jnp.float32),
      length=state.steps,
    )

  def finish(
    self,
    x: Float[Array, 'B L H'],
    tokens: Float[Array, 'B T H'],
    mask: Float[Array, 'B T'],
    row_keys: RowKeys = None,
  ) -> Float[Array, 'B H']:
    """Appends the tape, runs the other blocks and pools, in float32.

    The tape may be cropped to the longest one. Slots with mask 0 are not read.
    """
    tokens = tokens.astype(x.dtype)
    if self.read_mlp:
      tokens = self.read_network(tokens)
    valid = jnp.concatenate([jnp.ones(x.shape[:2]), mask], axis=1)
    count = x.shape[1]
    x = jnp.concatenate([x, tokens.astype(x.dtype)], axis=1)
    after = range(self.insert_after, self.depth)
    x = self.norm(self._blocks(x, valid, row_keys, after, count))
    return masked_mean(self._pooled(x), self._pooled(valid))

  def _pooled(self, x):
    return x if self.pool == 'gap' else x[:, :1]

  def _blocks(self, x, valid, row_keys, indices, num_input_tokens=None):
    names = [f'block_{index}' for index in indices]
    stack = [getattr(self, name) for name in names]
    keys = [fold_rows(row_keys, name) for name in names]
    fixed = {'num_input_tokens': num_input_tokens}
    return blocks.apply(stack, x, valid, keys, **fixed)

  @nn.nowrap
  def flops(
    self, tokens: int, bank_size: int, width: int, tape_length: int | float
  ) -> float:
    """Returns the FLOPs of one row; `tape_length` may be a mean over rows."""
    total = self.insert_after * flops.block(tokens, width, self.mlp_dim)
    if self.reading is not None:
      steps = 1 if self.reading.fixed_length else tape_length
      total += steps * flops.dense(bank_size, self.reading.query_dim, 1)
      total += tape_length * flops.dense(1, self.reading.picks_per_step, width)
    if self.read_mlp:
      gated = self.read_mlp == 'glu'
      total += flops.mlp(tape_length, width, self.mlp_dim, gated)
    block = flops.attention(tokens + tape_length, width)
    block += flops.mlp(tokens, width, self.mlp_dim)
    gated = self.tape_mlp == 'glu'
    block += flops.mlp(tape_length, width, self.mlp_dim, gated)
    return total + (self.depth - self.insert_after) * block
