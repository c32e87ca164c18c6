"""The contract of a halting rule: which items go on, and what a step weighs.

An item is whatever halts by itself: a token `[B, L]`, a row `[B]`, any shape
`*S`. A rule is a frozen dataclass without arrays, which a configuration names:

  rule=dict(name='halting.token_rules:ACT', epsilon=0.05)

The same methods serve training (JAX), the engine and measuring (NumPy), see
`namespace`. Rules of `halting.token_rules` read a score `[*S]` that the model
learns, rules of `halting.row_rules` the logits `[*S, C]` of a head.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Bool, Float

from core import fields

Arrays = jax.Array | np.ndarray


# Fields are Any because JAX also builds these trees of shapes and axis numbers.
@dataclasses.dataclass(frozen=True)
class State:
  """Base of the states of rules, pytrees of arrays `[*S]`."""

  steps: Any  # int32: those that the item has taken, N
  running: Any  # bool: True until the item has halted

  def replace(self, **changes: Any) -> Any:
    """Returns a copy with other fields."""
    return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class HaltingRule(abc.ABC):
  """Decides when an item halts, from the evidence of each of its steps."""

  # How the loop makes the output of the states, see `halting.loop.combine`.
  COMBINATION: ClassVar[str] = 'last'
  KEEPS_STATE: ClassVar[bool] = True  # of an item that has halted

  @abc.abstractmethod
  def start(self, valid: Bool[Arrays, '*S']) -> State:
    """Returns the state before the first step; invalid items start halted."""

  @abc.abstractmethod
  def step(
    self, state: Any, evidence: Any, is_last: Bool[Arrays, '...'] | bool
  ) -> tuple[Any, Float[Any, '*S']]:
    """Takes one step of every running item; all halt if `is_last`.

    Returns (next state, float32 weight of this step in the output, 0 for items
    that had halted before).
    """

  def cost(self, state: Any) -> Float[Arrays, '*S']:
    """Returns the cost of the steps so far, by default their number."""
    return state.steps.astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Halting(State):
  """The state of a `TokenRule`."""

  total: Any  # float32: scores so far, as the rule sums them
  # Float32, the part of the cost that has a gradient, such as R of ACT.
  remainder: Any


@dataclasses.dataclass(frozen=True)
class TokenRule(HaltingRule):
  """A rule that reads a score `[*S]` in [0, 1], usually one for each token."""

  SCORED: ClassVar[bool] = True  # False: the model needs no score
  # The weights of an item are spread over its steps. Otherwise its last step
  # weighs 1, and the output is one of the states.
  MIXES: ClassVar[bool] = False
  COMBINATION: ClassVar[str] = 'accumulated'
  # All items of a row read the score of its first.
  PER_ROW: ClassVar[bool] = False
  # The loss reads all steps, each with the probability to halt in it, which
  # `distribution` returns; see `train_lib.expected_loss`.
  EVERY_STEP: ClassVar[bool] = False

  def __post_init__(self):
    fields.check(type(self), dataclasses.asdict(self), '')

  def start(self, valid: Bool[Arrays, '*S']) -> Halting:
    """See the base."""
    xp = namespace(valid)
    zeros = xp.zeros_like(valid, dtype=xp.float32)
    steps = xp.zeros_like(valid, dtype=xp.int32)
    return Halting(total=zeros, remainder=zeros, steps=steps, running=valid)

  def resume(
    self, valid: Bool[Arrays, '*S'], carried: Float[Arrays, '*S']
  ) -> tuple[Halting, Float[Arrays, '*S']]:
    """Starts an input of a sequence with what `carry_over` left, 0 at first.

    Returns (state, share of the last output: 1 where this input is skipped).
    """
    return self.start(valid), namespace(carried).zeros_like(carried)

  def carry_over(self, state: Halting) -> Float[Arrays, '*S']:
    """Returns what an input leaves to the next; see `resume`."""
    return namespace(state.total).zeros_like(state.total)

  def cost(self, state: Halting) -> Float[Arrays, '*S']:
    """Returns the steps plus `remainder`."""
    return super().cost(state) + state.remainder

  def distribution(
    self, scores: Float[Arrays, 'N ...']
  ) -> Float[Arrays, 'N ...']:
    """Returns the probability to halt in each step, of an EVERY_STEP rule."""
    raise NotImplementedError(f'{type(self).__name__} halts in one step')

  def cheaper(self) -> tuple['TokenRule', ...]:
    """Returns the same rule with settings that halt earlier, for a sweep."""
    return ()


def weigh(
  rule: HaltingRule, evidence: Float[Arrays, 'N ...'], valid: Bool[Arrays, '*S']
) -> tuple[Any, Float[Any, 'N ...']]:
  """Applies a rule to the evidence of N steps; returns (state, weights)."""
  state, weights, last = rule.start(valid), [], len(evidence) - 1
  for n, current in enumerate(evidence):
    state, weight = rule.step(state, current, n == last)
    weights.append(weight)
  return state, namespace(evidence).stack(weights)


def namespace(x: Arrays) -> Any:
  """Returns the functions for an array: NumPy or `jax.numpy`."""
  return x.__array_namespace__()


def no_value(x: Float[Arrays, '*S']) -> Float[Arrays, '*S']:
  """Returns zero with derivative 1, of a straight-through estimator."""
  if isinstance(x, np.ndarray | np.generic):
    return np.zeros_like(x)
  return x - jax.lax.stop_gradient(x)
