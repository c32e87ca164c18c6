"""ALBERT's encoder: one shared layer, at a fixed depth or until tokens halt.

Lan et al. 2020; halting per token by Simoulin and Crabbe 2021 ("How Many Layers
and Why?", equations 1 to 8): `h^n = layer(h^{n-1})`, `p^n = sigmoid(W h^n +
b)`; the next iteration and the other tokens read `lambda^n h^n + (1 - lambda^n)
h^{n-1}`. By the straight-through rule a running token's state is `h^n`; a
halted token keeps `h^N`. Parameters are named as those that `model_lib.convert`
loads. This is the masked form; `albert_act.chain` computes running tokens
only.
"""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval
from flax import struct
from jaxtyping import Array, Float, Int

from albert_act import published
from core.errors import ConfigError
from model_lib import flops, halting, pondering, row_random
from model_lib.bert import INIT, Activation, TextEncoder, valid_tokens
from model_lib.logical import constrain, partitioned_dense
from model_lib.row_random import RowKeys
from model_lib.sizes import Rate, Size, Sizes

# The weight of the straight-through rule is 0 until a token halts, so states
# are not mixed by it.
COMBINATIONS = {
  'act': 'fed_back',
  'straight_through': 'accumulated',
  'ponder_net': 'accumulated',
}


@struct.dataclass
class Encoded:
  """The output of the encoder."""

  states: Any  # of all tokens after the last iteration, `[B, L, D]`
  # By token `[B, L]`: `steps` N, int32, and `cost` N + R, float32; both 0 for
  # padding. At a fixed depth both are that depth.
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
  # '' for a fixed depth, or the rule by which each token halts; by 'ponder_net'
  # all tokens of a row halt with its [CLS].
  halting: Literal['', 'act', 'straight_through', 'ponder_net'] = 'act'
  # A token halts when its scores sum to `1 - epsilon`, a row of 'ponder_net' at
  # this quantile of its distribution: 0.5 is the median.
  epsilon: Annotated[float, Interval(ge=0.0, lt=1.0)] = 0.01
  # Initial bias of the score: -2 gives about 9 iterations.
  halting_bias: Annotated[float, Interval(ge=-1e3, le=1e3)] = -2.0
  # Stop when every token of the batch has halted, with the same gradient; the
  # time of a training step then follows the iterations.
  dynamic: bool = False
  # See `pondering.ponder`.
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
    if self.halting:
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
    trace: pondering.Trace | None = None,
  ) -> Encoded:
    """Embeds tokens, padded after `length`, and applies the shared layer.

    `row_keys` turn dropout on; `trace` is recorded in every iteration of the
    static form, see `pondering.ponder`.
    """
    x = self.embed(tokens, token_types, row_keys)
    valid = valid_tokens(tokens, length)
    step = self._pure_step(x, valid, row_keys)
    if not self.halting:
      return self._repeat(step, x, valid, trace)
    result = pondering.ponder(
      step,
      x,
      valid,
      max_steps=self.max_iterations,
      rule=halting.rule(self.halting, self.epsilon),
      combination=COMBINATIONS[self.halting],
      dynamic=self.dynamic,
      remat_chunk=self.remat_chunk,
      freeze=self.halting != 'ponder_net' or self.dynamic,
      trace=trace,
    )
    spent = {
      'steps': result.halting.steps,
      'cost': halting.ponder_cost(result.halting),
    }
    return Encoded(
      result.output.astype(self.dtype), spent, result.depth, result.trace
    )

  def _repeat(self, step, x, valid, trace) -> Encoded:
    """Applies the layer a fixed number of times to all tokens."""
    iterations = self.max_iterations

    def body(state: Array, n: Array) -> tuple[Array, Any]:
      new, _ = step(state, n)
      steps = jnp.where(valid, n + 1, 0)
      spent = dataclasses.replace(halting.start(valid), steps=steps)
      return new, None if trace is None else trace(state, new, spent)

    x, traced = pondering.scan_steps(body, x, iterations, self.remat_chunk)
    steps = jnp.where(valid, iterations, 0)
    spent = {'steps': steps, 'cost': steps.astype(jnp.float32)}
    return Encoded(x, spent, jnp.asarray(iterations, jnp.int32), traced)

  def _pure_step(self, x, valid, row_keys) -> pondering.Step:
    """Returns `(state, n) -> (layer(state), score)` in plain JAX."""
    if self.is_initializing():
      for block in self.block:
        block(x, valid)
      if self.halting:
        self.score(x)
    groups = [
      [block.unbind() for block in self.block[start : start + self.inner_group]]
      for start in range(0, len(self.block), self.inner_group)
    ]
    score = self.score.unbind() if self.halting else None
    limit = self.max_iterations
    # Hugging Face's formula, with its rounding.
    group_of = [int(n / (limit / self.num_groups)) for n in range(limit)]

    def layer(group: list[Any], state: Array, keys: Any) -> Array:
      for number, (block, variables) in enumerate(group):
        own = row_random.fold_rows(keys, f'block_{number}')
        state = block.apply(variables, state, valid, own).x
      return state

    branches = [functools.partial(layer, group) for group in groups]

    def step(state: Array, n: Array) -> tuple[Array, Any]:
      keys = row_random.fold_rows(row_keys, n)
      group = jnp.asarray(group_of)[n]
      state = jax.lax.switch(group, branches, state, keys)
      if score is None:
        return state, None
      module, variables = score
      logits: Any = module.apply(variables, state.astype(jnp.float32))
      scores = jax.nn.sigmoid(logits[..., 0])
      if self.halting == 'ponder_net':
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
    step += flops.dense(tokens, self.width, 1) if self.halting else 0.0
    times = self.max_iterations if iterations is None else iterations
    embed = flops.dense(tokens, self.embedding_width, self.width)
    return embed + times * step
