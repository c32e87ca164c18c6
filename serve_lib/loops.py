"""A stage that rows come back to: recurrent depth, served.

The stage is one step, whose carries have one structure and shape. The carry has
all that a row remembers, also the number of its iteration: so rows at different
iterations share a batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval

from core.errors import ConfigError

Count = Annotated[int, Interval(ge=1, le=10**6)]


@dataclasses.dataclass(frozen=True)
class Loop:
  """Which stage of a chain is a loop, and for how long.

  A row leaves the loop when `Policy.decide` says so, or at the limit. Then it
  is answered, or goes to the next stage if there is one.
  """

  stage: Count  # not the first
  limit: Count  # iterations of a row, a multiple of `iterations`
  # In a visit, so that rows wait for a batch less often. More than one needs an
  # output 'running', bool `[B]`: other rows keep their carry and outputs.
  iterations: Count = 1

  def __post_init__(self):
    if self.limit % self.iterations:
      legal = f'a multiple of {self.iterations}, the iterations of a visit'
      raise ConfigError('loop.limit', self.limit, legal)

  @property
  def visits(self) -> int:
    """Times that a row runs the stage at most."""
    return self.limit // self.iterations


@runtime_checkable
class Looping(Protocol):
  """A chain of which one stage may be a loop."""

  loop: Loop | None


def loop_of(chain: Any) -> Loop | None:
  """Returns the loop of a chain; raises ConfigError if it has no such stage."""
  loop = chain.loop if isinstance(chain, Looping) else None
  if loop and not 0 < loop.stage < chain.num_stages:
    legal = f'a stage after the first of {chain.num_stages}'
    raise ConfigError('loop.stage', loop.stage, legal)
  return loop


def at(loop: Loop | None, stage: int) -> Loop | None:
  """Returns the loop if a stage is it."""
  return loop if loop and loop.stage == stage else None


def repeat(
  step: Callable[[Any], tuple[Any, Any]], carry: Any, count: int
) -> tuple[Any, Any]:
  """Runs `step(carry)` up to `count` times, in JAX; see `Loop.iterations`."""
  if count == 1:
    return step(carry)
  _, shapes = jax.eval_shape(step, carry)
  outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  outputs['running'] = jnp.ones_like(outputs['running'])  # for the first step

  def goes_on(turn: Any) -> Any:
    number, _, outputs = turn
    return (number < count) & outputs['running'].any()

  def body(turn: Any) -> Any:
    number, *before = turn
    return number + 1, *_advanced(jnp, before, step(before[0]))

  _, *last = jax.lax.while_loop(goes_on, body, (0, carry, outputs))
  return last[0], last[1]


def repeat_on_host(
  step: Callable[[Any], tuple[Any, Any]], carry: Any, count: int
) -> tuple[Any, Any]:
  """Does what `repeat` does with a compiled step and NumPy arrays."""
  result = step(carry)
  for _ in range(count - 1):
    if not result[1]['running'].any():
      break
    result = _advanced(np, result, step(result[0]))
  return result


def _advanced(xp: Any, before: Any, after: Any) -> Any:
  """Returns `after` for the rows that were running, else `before`."""
  running = before[1]['running']

  def chosen(old: Any, new: Any) -> Any:
    is_running = running.reshape(-1, *(1,) * (new.ndim - 1))
    return xp.where(is_running, new, old)

  return jax.tree.map(chosen, tuple(before), tuple(after))
