"""Recurrent cells that ponder over each input of a sequence.

Equation numbers are those of Fojo's overview. At input x_t the cell reads
`[x_t, 1]` in its first repetition and `[x_t, 0]` in the others (Graves 2016,
section 2), starting from its last state (1). A rule of `model_lib.halting`
weighs the states into the one for the next input (6), (17), (28); of an LSTM
both arrays. The output at an input is an affine function of that state.

Its value is the weighted sum of the repetitions' outputs, (7), (18) and (29),
as the weights sum to 1. Its gradient is that of (7), as ACT's weights always
sum to 1. The weights of straight-through and Skip-ACT have a slope of 1 each:
(18) and (29) would add the output's bias times these slopes to the gradient of
the scores, which is left out here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from model_lib import halting, pondering
from model_lib.errors import FieldError
from model_lib.halting import Halting
from model_lib.logical import partitioned

# The optimized one has the parameters of nn.LSTMCell, and fewer products.
CELLS = {'rnn': nn.SimpleCell, 'gru': nn.GRUCell, 'lstm': nn.OptimizedLSTMCell}
# 'fixed' always repeats `max_steps` times: the baseline of Fojo's thesis.
RULES = ('act', 'straight_through', 'skip', 'fixed')

# The state of a cell: (c, h) of an LSTM, else h, all `[B, D]`.
State = Any
# step(state, inputs `[B, E + 1]`) -> (next state, score `[B]` in [0, 1]).
Step = Callable[[State, Any], tuple[State, Any]]


class Repetition(nn.Module):
  """One repetition: the cell, and the score of its hidden output (1), (3).

  Fields are those of `recurrent_act.model.RecurrentModel`; without `has_score`
  the score is 0 and has no parameters. The score is float32.
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
    cell = CELLS[self.cell](
      features=self.width,
      kernel_init=partitioned(nn.initializers.lecun_normal(), None, 'mlp'),
      recurrent_kernel_init=partitioned(
        nn.initializers.orthogonal(), 'embed', 'mlp'
      ),
      dtype=self.dtype,
      name='cell',
    )
    state, hidden = cell(state, inputs)
    if not self.has_score:
      return state, jnp.zeros(inputs.shape[:1], jnp.float32)
    score = nn.Dense(
      1,
      dtype=jnp.float32,
      kernel_init=partitioned(nn.initializers.lecun_normal(), 'embed', None),
      bias_init=nn.initializers.constant(self.halting_bias),
      name='score',
    )(hidden.astype(jnp.float32))
    return state, jax.nn.sigmoid(score)[:, 0]


@dataclasses.dataclass(frozen=True)
class Pondering:
  """Options of pondering, fields of `recurrent_act.model.RecurrentModel`."""

  rule: str
  max_steps: int
  epsilon: float = 0.01
  mu: int = 1
  dynamic: bool = False

  def __post_init__(self):
    if self.mu > 1 and self.rule != 'skip':
      raise FieldError('mu', self.mu, "1 unless rule is 'skip'")

  def advance(self) -> halting.Rule:
    """Returns the rule that turns scores into weights."""
    if self.rule == 'fixed':
      return advance_fixed
    name = 'straight_through' if self.rule == 'skip' else self.rule
    return halting.rule(name, self.epsilon)


@struct.dataclass
class Spent:
  """Of an input `[B]` or a sequence `[B, T]`; all are 0 for padding."""

  steps: Any  # repetitions, N, int32
  cost: Any  # rho (8), (19), (30), float32
  skipped: Any  # True for a skipped input


def advance_fixed(
  before: Halting, score: Float[Array, ' B'], is_last: Bool[Array, '...'] | bool
) -> tuple[Halting, Float[Array, ' B']]:
  """Takes one step; halts at the limit only."""
  halts = before.running & is_last
  after = dataclasses.replace(
    before,
    steps=before.steps + before.running.astype(jnp.int32),
    running=before.running & ~halts,
  )
  return after, halts.astype(jnp.float32)


def ponder_input(
  step: Step,
  state: State,
  carried: Float[Array, ' B'],
  inputs: Float[Array, 'B E'],
  valid: Bool[Array, ' B'],
  options: Pondering,
) -> tuple[State, Float[Array, ' B'], Spent]:
  """Ponders over one input of each row.

  Args:
    step: one repetition.
    state: s_{t-1}, float32.
    carried: `h_t^0` of Skip-ACT, 0 at the first input.
    inputs: x_t.
    valid: False for padding, which changes and costs nothing.
    options: of pondering.

  Returns:
    (s_t, `carried` of the next input, `Spent`).
  """

  def repeat(state: State, n: Array) -> tuple[State, Array]:
    first = jnp.broadcast_to((n == 0).astype(inputs.dtype), (len(inputs), 1))
    state, score = step(state, jnp.concatenate([inputs, first], axis=-1))
    return state, options.mu * score

  skips = options.rule == 'skip'
  begun, skip = halting.start(valid), jnp.zeros_like(carried)
  if skips:
    begun, skip = halting.start_carried(valid, carried, options.epsilon)
  ponder = pondering.ponder_while if options.dynamic else pondering.ponder_scan
  rule = options.advance()
  result = ponder(repeat, state, begun, max_steps=options.max_steps, rule=rule)
  after = jax.tree.map(
    lambda old, new: _after(old, new, skip, valid), state, result.output
  )
  if skips:
    rest = halting.carry_over(result.halting, options.epsilon)
    carried = jnp.where(valid, rest, carried)
  spent = Spent(
    steps=result.halting.steps,
    cost=halting.ponder_cost(result.halting),
    skipped=valid & (result.halting.steps == 0),
  )
  return after, carried, spent


def ponder_sequence(
  step: Step,
  state: State,
  inputs: Float[Array, 'B T E'],
  valid: Bool[Array, 'B T'],
  options: Pondering,
) -> tuple[State, Float[Array, 'B T D'], Spent]:
  """Ponders over the inputs of each row, one after the other.

  Returns:
    (last state, hidden output after each input, `Spent` of each input).
  """

  def body(before: Any, at_time: Any) -> Any:
    (state, carried), (x, here) = before, at_time
    state, carried, spent = ponder_input(step, state, carried, x, here, options)
    return (state, carried), (hidden_of(state), spent)

  nothing = jnp.zeros(inputs.shape[:1], jnp.float32)
  (state, _), by_time = jax.lax.scan(
    body,
    (state, nothing),
    (jnp.moveaxis(inputs, 1, 0), jnp.moveaxis(valid, 1, 0)),
  )
  hidden, spent = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), by_time)
  return state, hidden, spent


def start_state(cell: str, rows: int, width: int) -> State:
  """Returns s_0: zeros."""
  zeros = jnp.zeros((rows, width), jnp.float32)
  return (zeros, zeros) if cell == 'lstm' else zeros


def hidden_of(state: State) -> Float[Array, 'B D']:
  """Returns the hidden output of a state."""
  return state[1] if isinstance(state, tuple) else state


def _after(
  old: Float[Array, 'B D'],
  new: Float[Array, 'B D'],
  skip: Float[Array, ' B'],
  valid: Bool[Array, ' B'],
) -> Float[Array, 'B D']:
  """Computes equation (28); `skip` is 0 for the other rules."""
  skip = skip[:, None]
  return jnp.where(valid[:, None], skip * old + (1.0 - skip) * new, old)
