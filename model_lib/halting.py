"""Adaptive Computation Time as pure functions (Graves 2016).

Equation numbers are those of Fojo's overview: the score `p^n` of step `n`,
`N = min{k : sum_{j<=k} p^j >= 1 - epsilon}` (4) and at most the step limit,
`R = 1 - sum_{j<N} p^j` (5), outputs weighted by `p^1 .. p^{N-1}, R` (6-7),
cost `rho = N + R` (8-9). The forced halt at the limit makes the weights sum
to 1 always. Everything is float32 here, whatever computes the states.

What halts is an item of any shape `*S`: a token `[B, L]` or an example `[B]`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

COMBINATIONS = ('accumulated', 'basic')
# step(state, n) -> (next state, score of step n); n counts from 0.
Step = Callable[[Array, Array], tuple[Array, Array]]


# Fields are Any because JAX builds these trees of other things than arrays,
# such as shapes and axis numbers, too.
@struct.dataclass
class Halting:
  """How far each item has come.

  Attributes:
    total: sum of the scores of the steps before the last one, `*S` float32.
    remainder: R; 0 until the item has halted, `*S` float32.
    steps: N so far, `*S` int32.
    running: whether the item has not halted, `*S` bool.
  """

  total: Any
  remainder: Any
  steps: Any
  running: Any


@struct.dataclass
class Pondered:
  """What pondering gave.

  Attributes:
    output: weighted sum of the states (6), float32.
    halting: the final `Halting`.
    depth: steps that were executed for the batch, int32 scalar.
  """

  output: Any
  halting: Any
  depth: Any


def start(valid: Bool[Array, '*S']) -> Halting:
  """Nothing spent yet; items that are not valid (padding) start halted."""
  zeros = jnp.zeros(valid.shape, jnp.float32)
  return Halting(zeros, zeros, zeros.astype(jnp.int32), valid)


def advance(
  halting: Halting,
  score: Float[Array, '*S'],
  is_last: Bool[Array, ''] | bool,
  epsilon: float = 0.01,
) -> tuple[Halting, Float[Array, '*S']]:
  """Takes one step of every running item.

  Args:
    halting: before the step.
    score: `p^n`, in [0, 1].
    is_last: whether this step is the limit, where every item halts.
    epsilon: an item halts when its scores sum to at least `1 - epsilon`.

  Returns:
    (halting after the step, weight of the step's state); the weight is zero
    for items that had halted before.
  """
  score = score.astype(jnp.float32)
  rest = 1.0 - halting.total
  reached = halting.total + score >= 1.0 - epsilon
  halts = halting.running & (reached | is_last)
  goes_on = halting.running & ~halts
  weight = jnp.where(goes_on, score, jnp.where(halts, rest, 0.0))
  after = Halting(
    total=halting.total + jnp.where(goes_on, score, 0.0),
    remainder=jnp.where(halts, rest, halting.remainder),
    steps=halting.steps + halting.running.astype(jnp.int32),
    running=goes_on,
  )
  return after, weight


def ponder_cost(halting: Halting) -> Float[Array, '*S']:
  """`rho = N + R` (8); its gradient is that of R, N being an integer."""
  return halting.steps.astype(jnp.float32) + halting.remainder


def combine(
  combination: str,
  previous: Float[Array, '...'],
  state: Float[Array, '...'],
  weight: Float[Array, '*S'],
) -> Float[Array, '...']:
  """Adds a step's state to the output, in float32.

  Args:
    combination: 'accumulated' sums `weight * state` (6); 'basic' moves to
      `weight * state + (1 - weight) * previous`. Both keep the output of an
      item that has halted.
    previous: the output so far; its leading axes are those of `weight`.
    state: the step's state, in the same shape.
    weight: the weight from `advance`.

  Raises:
    ValueError: if `combination` is unknown.
  """
  if combination not in COMBINATIONS:
    raise ValueError(
      f'combination: expected one of {COMBINATIONS}, got {combination!r}'
    )
  weight = _align(weight, state)
  share = weight * state.astype(jnp.float32)
  keep = 1.0 if combination == 'accumulated' else 1.0 - weight
  return keep * previous + share


def ponder_scan(
  step: Step,
  state: Float[Array, '...'],
  valid: Bool[Array, '*S'],
  *,
  max_steps: int,
  epsilon: float = 0.01,
  combination: str = 'accumulated',
) -> Pondered:
  """Ponders for `max_steps` static steps, masked: for training.

  Args:
    step: `(state, n) -> (next state, score [*S])`, n from 0.
    state: the state before the first step; leading axes `*S`.
    valid: which items take part.
    max_steps: the limit, at least 1.
    epsilon: see `advance`.
    combination: see `combine`.

  Raises:
    ValueError: if `max_steps` or `epsilon` is out of its range.
  """
  _check(max_steps, epsilon)

  def body(carry: Any, n: Array) -> tuple[Any, None]:
    return _ponder(step, carry, n, max_steps, epsilon, combination), None

  carry, _ = jax.lax.scan(body, _begin(state, valid), jnp.arange(max_steps))
  _, output, halting = carry
  return Pondered(output, halting, jnp.asarray(max_steps, jnp.int32))


def ponder_while(
  step: Step,
  state: Float[Array, '...'],
  valid: Bool[Array, '*S'],
  *,
  max_steps: int,
  epsilon: float = 0.01,
  combination: str = 'accumulated',
) -> Pondered:
  """Ponders until every item has halted: for inference, no gradient.

  Arguments and result are those of `ponder_scan`; only `depth` differs.
  """
  _check(max_steps, epsilon)

  def running(loop: Any) -> Bool[Array, '']:
    return loop[0][2].running.any()

  def body(loop: Any) -> Any:
    carry, n = loop
    return _ponder(step, carry, n, max_steps, epsilon, combination), n + 1

  carry, depth = jax.lax.while_loop(
    running, body, (_begin(state, valid), jnp.zeros((), jnp.int32))
  )
  _, output, halting = carry
  return Pondered(output, halting, depth)


def _begin(state: Array, valid: Bool[Array, '*S']) -> Any:
  return state, jnp.zeros(state.shape, jnp.float32), start(valid)


def _ponder(
  step: Step,
  carry: tuple[Array, Array, Halting],
  n: Int[Array, ''],
  max_steps: int,
  epsilon: float,
  combination: str,
) -> tuple[Array, Array, Halting]:
  state, output, before = carry
  new_state, score = step(state, n)
  after, weight = advance(before, score, n == max_steps - 1, epsilon)
  # A halted item keeps its state ("its state is simply copied to the next
  # step", Universal Transformer, section 2.2).
  running = _align(before.running, state)
  state = jnp.where(running, new_state.astype(state.dtype), state)
  return state, combine(combination, output, state, weight), after


def _align(items: Array, state: Array) -> Array:
  return items.reshape(items.shape + (1,) * (state.ndim - items.ndim))


def _check(max_steps: int, epsilon: float) -> None:
  if max_steps < 1:
    raise ValueError(f'max_steps: expected at least 1, got {max_steps}')
  if not 0.0 <= epsilon < 1.0:
    raise ValueError(f'epsilon: expected a number in [0, 1), got {epsilon}')
