"""A recurrent network that ponders over each input and predicts at each.

Graves (2016), "Adaptive Computation Time for Recurrent Neural Networks", and
Fojo's straight-through ACT, Skip-ACT and fixed repetitions, with the equation
numbers of Fojo's overview. The next input starts from the sum of the states,
weighted by a rule of `halting.token_rules` (6), (17), (28). The output is an
affine function of that sum, which is (7), (18), (29), as the weights sum to 1;
the gradient leaves out the output's bias times the slopes of the weights.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Bool, Float, Num

from halting import loop
from halting.rule import TokenRule
from halting.token_rules import ACT
from model_lib import blocks, flops
from model_lib.layers import build
from model_lib.logical import constrain, partitioned, partitioned_dense
from model_lib.row_random import RowKeys

# The optimized one has the parameters of nn.LSTMCell, and fewer products.
CELLS = {'rnn': nn.SimpleCell, 'gru': nn.GRUCell, 'lstm': nn.OptimizedLSTMCell}
# Number of recurrent matrices, and of input matrices, of a cell.
MATRICES = {'rnn': 1, 'gru': 3, 'lstm': 4}

# The state of a cell: (c, h) of an LSTM, else h, all `[B, D]`.
State = Any
# `steps` (repetitions, N, int32), `cost` (rho (8), (19), (30), float32) and
# `skipped` (bool) of an input `[B]` or a sequence `[B, T]`; 0 for padding.
Spent = dict[str, Any]


class Repetition(nn.Module):
  """One repetition: the cell, and the score of its hidden output (1), (3).

  Without `has_score` the score is 0 and has no parameters.
  """

  cell: str
  width: int
  has_score: bool = True
  halting_bias: float = 1.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, state: State, inputs: Float[Array, 'B F']
  ) -> tuple[State, Float[Array, ' B']]:
    """Returns (next state, score)."""
    inits = nn.initializers
    cell = CELLS[self.cell](
      features=self.width,
      kernel_init=partitioned(inits.lecun_normal(), None, 'mlp'),
      recurrent_kernel_init=partitioned(inits.orthogonal(), 'embed', 'mlp'),
      dtype=self.dtype,
      name='cell',
    )
    state, hidden = cell(state, inputs)
    if not self.has_score:
      return state, jnp.zeros(inputs.shape[:1], jnp.float32)
    bias = inits.constant(self.halting_bias)
    layer = partitioned_dense(1, 'embed', None, 'score', bias_init=bias)
    return state, jax.nn.sigmoid(layer(hidden.astype(jnp.float32)))[:, 0]


class RecurrentModel(nn.Module):
  """One pondering cell and a linear layer on its state.

  Two classes have a single output, whose sigmoid is the probability of class 1.
  Halting and logits are float32.
  """

  num_classes: int
  # Targets at each input, G.
  num_targets: Annotated[int, Interval(ge=1, le=2**20)] = 1
  cell: Literal['rnn', 'gru', 'lstm'] = 'lstm'
  width: Annotated[int, Interval(ge=1, le=2**17)] = 128
  # The rule by which a row halts at an input.
  rule: TokenRule = ACT()
  # Most repetitions at an input.
  max_steps: Annotated[int, Interval(ge=1, le=10_000)] = 20
  # Initial bias of the score, that of Graves (2016).
  halting_bias: Annotated[float, Interval(ge=-1e3, le=1e3)] = 1.0
  # Stop at every input when all rows of the batch have halted, instead of
  # masking `max_steps` repetitions.
  dynamic: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, 'B T E'],
    valid: Bool[Array, 'B T'] | Num[Array, 'B T'] | None = None,
    row_keys: RowKeys = None,
  ) -> tuple[Float[Array, 'B T G K'], dict[str, Any]]:
    """Predicts at every input; one whose `valid` is 0 changes nothing.

    Returns (logits, out): 'features' `[B, D]` is the hidden output after the
    last input, 'ponder' the `Spent` of every input. There is no noise.
    """
    scored = self.rule.SCORED
    step = build(Repetition, self, has_score=scored, name='repetition')
    zeros = jnp.zeros((len(inputs), self.width), jnp.float32)
    state: State = (zeros, zeros) if self.cell == 'lstm' else zeros
    first = jnp.pad(inputs[:, 0], ((0, 0), (0, 1)))
    repeat = blocks.pure(step, state, first)

    def body(before: Any, at_time: Any) -> Any:
      (state, carried), (x, real) = before, at_time
      state, carried, spent = ponder_input(
        repeat, state, carried, x, real, self
      )
      return (state, carried), (hidden_of(state), spent)

    valid = jnp.ones(inputs.shape[:2]) if valid is None else valid
    begun = state, jnp.zeros(len(inputs), jnp.float32)
    by_time = jnp.moveaxis(inputs, 1, 0), valid.astype(bool).T
    (state, _), outputs = jax.lax.scan(body, begun, by_time)
    hidden, spent = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
    out = {'features': hidden_of(state), 'ponder': spent}
    return self._logits(hidden), out

  def _logits(self, hidden: Float[Array, 'B T D']) -> Float[Array, 'B T G K']:
    """Computes equation (2)."""
    num_outputs = 1 if self.num_classes == 2 else self.num_classes
    size = self.num_targets * num_outputs
    outputs = partitioned_dense(size, 'embed', 'classes', 'head')(hidden)
    shape = (*hidden.shape[:2], self.num_targets, num_outputs)
    logits = outputs.reshape(shape)
    if self.num_classes == 2:
      logits = jnp.pad(logits, ((0, 0), (0, 0), (0, 0), (1, 0)))
    return constrain(logits, 'batch', None, None, None)

  @nn.nowrap
  def flops(self, input_shape: flops.Shape, steps: flops.Mean = None) -> float:
    """Returns the FLOPs of one sequence `[T, E]`, `steps` a mean by input."""
    length, size = input_shape
    matrix = flops.dense(1, size + 1 + self.width, self.width)
    repetition = MATRICES[self.cell] * matrix
    if self.rule.SCORED:
      repetition += flops.dense(1, self.width, 1)
    num_outputs = 1 if self.num_classes == 2 else self.num_classes
    head = flops.dense(1, self.width, self.num_targets * num_outputs)
    repetitions = self.max_steps if steps is None else steps
    return length * (repetitions * repetition + head)


def ponder_input(
  step: Callable[[State, Any], tuple[State, Any]],
  state: State,
  carried: Float[Array, ' B'],
  inputs: Float[Array, 'B E'],
  valid: Bool[Array, ' B'],
  options: RecurrentModel,
) -> tuple[State, Float[Array, ' B'], Spent]:
  """Ponders over one input x_t of each row by the fields of `options`.

  `step` maps a state and inputs `[B, E + 1]` to the next state and a score in
  [0, 1]. `state` is s_{t-1}, float32; `carried` is what the rule left at the
  last input (`h_t^0` of Skip-ACT), 0 at the first. Padding changes and costs
  nothing.
  Returns (s_t, `carried` of the next input, `Spent`).
  """

  # Append a flag that is 1 in the first repetition (Graves, section 2).
  def repeat(state: State, n: Array, running: Array) -> tuple[State, Array]:
    first = jnp.broadcast_to((n == 0).astype(inputs.dtype), (len(inputs), 1))
    return step(state, jnp.concatenate([inputs, first], axis=-1))

  rule = options.rule
  begun, skip = rule.resume(valid, carried)
  result = loop.run(
    repeat,
    state,
    begun,
    rule,
    max_steps=options.max_steps,
    combination='accumulated',
    dynamic=options.dynamic,
  )

  def mixed(old: Array, new: Array) -> Array:  # (28); without a skip, `new`
    share = skip[:, None]
    return jnp.where(valid[:, None], share * old + (1.0 - share) * new, old)

  after = jax.tree.map(mixed, state, result.output)
  carried = jnp.where(valid, rule.carry_over(result.halting), carried)
  steps, cost = result.halting.steps, rule.cost(result.halting)
  spent = {'steps': steps, 'cost': cost, 'skipped': valid & (steps == 0)}
  return after, carried, spent


def hidden_of(state: State) -> Float[Array, 'B D']:
  """Returns the hidden output of a state."""
  return state[1] if isinstance(state, tuple) else state
