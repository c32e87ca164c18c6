"""Halting in depth as pure functions; equation numbers as in Fojo's overview.

- ACT (Graves 2016): `N = min{k : sum_{j<=k} p^j >= 1 - epsilon}` (4), at most
  the step limit; `R = 1 - sum_{j<N} p^j` (5). The states have the weights `p^1
  .. p^{N-1}, R` (6-7), which sum to 1. The cost is `rho = N + R` (8-9).
- Straight-through ACT (10-19): the output is the state of step N alone. `f_b(x)
  = [x >= 1 - epsilon]` has derivative 1.
- Skip-ACT (20-30): straight-through ACT with scores of up to mu. The excess
  over 1 is carried over to the next input and may skip it.
- PonderNet (Banino et al. 2021): a distribution over the steps, see
  `model_lib.ponder_net`.

All arrays are float32. An item that halts has any shape `*S`: a token `[B, L]`
or an example `[B]`. `model_lib.pondering` has the loop.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from core.errors import ConfigError, check_option

COMBINATIONS = ('accumulated', 'basic', 'fed_back')


# Fields are Any because JAX also builds these trees of shapes and axis numbers.
@struct.dataclass
class Halting:
  """The state of halting of each item."""

  # Float32. ACT: sum of the scores before the last step. Straight-through: h,
  # the sum of all scores plus the carried one.
  total: Any
  # Float32. ACT: R, 0 until the item has halted. Straight-through: value 0;
  # carries the gradient of the cost.
  remainder: Any
  steps: Any  # int32: N so far
  running: Any  # bool: True until the item has halted


# rule(halting, score, is_last) -> (halting after the step, weight `*S`).
Rule = Callable[[Halting, Any, Any], tuple[Halting, Any]]


def start(valid: Bool[Array, '*S']) -> Halting:
  """Returns the state before the first step; invalid items start halted."""
  zeros = jnp.zeros(valid.shape, jnp.float32)
  return Halting(zeros, zeros, zeros.astype(jnp.int32), valid)


def advance(
  halting: Halting,
  score: Float[Array, '*S'],
  is_last: Bool[Array, '...'] | bool,
  epsilon: float = 0.01,
) -> tuple[Halting, Float[Array, '*S']]:
  """Takes one step of every running item by ACT, equations (4) to (7).

  An item halts when its scores `p^n`, each in [0, 1], sum to at least `1 -
  epsilon`, and in any case if `is_last`. Returns (halting after the step,
  weight of the step's state, 0 if halted before).
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


def advance_straight_through(
  halting: Halting,
  score: Float[Array, '*S'],
  is_last: Bool[Array, '...'] | bool,
  epsilon: float = 0.01,
) -> tuple[Halting, Float[Array, '*S']]:
  """Takes one step by straight-through ACT, equations (15) to (18).

  The weight of step n is `f_b(h^n)`: 1 at N, 0 at every other step. Its
  derivative by `h^n` is 1 at every step up to N, also at a forced halt. The
  cost is `1 + sum_{j=1}^N (1 - f_b(h^j))`, which is N; equation (16) as printed
  gives N - 1. Its derivative by each `h^j` is -1. See `advance`.
  """
  score = score.astype(jnp.float32)
  summed = halting.total + score
  halts = halting.running & ((summed >= 1.0 - epsilon) | is_last)
  slope = jnp.where(halting.running, _no_value(summed), 0.0)
  after = Halting(
    total=jnp.where(halting.running, summed, halting.total),
    remainder=halting.remainder - slope,
    steps=halting.steps + halting.running.astype(jnp.int32),
    running=halting.running & ~halts,
  )
  return after, halts.astype(jnp.float32) + slope


def start_carried(
  valid: Bool[Array, '*S'],
  carried: Float[Array, '*S'],
  epsilon: float = 0.01,
) -> tuple[Halting, Float[Array, '*S']]:
  """Begins an input of Skip-ACT, equations (24) to (29).

  The next state is `skip * s_{t-1} + (1 - skip) * s`, where s accumulates the
  straight-through steps (the sum starts at j = 1, as no `s^0` is defined). N of
  a skipped input is 0. `carried` is `h^0`, from `carry_over`, 0 at the first
  input. Returns (halting before step 1, skip `f_b(h^0)`).
  """
  skips = carried >= 1.0 - epsilon
  begun = start(valid & ~skips)
  # The term j = 0 of the cost, `1 - f_b(h^0)`, has a derivative too.
  slope = jnp.where(valid, _no_value(carried), 0.0)
  begun = dataclasses.replace(begun, total=carried, remainder=-slope)
  return begun, skips.astype(jnp.float32) + _no_value(carried)


def carry_over(halting: Halting, epsilon: float = 0.01) -> Float[Array, '*S']:
  """Returns `h^0` of the next input, `h^N - 1` (24); 0 after a forced halt."""
  reached = halting.total >= 1.0 - epsilon
  return jnp.where(reached, halting.total - 1.0, 0.0)


def advance_ponder_net(
  halting: Halting,
  score: Float[Array, '*S'],
  is_last: Bool[Array, '...'] | bool,
  epsilon: float = 0.5,
) -> tuple[Halting, Float[Array, '*S']]:
  """Takes one step of every running item by PonderNet (Banino et al. 2021).

  `score` is lambda_n, the probability to halt in step n if it runs, and `total`
  that of having halted. An item halts at the quantile `1 - epsilon` of the
  distribution over steps (the Q-exit of PALBERT, Balagansky and Gavrilov 2022),
  by default in the median step. The weight is 1 there; see `advance`.
  """
  score = score.astype(jnp.float32)
  halted = halting.total + (1.0 - halting.total) * score
  halts = halting.running & ((halted >= 1.0 - epsilon) | is_last)
  after = dataclasses.replace(
    halting,
    total=jnp.where(halting.running, halted, halting.total),
    steps=halting.steps + halting.running.astype(jnp.int32),
    running=halting.running & ~halts,
  )
  return after, halts.astype(jnp.float32)


RULES: dict[str, Callable[..., Any]] = {
  'act': advance,
  'straight_through': advance_straight_through,
  'ponder_net': advance_ponder_net,
}


def rule(name: str, epsilon: float = 0.01) -> Rule:
  """Returns the rule of a name in `RULES`; `epsilon` is in [0, 1)."""
  check_option('rule', name, tuple(RULES))
  if not 0.0 <= epsilon < 1.0:
    raise ConfigError('epsilon', epsilon, 'a number in [0, 1)')
  return functools.partial(RULES[name], epsilon=epsilon)


def ponder_cost(halting: Halting) -> Float[Array, '*S']:
  """Returns `rho`: N + R of ACT (8), else N (19), (30).

  The gradient is that of R, or of the sum in `advance_straight_through`.
  """
  return halting.steps.astype(jnp.float32) + halting.remainder


def combine(
  combination: str,
  previous: Float[Array, '...'],
  state: Float[Array, '...'],
  weight: Float[Array, '*S'],
) -> Float[Array, '...']:
  """Adds a step's state to the output so far, `previous`, in float32.

  'accumulated' sums `weight * state` (6); 'basic' and 'fed_back' give `weight *
  state + (1 - weight) * previous`; the next step reads the result of 'fed_back'
  (adaptive-depth ALBERT, equation 5). All keep the output of a halted item.
  """
  check_option('combination', combination, COMBINATIONS)
  weight = align(weight, state)
  share = weight * state.astype(jnp.float32)
  keep = 1.0 if combination == 'accumulated' else 1.0 - weight
  return keep * previous.astype(jnp.float32) + share


def align(items: Array, state: Array) -> Array:
  """Appends axes of size 1 until `items` broadcasts over `state`."""
  return items.reshape(items.shape + (1,) * (state.ndim - items.ndim))


def _no_value(x: Array) -> Array:
  """Returns zero with derivative 1."""
  return x - jax.lax.stop_gradient(x)
