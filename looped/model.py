"""One small network, applied again and again to a state and the question.

With two latents, `gradient='last'` and the norm 'post' it is TRM ("Less is
More", Jolicoeur-Martineau 2025, arXiv 2510.04871); with one latent, a gradient
through all iterations and `feedback` a solver like Sotaku's, which reads the
question once, and has LayerNorm and positions of rows and columns. An iteration
is a supervision step: every one has an answer and a score.
"""

from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Float, Int

from halting import loop
from looped import rules
from looped.blocks import Block, dense, swiglu_width
from looped.rules import AllIterations, AnswerRule, Evidence
from model_lib import attention, blocks, flops
from model_lib.layers import build
from model_lib.logical import constrain, partitioned, partitioned_dense
from model_lib.row_random import RowKeys
from model_lib.sizes import Size, check_heads

Count = Annotated[int, Interval(ge=1, le=10_000)]
# Blocks of a training step up to which its iterations are no scan, which copies
# what the gradient needs: a quarter of the time of a small model on a CPU.
UNROLLED = 32
CERTAIN = 30.0  # logit of the token of a cell that is not filled in
LEAST = 1e-6  # odds of another symbol in a cell, as the score reads them
START = 'start'  # the collection of the start states, which are not trained

# 'high' and, of two latents, 'low' `[B, P + S, D]`; 'logits' `[B, S, V]` of the
# iteration before, 0 at first.
State = dict[str, Any]

# Standard deviation 1 / sqrt(D) of vectors of width D, truncated.
_UNIT = nn.initializers.variance_scaling(1.0, 'fan_out', 'truncated_normal')


class Looped(nn.Module, kw_only=True):
  """Fields of the model and of its iteration."""

  num_classes: int  # symbols of questions and answers; 0 is padding
  width: Annotated[int, Interval(ge=1, le=2**17)] = 64
  num_heads: Annotated[int, Interval(ge=1, le=1024)] = 4
  depth: Count = 2  # blocks of the network
  mlp_dim: Size = None  # of SwiGLU; by default 8/3 of the width
  mix: Literal['attention', 'cells'] = 'attention'
  norm: Literal['post', 'pre'] = 'post'
  positions: Literal['learned', 'rotary', 'none'] = 'learned'
  # Places before the cells, zeros at first; the score is read from the first.
  prefix: Count = 1
  latents: Literal[1, 2] = 1
  # Updates of the answer's latent in an iteration, and of the other latent (or,
  # of one latent, of the same) before each.
  high_cycles: Count = 1
  low_cycles: Count = 1
  # Whether the gradient goes through all cycles, or the last of `high_cycles`.
  gradient: Literal['all', 'last'] = 'all'
  feedback: bool = False  # the probabilities of the last answer are read
  # What the score reads: the first place of the prefix, and with 'answer' also
  # how sure the least sure cell is.
  score_reads: Literal['prefix', 'answer'] = 'prefix'
  # Whether the loss of the score trains the rest of the model.
  score_gradient: Literal['head', 'trunk'] = 'head'
  # 2: also TRM's second output, "continue", which has no loss.
  scores: Literal[1, 2] = 1
  score_bias: Annotated[float, Interval(ge=-100.0, le=100.0)] = -5.0
  # Token of the cells to fill in: the others keep theirs in every answer, and
  # do not count. 0: all cells are predicted, and count.
  blank: Annotated[int, Interval(ge=0, le=2**31 - 1)] = 0
  dtype: Any = jnp.float32


class Places(nn.Module):
  """A learned vector for each place."""

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, '1 L D']:
    """Returns the vectors of the places of `x`."""
    init = partitioned(_UNIT, 'length', 'embed')
    return self.param('table', init, x.shape[1:])[None].astype(x.dtype)


class Network(nn.Module):
  """The blocks, one network for both latents."""

  depth: int
  num_heads: int
  mlp_dim: int
  mix: str
  norm: str
  is_rotary: bool
  dtype: Any = jnp.float32

  def setup(self):
    """Declares the blocks."""
    self.block = [build(Block, self) for _ in range(self.depth)]

  def __call__(
    self, state: Float[Array, 'B L D'], injected: Float[Array, 'B L D']
  ) -> Float[Array, 'B L D']:
    """Returns the next state."""
    x = state + injected
    for block in self.block:
      x = blocks.call(block, x)
    return x


class Iteration(Looped):
  """One supervision step: cycles, an answer, a score."""

  def setup(self):
    """Declares embedding, network and heads."""
    kind, width = self.dtype, self.width
    init = partitioned(_UNIT, None, 'embed')
    self.symbols = nn.Embed(
      self.num_classes, width, dtype=kind, embedding_init=init
    )
    if self.positions == 'learned':
      self.places = Places()
    hidden = self.mlp_dim or swiglu_width(width)
    rotary = self.positions == 'rotary'
    self.network = build(Network, self, mlp_dim=hidden, is_rotary=rotary)
    wide = attention.wide(kind)
    self.head = dense(self.num_classes, 'embed', 'classes', dtype=wide)
    bias = nn.initializers.constant(self.score_bias)
    zeros = nn.initializers.zeros
    self.score = partitioned_dense(
      self.scores, 'embed', None, kernel_init=zeros, bias_init=bias, dtype=wide
    )
    if self.feedback:
      self.answer = dense(width, None, 'embed', dtype=kind)

  def embed(self, tokens: Int[Array, 'B S']) -> Float[Array, 'B L D']:
    """Returns the question as every update reads it, with the prefix."""
    x = jnp.pad(self.symbols(tokens), ((0, 0), (self.prefix, 0), (0, 0)))
    if self.positions == 'learned':
      x = (x + self.places(x)) * 0.5**0.5
    return constrain(x * self.width**0.5, 'batch', 'length', 'embed')

  def __call__(
    self, state: State, tokens: Int[Array, 'B S']
  ) -> tuple[State, Float[Array, ' B']]:
    """Returns (next state, score); its 'logits' are float32 at least."""
    x, first = self.embed(tokens), self.prefix
    if self.feedback:
      logits = state['logits']
      if self.gradient == 'last':
        logits = jax.lax.stop_gradient(logits)
      likely = jax.nn.softmax(logits) * (logits != 0).any(-1, keepdims=True)
      x = x.at[:, first:].add(self.answer(likely.astype(self.dtype)))
    high: Any = state['high']
    low: Any = state.get('low')
    for cycle in range(self.high_cycles):
      if self.gradient == 'last' and cycle == self.high_cycles - 1:
        high, low = jax.lax.stop_gradient((high, low))
      for _ in range(self.low_cycles):
        if self.latents == 2:
          low = self.network(low, high + x)
        else:
          high = self.network(high, x)
      if self.latents == 2:
        high = self.network(high, low)
    wide = high.astype(attention.wide(self.dtype))
    logits = constrain(self.head(wide[:, first:]), 'batch', 'length', 'classes')
    if self.blank:
      sure = CERTAIN * jax.nn.one_hot(tokens, self.num_classes)
      is_blank = (tokens == self.blank)[..., None]
      logits = jnp.where(is_blank, logits, sure.astype(logits.dtype))
    feature = wide[:, 0]
    if self.score_reads == 'answer':
      feature = jnp.concatenate([feature, least_sure(logits)], -1)
    if self.score_gradient == 'head':
      feature = jax.lax.stop_gradient(feature)
    after = {'high': high, 'logits': logits}
    after |= {} if low is None else {'low': low}
    return after, self.score(feature)[:, 0]


class LoopedModel(Looped):
  """Iterations of a puzzle; see `Looped` for the fields."""

  max_steps: Count = 16  # iterations, in training of every row
  # Iterations of evaluation and serving; 0 for `max_steps`.
  limit: Annotated[int, Interval(ge=0, le=1_000_000)] = 0
  rule: AnswerRule = rules.Score()  # of serving

  def __post_init__(self):
    super().__post_init__()
    check_heads(self)

  def setup(self):
    """Declares the iteration and the start states."""
    self.iteration = build(Iteration, self)

    def draw() -> Array:  # standard deviation 1
      unit = _UNIT(self.make_rng('params'), (1, self.width))
      return unit * self.width**0.5

    names = ('high', 'low')[: self.latents]
    self.starts = {name: self.variable(START, name, draw) for name in names}

  def begin(self, tokens: Int[Array, 'B S']) -> State:
    """Returns the state before the first iteration."""
    rows, cells = tokens.shape
    shape = rows, self.prefix + cells, self.width
    state: State = {
      name: jnp.broadcast_to(start.value[None].astype(self.dtype), shape)
      for name, start in self.starts.items()
    }
    kind = attention.wide(self.dtype)
    logits = jnp.zeros((rows, cells, self.num_classes), kind)
    return state | {'logits': logits}

  def advance(
    self, state: State, tokens: Int[Array, 'B S']
  ) -> tuple[State, Float[Array, ' B']]:
    """Runs one iteration; see `Iteration`."""
    return self.iteration(state, tokens)

  def __call__(
    self, tokens: Int[Array, 'B S'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B S V'], dict[str, Any]]:
    """Runs all iterations: `max_steps` with `row_keys`, `limit` without.

    Returns the logits of the last and `out`: 'logits' `[N, B, S, V]` and
    'scores' `[N, B]` of every iteration, 'features' `[B, D]`; without noise.
    """
    state = self.begin(tokens)
    step = blocks.pure(self.iteration, state, tokens)

    def iterate(state: State, n: Any, running: Any) -> Any:
      after, score = step(state, tokens)
      return after, evidence(state, after, score, tokens)

    def record(visit: loop.Visit) -> Any:
      return visit.after['logits'], visit.evidence.score

    is_training = row_keys is not None
    steps = self.max_steps if is_training else self.limit or self.max_steps
    valid = jnp.ones(len(tokens), bool)
    result = loop.run(
      iterate, state, valid, AllIterations(), max_steps=steps, trace=record,
      unroll=is_training and steps * self._blocks() <= UNROLLED,
    )  # fmt: skip
    logits, scores = result.trace
    features = result.output['high'][:, 0]
    return logits[-1], dict(logits=logits, scores=scores, features=features)

  @nn.nowrap
  def flops(self, input_shape: flops.Shape, steps: flops.Mean = None) -> float:
    """Returns the FLOPs of one row `[S]` in a number of iterations."""
    places = self.prefix + input_shape[0]
    hidden = self.mlp_dim or swiglu_width(self.width)
    block = flops.mlp(places, self.width, hidden, gated=True)
    if self.mix == 'attention':
      block += flops.attention(places, self.width)
    else:
      block += flops.mlp(self.width, places, swiglu_width(places), gated=True)
    head = flops.dense(input_shape[0], self.width, self.num_classes)
    read = self.width + (self.score_reads == 'answer')
    head += flops.dense(1, read, self.scores)
    times = (self.limit or self.max_steps) if steps is None else steps
    return times * (self._blocks() * block + head)

  @nn.nowrap
  def _blocks(self) -> int:
    """Returns the blocks that an iteration runs."""
    calls = self.high_cycles * (self.low_cycles + self.latents - 1)
    return calls * self.depth


def least_sure(logits: Float[Array, 'B S V']) -> Float[Array, 'B 1']:
  """Returns the log-odds of the answer in the cell where they are least."""
  is_best = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1], dtype=bool)
  ratios = jnp.exp(logits - logits.max(-1, keepdims=True))
  against = jnp.where(is_best, 0.0, ratios).sum(-1)
  against = jnp.maximum(against, LEAST).max(-1, keepdims=True)
  return -jnp.log(against)


def evidence(
  before: State, after: State, score: Float[Array, ' B'], tokens: Any
) -> Evidence:
  """Returns what rules read of an iteration."""
  answer, old = (state['logits'].argmax(-1) for state in (after, before))
  return Evidence(score, answer, old, tokens)
