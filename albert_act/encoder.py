"""ALBERT's encoder: one shared layer, at a fixed depth or until tokens halt.

Lan et al. 2020; halting per token by Simoulin and Crabbe 2021 ("How Many Layers
and Why?", equations 1 to 8): `h^n = layer(h^{n-1})`, `p^n = sigmoid(W h^n +
b)`; the next iteration and the other tokens read `lambda^n h^n + (1 - lambda^n)
h^{n-1}`, or `h^n` by a rule that does not mix states. This is the masked form;
`albert_act.chain` computes running tokens only.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval
from flax import struct
from jaxtyping import Array, Float, Int

from albert_act import published
from core.errors import ConfigError
from halting import loop
from halting.rule import TokenRule
from halting.token_rules import ACT
from model_lib import blocks, flops, row_random
from model_lib.bert import INIT, Activation, TextEncoder
from model_lib.layers import valid_tokens
from model_lib.logical import constrain, partitioned_dense
from model_lib.row_random import RowKeys
from model_lib.sizes import Rate, Size, Sizes


@struct.dataclass
class Encoded:
  """The output of the encoder."""

  states: Any  # of all tokens after the last iteration, `[B, L, D]`
  # By token `[B, L]`: `steps` N, int32, and the rule's `cost`, float32, of ACT
  # N + R; both 0 for padding.
  ponder: dict[str, Any]
  depth: Any  # iterations that were executed for the batch, int32 scalar
  trace: Any = None  # outputs of `trace`, stacked over the iterations


class Albert(TextEncoder, kw_only=True):
  """Base of ALBERT's models; see `TextEncoder`."""

  SIZES: ClassVar[Sizes] = published.SIZES
  MODEL_TYPE: ClassVar[str] = published.ALBERT.model_type

  num_classes: int = 2
  embedding_width: Size = None
  # Applications of the shared layer; the limit with halting.
  max_iterations: Size = None
  # Layers with their own weights, each for an equal share of the iterations.
  num_groups: Annotated[int, Interval(ge=1, le=1000)] = 1
  # Blocks in a layer.
  inner_group: Annotated[int, Interval(ge=1, le=1000)] = 1
  vocab_size: Annotated[int, Interval(ge=1, le=2**24)] = 30000
  activation: Activation = 'gelu_new'
  # The rule by which each token halts, or all tokens of a row with its [CLS].
  rule: TokenRule = ACT()
  # Initial bias of the score: -2 gives about 9 iterations.
  halting_bias: Annotated[float, Interval(ge=-1e3, le=1e3)] = -2.0
  # Stop when every token of the batch has halted, with the same gradient; the
  # time of a training step then follows the iterations.
  dynamic: bool = False
  # See `halting.loop.run`.
  remat_chunk: Annotated[int, Interval(ge=0, le=1000)] = 0
  dropout: Rate = 0.0
  attention_dropout: Rate = 0.0

  def __post_init__(self):
    super().__post_init__()
    iterations = self.max_iterations
    if self.num_groups > iterations:
      expected = f'at most the {iterations} iterations'
      raise ConfigError('num_groups', self.num_groups, expected)
    if self.remat_chunk and iterations % self.remat_chunk:
      expected = f'a divisor of the {iterations} iterations'
      raise ConfigError('remat_chunk', self.remat_chunk, expected)

  def setup(self):
    """Declares the parameters of the encoder."""
    self.embeddings = self.make_embeddings(self.embedding_width)
    self.projection = partitioned_dense(
      self.width, None, 'embed', kernel_init=INIT, dtype=self.dtype
    )
    self.block = self.make_blocks(self.num_groups * self.inner_group)
    if self.rule.SCORED:
      bias = nn.initializers.constant(self.halting_bias)
      self.score = partitioned_dense(
        1, 'embed', None, kernel_init=INIT, bias_init=bias
      )

  def embed(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    row_keys: RowKeys = None,
  ) -> Float[Array, 'B L D']:
    """Returns `h^0`: the factorised embeddings, projected to the width."""
    x = self.projection(self.embeddings(tokens, token_types, row_keys))
    return constrain(x, 'batch', 'length', 'embed')

  def encode(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: RowKeys = None,
    trace: Callable[[loop.Visit], Any] | None = None,
  ) -> Encoded:
    """Embeds tokens, padded after `length`, and applies the shared layer.

    `row_keys` turn dropout on; `trace`: see `halting.loop.run`.
    """
    x = self.embed(tokens, token_types, row_keys)
    valid = valid_tokens(tokens, length)
    result = loop.run(
      self._pure_step(x, valid, row_keys),
      x,
      valid,
      self.rule,
      max_steps=self.max_iterations,
      combination='fed_back' if self.rule.MIXES else '',
      dynamic=self.dynamic and self.rule.SCORED,
      remat_chunk=self.remat_chunk,
      trace=trace,
    )
    cost = self.rule.cost(result.halting)
    spent = {'steps': result.halting.steps, 'cost': cost}
    states = result.output.astype(self.dtype)
    return Encoded(states, spent, result.depth, result.trace)

  def _pure_step(self, x, valid, row_keys) -> loop.Step:
    """Returns `(state, n, _) -> (layer(state), score)` in plain JAX."""
    pure = [blocks.pure(block, x, valid) for block in self.block]
    score = blocks.pure(self.score, x) if self.rule.SCORED else None
    limit, size = self.max_iterations, self.inner_group
    # Hugging Face's formula, with its rounding.
    group_of = [int(n / (limit / self.num_groups)) for n in range(limit)]

    def layer(group: list[Any], state: Array, keys: Any) -> Array:
      for number, block in enumerate(group):
        block_keys = row_random.fold_rows(keys, f'block_{number}')
        state = block(state, valid, block_keys).x
      return state

    branches = [
      functools.partial(layer, pure[start : start + size])
      for start in range(0, len(pure), size)
    ]

    def step(state: Array, n: Array, running: Array) -> tuple[Array, Any]:
      keys = row_random.fold_rows(row_keys, n)
      group = jnp.asarray(group_of)[n]
      state = jax.lax.switch(group, branches, state, keys)
      if score is None:
        return state, None
      scores = jax.nn.sigmoid(score(state.astype(jnp.float32))[..., 0])
      if self.rule.PER_ROW:
        scores = jnp.broadcast_to(scores[:, :1], scores.shape)
      return state, scores

    return step

  @nn.nowrap
  def encoder_flops(
    self, tokens: int | float, iterations: float | int | None = None
  ) -> float:
    """Returns the FLOPs of one row; `iterations`: the mean over its tokens."""
    block = flops.block(tokens, self.width, self.mlp_dim)
    step = self.inner_group * block
    step += flops.dense(tokens, self.width, 1) if self.rule.SCORED else 0.0
    times = self.max_iterations if iterations is None else iterations
    embed = flops.dense(tokens, self.embedding_width, self.width)
    return embed + times * step
