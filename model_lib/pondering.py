"""The loop of adaptive depth: a step function and a rule of `halting`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

from core.errors import ConfigError
from model_lib import blocks, halting
from model_lib.halting import Halting, Rule

# step(state, n) -> (next state, score of step n); n counts from 0. A state is
# a pytree of arrays whose leading axes are those of the items.
Step = Callable[[Any, Array], tuple[Any, Any]]
# trace(state before, state after, halting after) -> pytree, stacked over steps.
Trace = Callable[[Any, Any, Halting], Any]


@struct.dataclass
class Pondered:
  """The result of pondering."""

  output: Any  # combination of the states, float32; 'fed_back': the last state
  halting: Any  # the final `Halting`
  depth: Any  # steps that were executed for the batch, int32 scalar
  trace: Any = None  # outputs of `trace`, stacked on a new first axis


def ponder(
  step: Step,
  state: Any,
  begin: Halting | Bool[Array, '*S'],
  *,
  max_steps: int,
  rule: Rule = halting.advance,
  combination: str = 'accumulated',
  dynamic: bool = False,
  remat_chunk: int = 0,
  unroll: bool = False,
  freeze: bool = True,
  trace: Trace | None = None,
) -> Pondered:
  """Ponders for `max_steps` static steps, masked, or until all have halted.

  Args:
    step: see `Step`; the score is `[*S]`.
    state: before the first step, a pytree of arrays `[*S, ...]`.
    begin: initial `Halting`, or a mask `[*S]` that is False for padding.
    rule: turns scores into weights, see `halting.rule`.
    combination: see `halting.combine`.
    dynamic: skip the steps after the last item has halted: the same result and
      gradient except for `depth`, but no trace. With a batch on several devices
      every step waits for all of them.
    remat_chunk: 0 keeps all intermediates for the gradient (a dynamic loop that
      is not unrolled takes 1 instead); 1 keeps the state before each step and
      runs it twice; a larger divisor of max_steps keeps max_steps / chunk +
      chunk states and runs each step three times.
    unroll: calls `step` with integers n, for steps that differ; no trace, and
      `remat_chunk` is not used.
    freeze: an item that has halted keeps its state; otherwise its state goes on
      (PonderNet's losses need every step), and its output stays.
    trace: records each step.
  """
  if max_steps < 1:
    raise ConfigError('max_steps', max_steps, 'at least 1')
  output = None  # of 'fed_back', whose output is the state
  if combination != 'fed_back':
    output = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), state)
  begun = begin if isinstance(begin, Halting) else halting.start(begin)
  carry = state, output, begun
  settings = max_steps, rule, combination, freeze, trace
  body: Any = functools.partial(_ponder, step, settings)
  if trace is not None and (dynamic or unroll):
    raise ConfigError('trace', trace, 'None with dynamic=True or unroll=True')
  traced, depth = None, jnp.asarray(max_steps, jnp.int32)
  if dynamic:
    body = functools.partial(_skipping, body)
    remat_chunk = remat_chunk or 1  # else each `cond` copies the weights
  if unroll:
    carry, traced = _unrolled(body, carry, max_steps)
  else:
    carry, traced = scan_steps(body, carry, max_steps, remat_chunk)
  if dynamic:
    depth, traced = traced.sum(), None
  state, output, halted = carry
  if output is None:
    output = jax.tree.map(lambda x: x.astype(jnp.float32), state)
  return Pondered(output, halted, depth, traced)


def scan_steps(
  body: Callable[[Any, Array], tuple[Any, Any]],
  carry: Any,
  max_steps: int,
  remat_chunk: int = 0,
) -> tuple[Any, Any]:
  """Scans `body(carry, n)` over the steps, rematerialised; see `ponder`."""
  steps = jnp.arange(max_steps)
  if not remat_chunk:
    return jax.lax.scan(blocks.again(body, in_scan=True), carry, steps)
  if remat_chunk < 0 or max_steps % remat_chunk:
    expected = f'0 or a divisor of {max_steps}, best near its root'
    raise ConfigError('remat_chunk', remat_chunk, expected)
  body = jax.checkpoint(body, prevent_cse=False)
  if remat_chunk == 1:
    return jax.lax.scan(body, carry, steps)

  def chunk(carry: Any, steps: Any) -> Any:
    return jax.lax.scan(body, carry, steps)

  chunk = jax.checkpoint(chunk, prevent_cse=False)
  carry, traced = jax.lax.scan(chunk, carry, steps.reshape(-1, remat_chunk))
  flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), traced)
  return carry, flat


def _unrolled(body, carry, max_steps):
  """Runs `body(carry, n)` with integers n; what it traces is stacked."""
  traced = []
  for n in range(max_steps):
    carry, one = blocks.again(lambda carry, n=n: body(carry, n))(carry)
    traced.append(one)
  return carry, jax.tree.map(lambda *ones: jnp.stack(ones), *traced)


def _skipping(body, carry, n):
  """Runs `body` if an item is running; returns whether it did, as int32."""
  running = carry[2].running.any()
  run = functools.partial(lambda n, carry: body(carry, n)[0], n)
  carry = jax.lax.cond(running, run, lambda carry: carry, carry)
  return carry, running.astype(jnp.int32)


def _ponder(step, settings, carry, n):
  """Runs step n of `ponder`; the carry is (state, output, `Halting`)."""
  max_steps, rule, combination, freeze, trace = settings
  state, output, before = carry
  new_state, score = step(state, n)
  after, weight = rule(before, score, n == max_steps - 1)

  def combined(previous: Array, new: Array) -> Array:
    return halting.combine(combination, previous, new, weight)

  if output is None:
    new_state = jax.tree.map(combined, state, new_state)
  else:
    output = jax.tree.map(combined, output, new_state)

  # A halted item keeps its state ("its state is simply copied to the next
  # step", Universal Transformer, section 2.2).
  def kept(old: Array, new: Array) -> Array:
    new = new.astype(old.dtype)
    running = halting.align(before.running, old)
    return jnp.where(running, new, old) if freeze else new

  new_state = jax.tree.map(kept, state, new_state)
  traced = None if trace is None else trace(state, new_state, after)
  return (new_state, output, after), traced
