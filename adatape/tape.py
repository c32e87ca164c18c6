"""Adaptive Tape Reading (AdaTape, Algorithm 2): a tape of bank tokens per row.

At each step the query selects its top-K bank tokens. Their softmax-weighted sum
is the tape token, which updates the query. A row halts when the sum of the
steps' largest weights reaches tau (`Threshold`), or after T steps.

Two passes make the gradient cheap: `select` finds the indices without a
gradient, then `replay` computes weights, tokens and loss from the K * T chosen
rows alone. Halting is computed per row in float32.

A used token's score is set to -inf. Algorithm 2 as printed sets it to 0, which
is above every negative score: a token could be read twice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from adatape.reading import Reading
from halting import loop
from model_lib.logical import over_rows

Arrays = Array | np.ndarray
# Of indices that top_k has found.
_IN_BOUNDS: Any = dict(mode='promise_in_bounds', wrap_negative_indices=False)


class Selection(NamedTuple):
  """The picked bank tokens, without gradient."""

  indices: Int[Array, 'B T K']  # distinct within a row's tape; 0 beyond it
  appended: Bool[Array, 'B T']  # True for the first `length` steps of a row
  # True if the step counts for halting and loss; False in the step that exceeds
  # the threshold.
  continued: Bool[Array, 'B T']
  halting: Float[Array, ' B']  # accumulated largest weights


class Tape(NamedTuple):
  """The tape of every row."""

  tokens: Float[Array, 'B T H']  # float32, zero beyond a row's length
  mask: Float[Array, 'B T']  # 1 for the steps whose token is on the tape
  # Bank positions merged into each token, 0 beyond the length; None without a
  # bank.
  indices: Int[Array, 'B T K'] | None
  loss: Float[Array, ' B']  # tape loss, l
  halting: Float[Array, ' B']  # accumulated score
  length: Int[Array, ' B']  # tape length, n


def read(
  bank: Float[Arrays, 'C H'] | Float[Arrays, 'B C H'],
  query: Float[Arrays, 'B h'],
  reading: Reading,
  *,
  normalize: Callable[[Array, int], Array] | None = None,
  dropped: Bool[Array, 'B C'] | None = None,
  stop_early: bool = False,
) -> Tape:
  """Reads a tape for every row.

  Under a mesh (`jax.set_mesh`) that splits the rows, selection and gather run
  inside `jax.shard_map`, so that top_k needs no communication.

  Args:
    bank: at least K * T tokens, for all rows or of each row.
    query: the leading `query_dim` features of the normalised queries.
    normalize: `(tokens, count)` -> the leading `count` features of the
      normalised tokens, float32: the LayerNorm shared with the query; None if
      the bank is normalised. Gradients flow only through the selected tokens.
    dropped: bank tokens hidden from each row; at least K * T must remain.
    stop_early: stop when every row has halted instead of after T steps: the
      same result, bit for bit, for serving.
  """
  bank = jnp.asarray(bank)
  normalize = normalize or (lambda tokens, count: tokens[..., :count])
  reading.check_bank(*bank.shape[-2:])
  query = jnp.asarray(query, jnp.float32)
  keys = normalize(jax.lax.stop_gradient(bank), reading.query_dim)

  def pick(bank, keys, query, dropped):
    selection = select(keys, query, reading, dropped, stop_early)
    return selection, gather(bank, selection.indices)

  per_row = bank.ndim == 3
  pick = over_rows(pick, query.shape[0], (per_row, per_row, True, True))
  selection, rows = pick(bank, keys, query, dropped)
  rows = normalize(rows, rows.shape[-1]).astype(jnp.float32)
  tokens, loss = replay(rows, query, selection, reading)
  return Tape(
    tokens=tokens,
    mask=selection.appended.astype(jnp.float32),
    indices=selection.indices,
    loss=loss,
    halting=selection.halting,
    length=selection.appended.sum(-1, dtype=jnp.int32),
  )


def select(
  keys: Float[Array, 'C h'] | Float[Array, 'B C h'],
  query: Float[Array, 'B h'],
  reading: Reading,
  dropped: Bool[Array, 'B C'] | None = None,
  stop_early: bool = False,
) -> Selection:
  """Picks the bank tokens of every row, without gradient; see `read`."""
  keys, query = jax.lax.stop_gradient(
    (keys.astype(jnp.float32), query.astype(jnp.float32))
  )
  rows = query.shape[0]  # may be symbolic
  penalty = jnp.zeros_like(query, shape=(rows, keys.shape[-2]))
  if dropped is not None:
    penalty = jnp.where(dropped, -jnp.inf, penalty)
  if reading.fixed_length:
    scores = _scores(keys, query, reading) + penalty
    indices = jax.lax.top_k(scores, reading.max_steps)[1]
    every = indices >= 0
    count = every.sum(-1, dtype=jnp.float32)
    return Selection(indices[..., None], every, every, halting=count)
  shape = rows, reading.tokens_per_step
  none = jnp.zeros_like(query, jnp.int32, shape=shape)
  result = loop.run(
    functools.partial(_step, keys, reading),
    State(query, penalty, none),
    jnp.ones_like(query[:, 0], bool),
    reading.rule,
    max_steps=reading.max_steps,
    dynamic=stop_early,
    differentiable=False,
    trace=lambda visit: (visit.after.indices, visit.running, visit.weight > 0),
  )
  indices, appended, continued = (x.swapaxes(0, 1) for x in result.trace)
  indices = jnp.where(appended[..., None], indices, 0)
  return Selection(indices, appended, continued, result.halting.total)


def gather(
  bank: Float[Array, '*N C H'], indices: Int[Array, 'B T K']
) -> Float[Array, 'B T K H']:
  """Returns the bank tokens at the indices; the gradient is one scatter-add."""

  def chosen(rows: Array, places: Array) -> Array:
    return rows.at[places].get(**_IN_BOUNDS)

  return (chosen if bank.ndim == 2 else jax.vmap(chosen))(bank, indices)


def replay(
  rows: Float[Array, 'B T K H'],
  query: Float[Array, 'B h'],
  selection: Selection,
  reading: Reading,
) -> tuple[Float[Array, 'B T H'], Float[Array, ' B']]:
  """Repeats the reading on the chosen normalised tokens, differentiably.

  Returns the tape tokens, zero beyond a row's length, and the tape losses.
  """
  on_tape = selection.appended[..., None]
  if reading.fixed_length:
    return jnp.where(on_tape, rows[:, :, 0], 0.0), jnp.zeros(rows.shape[0])

  def step(query, inputs):
    picked, continued = inputs
    scores = (picked * _scaled(query, reading)[:, None]).sum(-1)
    weights = jax.nn.softmax(scores, axis=-1)
    new = updated(query, weights, picked, reading)
    return jnp.where(continued[:, None], new, query), weights

  keys = rows[..., : reading.query_dim].swapaxes(0, 1)
  _, weights = jax.lax.scan(step, query, (keys, selection.continued.T))
  weights = weights.swapaxes(0, 1)
  tokens = (weights[..., None] * rows).sum(2)
  if reading.loss == 'entropy':
    loss = 1.0 - (weights**2).sum(-1)
  else:
    loss = 1.0 - weights.max(-1)
  loss = jnp.where(selection.continued, loss, 0.0).sum(-1)
  return jnp.where(on_tape, tokens, 0.0), loss


class State(NamedTuple):
  """The rows between two steps."""

  query: Any  # [B, h]
  penalty: Any  # [B, C]: 0, or -inf for tokens that are used or dropped
  indices: Any  # [B, K], of the last step


def _step(
  keys: Array, reading: Reading, state: State, n: Array, running: Array
) -> tuple[State, Array]:
  scores = _scores(keys, state.query, reading) + state.penalty
  top, indices = jax.lax.top_k(scores, reading.tokens_per_step)
  weights = jax.nn.softmax(top, axis=-1)
  picked = gather(keys, indices[:, None])[:, 0]
  query = updated(state.query, weights, picked, reading)
  penalty = jax.vmap(
    lambda row, places: row.at[places].set(-jnp.inf, **_IN_BOUNDS)
  )(state.penalty, indices)
  return State(query, penalty, indices), weights.max(-1)


def updated(
  query: Float[Array, 'B h'],
  weights: Float[Array, 'B K'],
  picked: Float[Array, 'B K h'],
  reading: Reading,
) -> Float[Array, 'B h']:
  """Returns the next query, merged with the tokens that were picked."""
  merged = (weights[..., None] * picked).sum(1)
  return (query + merged) / 2 if reading.query_update == 'average' else merged


def _scores(keys: Array, query: Array, reading: Reading) -> Array:
  # Highest precision: a TPU would otherwise multiply in bfloat16.
  equation = 'bh,ch->bc' if keys.ndim == 2 else 'bh,bch->bc'
  scaled, precision = _scaled(query, reading), jax.lax.Precision.HIGHEST
  return jnp.einsum(equation, scaled, keys, precision=precision)


def _scaled(query: Array, reading: Reading) -> Array:
  # Scale the query before the product: XLA fuses a later division with the
  # softmax's subtraction, which gives NaN for scores above about 3e9.
  return query * reading.query_dim**-0.5
