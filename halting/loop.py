"""The loop of adaptive computation: evidence, rule, weighted states.

In every step `run` applies a model's step to the state, asks the rule which
items go on, and adds the new state to the output with its weight. An item that
has halted keeps its state, if its rule says so. The loop has three forms with
the same result:

- masked (default): all steps for all items, a `lax.scan`; for training.
- `dynamic`: ends when all items have halted, by skipping the steps that are
  left; with `differentiable=False` by a `while_loop`.
- `unroll`: a Python loop, for steps that differ; may be `dynamic` too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from core.errors import ConfigError, check_option
from halting.rule import Arrays, HaltingRule
from model_lib import blocks

# step(state, n, running `[*S]`) -> (next state, evidence for the rule); n is
# 0, 1, ... A state is a pytree of arrays that begin with the axes of the items.
Step = Callable[[Any, Any, Any], tuple[Any, Any]]
COMBINATIONS = ('accumulated', 'basic', 'fed_back', 'last')


class Result(NamedTuple):
  """The result of the loop."""

  output: Any  # combination of the states, float32; see `combine`
  halting: Any  # the final state of the rule
  depth: Any  # steps that were executed for the batch, int32 scalar
  trace: Any = None  # outputs of `trace`, stacked on a new first axis


class Visit(NamedTuple):
  """A step as `trace` sees it; `running` are the items that took it."""

  before: Any  # states
  after: Any
  running: Any
  evidence: Any
  weight: Any
  halting: Any  # state of the rule after the step


class Carry(NamedTuple):
  """What a step hands to the next; no output where it is the state."""

  state: Any
  output: Any
  halting: Any


def run(
  step: Step,
  state: Any,
  begin: Any,
  rule: HaltingRule,
  *,
  max_steps: int,
  combination: str = '',
  dynamic: bool = False,
  differentiable: bool = True,
  unroll: bool = False,
  remat_chunk: int = 0,
  trace: Callable[[Visit], Any] | None = None,
) -> Result:
  """Runs up to `max_steps` steps of items that halt by a rule.

  Args:
    step: see `Step`.
    state: before the first step, a pytree of arrays `[*S, ...]`.
    begin: mask `[*S]` that is False for padding, or a started state of `rule`.
    rule: turns the evidence of steps into their weights.
    combination: see `combine`; '' for that of the rule.
    dynamic: skip the steps after the last item has halted: the same result and
      gradient except for `depth`. Devices wait for each other in every step.
    differentiable: False for a `dynamic` loop without a gradient. Only this one
      has a trace, 0 in the steps that were not executed.
    unroll: calls `step` with integers n; `remat_chunk` is not used.
    remat_chunk: 0 keeps all intermediates for the gradient (a dynamic loop that
      is not unrolled takes 1); 1 keeps the state before each step and runs it
      twice; a larger divisor of max_steps keeps max_steps / chunk + chunk
      states and runs each step three times.
    trace: records each step.
  """
  if max_steps < 1:
    raise ConfigError('max_steps', max_steps, 'at least 1')
  combination = combination or rule.COMBINATION
  check_option('combination', combination, COMBINATIONS)
  skips = dynamic and (differentiable or unroll)
  if trace is not None and skips:
    raise ConfigError('trace', trace, 'None if steps are skipped')
  begun = rule.start(begin) if isinstance(begin, Arrays) else begin
  output = None
  if combination in ('accumulated', 'basic'):
    output = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), state)
  carry = Carry(state, output, begun)
  settings = rule, max_steps, combination, dynamic or rule.KEEPS_STATE, trace
  body: Any = functools.partial(_visit, step, settings)
  if dynamic and not skips:
    carry, traced, depth = _until_halted(body, carry, max_steps)
  else:
    chunk = remat_chunk or int(skips)  # else each `cond` copies the weights
    scan = _unrolled if unroll else functools.partial(_scanned, chunk)
    body = functools.partial(_skipping, body) if skips else body
    carry, traced = scan(body, carry, max_steps)
    depth = traced.sum() if skips else jnp.asarray(max_steps, jnp.int32)
  state, output, halted = carry
  if output is None:
    output = jax.tree.map(lambda x: x.astype(jnp.float32), state)
  return Result(output, halted, depth, None if skips else traced)


def combine(
  combination: str,
  previous: Float[Array, '...'],
  state: Float[Array, '...'],
  weight: Float[Array, '*S'],
) -> Float[Array, '...']:
  """Adds a step's state to the output so far, `previous`, in float32.

  - 'accumulated' sums `weight * state` (ACT, equation 6).
  - 'basic' gives `weight * state + (1 - weight) * previous`.
  - 'fed_back' does too, and the next step reads the result (adaptive-depth
    ALBERT, equation 5).
  - 'last' is the last state, without a call.
  """
  weight = align(weight, state)
  share = weight * state.astype(jnp.float32)
  keep = 1.0 if combination == 'accumulated' else 1.0 - weight
  return keep * previous.astype(jnp.float32) + share


def align(items: Array, state: Array) -> Array:
  """Appends axes of size 1 until `items` broadcasts over `state`."""
  return items.reshape(items.shape + (1,) * (state.ndim - items.ndim))


def _visit(step, settings, carry: Carry, n) -> tuple[Carry, Any]:
  """Runs step n; returns the carry and what `trace` records."""
  rule, max_steps, combination, keeps, trace = settings
  state, output, before = carry
  new, evidence = step(state, n, before.running)
  after, weight = rule.step(before, evidence, n == max_steps - 1)

  def combined(previous: Array, new: Array) -> Array:
    return combine(combination, previous, new, weight)

  if output is not None:
    output = jax.tree.map(combined, output, new)
  elif combination == 'fed_back':
    new = jax.tree.map(combined, state, new)

  # A halted item keeps its state ("its state is simply copied to the next
  # step", Universal Transformer, section 2.2).
  def kept(old: Array, new: Array) -> Array:
    new = new.astype(old.dtype)
    return jnp.where(align(before.running, old), new, old) if keeps else new

  new = jax.tree.map(kept, state, new)
  record = None
  if trace is not None:
    record = trace(Visit(state, new, before.running, evidence, weight, after))
  return Carry(new, output, after), record


def _scanned(
  remat_chunk: int, body: Callable[..., Any], carry: Carry, max_steps: int
) -> tuple[Carry, Any]:
  """Runs all steps in a scan, rematerialised; see `run`."""
  steps = jnp.arange(max_steps)
  if not remat_chunk:
    return jax.lax.scan(blocks.again(body, in_scan=True), carry, steps)
  if remat_chunk < 0 or max_steps % remat_chunk:
    expected = f'0 or a divisor of {max_steps}, best near its root'
    raise ConfigError('remat_chunk', remat_chunk, expected)
  body = jax.checkpoint(body, prevent_cse=False)
  if remat_chunk == 1:
    return jax.lax.scan(body, carry, steps)

  def chunk(carry: Carry, steps: Any) -> Any:
    return jax.lax.scan(body, carry, steps)

  chunk = jax.checkpoint(chunk, prevent_cse=False)
  carry, traced = jax.lax.scan(chunk, carry, steps.reshape(-1, remat_chunk))
  flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), traced)
  return carry, flat


def _unrolled(body, carry: Carry, max_steps: int) -> tuple[Carry, Any]:
  """Runs `body(carry, n)` with integers n."""
  records = []
  for n in range(max_steps):
    carry, record = blocks.again(lambda carry, n=n: body(carry, n))(carry)
    records.append(record)
  return carry, jax.tree.map(lambda *steps: jnp.stack(steps), *records)


def _skipping(body, carry: Carry, n) -> tuple[Carry, Array]:
  """Runs `body` if an item is running; returns whether it did, as int32."""
  running = carry.halting.running.any()
  visit = functools.partial(lambda n, carry: body(carry, n)[0], n)
  carry = jax.lax.cond(running, visit, lambda carry: carry, carry)
  return carry, running.astype(jnp.int32)


def _until_halted(body, carry: Carry, max_steps: int) -> tuple[Any, Any, Any]:
  """Runs steps while an item is running; returns (carry, records, depth)."""

  def goes_on(turn: Any) -> Bool[Array, '']:
    n, carry, _ = turn
    return (n < max_steps) & carry.halting.running.any()

  def advance(turn: Any) -> Any:
    n, carry, records = turn
    carry, record = body(carry, n)
    put = jax.lax.dynamic_update_index_in_dim
    records = jax.tree.map(lambda x, y: put(x, y, n, 0), records, record)
    return n + 1, carry, records

  def empty(leaf: Any) -> Array:  # with the varying mesh axes of the items
    shape = max_steps, *leaf.shape
    return jnp.zeros_like(carry.halting.steps, dtype=leaf.dtype, shape=shape)

  _, record = jax.eval_shape(body, carry, jnp.int32(0))
  start = jnp.int32(0), carry, jax.tree.map(empty, record)
  depth, carry, records = jax.lax.while_loop(goes_on, advance, start)
  return carry, records, depth
