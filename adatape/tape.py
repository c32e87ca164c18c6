"""Adaptive Tape Reading (AdaTape, Algorithm 2): a tape of bank tokens per row.

At each step the query selects its top-K bank tokens. Their softmax-weighted sum
is the tape token, and the query becomes the mean of itself and that token (or
the token, with query_update='replace'). A row halts when the sum of the steps'
largest weights reaches tau, or after T steps.

Two passes make the gradient cheap: `select` finds the indices without a
gradient, then `replay` computes weights, tokens and loss from the K * T chosen
rows alone. Halting is computed per row in float32.

A used token's score is set to -inf. Algorithm 2 as printed sets it to 0, which
is above every negative score: a token could be read twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from adatape.reading import Reading
from core.errors import ConfigError
from model_lib.logical import over_rows

# One bank for all rows, or one per row.
Bank = (
  Float[Array, 'C H']
  | Float[Array, 'B C H']
  | Float[np.ndarray, 'C H']
  | Float[np.ndarray, 'B C H']
)


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
  bank: Bank,
  query: Float[Array, 'B h'] | Float[np.ndarray, 'B h'],
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
    bank: one bank for all rows, or one per row; at least K * T tokens.
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
  if query.shape[-1] != reading.query_dim:
    raise ConfigError(
      'query_dim', query.shape[-1], f'queries of width {reading.query_dim}'
    )
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
  """Picks the bank tokens of every row, without gradient; see `read`.

  `keys` and `query` are the leading features of the normalised bank and query.
  """
  keys, query = jax.lax.stop_gradient(
    (keys.astype(jnp.float32), query.astype(jnp.float32))
  )
  penalty = jnp.zeros_like(query, shape=(query.shape[0], keys.shape[-2]))
  if dropped is not None:
    penalty = jnp.where(dropped, -jnp.inf, penalty)
  if reading.fixed_length:
    scores = _scores(keys, query, reading) + penalty
    indices = jax.lax.top_k(scores, reading.max_steps)[1]
    every = indices >= 0
    count = every.sum(-1, dtype=jnp.float32)
    return Selection(indices[..., None], every, every, halting=count)
  batch, steps = query.shape[0], reading.max_steps
  state = State(
    query=query,
    penalty=penalty,
    running=jnp.ones_like(query[:, 0], bool),
    halting=jnp.zeros_like(query[:, 0]),
  )
  # `zeros_like` the query, so they have the query's varying mesh axes.
  picks = steps, batch, reading.tokens_per_step
  indices = jnp.zeros_like(query, jnp.int32, shape=picks)
  flags = jnp.zeros_like(query, bool, shape=picks[:2])

  def unfinished(carry):
    time, state, _ = carry
    return (time < steps) & (state.running.any() if stop_early else True)

  def body(carry):
    time, state, records = carry
    state, record = _step(keys, state, reading)
    put = jax.lax.dynamic_update_index_in_dim
    records = jax.tree.map(lambda x, y: put(x, y, time, 0), records, record)
    return time + 1, state, records

  start = jnp.int32(0), state, (indices, flags, flags)
  _, state, records = jax.lax.while_loop(unfinished, body, start)
  indices, appended, continued = (x.swapaxes(0, 1) for x in records)
  return Selection(indices, appended, continued, state.halting)


def gather(
  bank: Float[Array, 'C H'] | Float[Array, 'B C H'],
  indices: Int[Array, 'B T K'],
) -> Float[Array, 'B T K H']:
  """Returns the bank tokens at the indices; the gradient is one scatter-add."""
  if bank.ndim == 2:
    return bank.at[indices].get(mode='promise_in_bounds')
  rows = jnp.arange(indices.shape[0])[:, None, None]
  return bank.at[rows, indices].get(mode='promise_in_bounds')


def replay(
  rows: Float[Array, 'B T K H'],
  query: Float[Array, 'B h'],
  selection: Selection,
  reading: Reading,
) -> tuple[Float[Array, 'B T H'], Float[Array, ' B']]:
  """Repeats the reading on the chosen normalised tokens, differentiably.

  Returns the tape tokens, zero beyond a row's length, and the row's tape loss.
  """
  on_tape = selection.appended[..., None]
  if reading.fixed_length:
    return jnp.where(on_tape, rows[:, :, 0], 0.0), jnp.zeros(rows.shape[0])

  def step(query, inputs):
    picked, continued = inputs
    scores = (picked * _scaled(query, reading)[:, None]).sum(-1)
    weights = jax.nn.softmax(scores, axis=-1)
    return _updated(query, weights, picked, continued, reading), weights

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
  running: Any  # [B]
  halting: Any  # [B]


def _step(keys: Array, state: State, reading: Reading) -> tuple[State, Any]:
  """Returns the next state, and (indices, appended, continued)."""
  indices, weights = choose(keys, state, reading)
  picked = gather(keys, indices[:, None])[:, 0]
  following, continued = advance(state, weights, picked, reading)
  penalty = _without(state.penalty, indices, continued)
  indices = jnp.where(state.running[:, None], indices, 0)
  record = indices, state.running, continued
  return following._replace(penalty=penalty), record


def choose(
  keys: Array, state: State, reading: Reading
) -> tuple[Int[Array, 'B K'], Float[Array, 'B K']]:
  """Returns the bank tokens of a step, and their weights."""
  scores = _scores(keys, state.query, reading) + state.penalty
  top, indices = jax.lax.top_k(scores, reading.tokens_per_step)
  return indices, jax.nn.softmax(top, axis=-1)


def advance(
  state: State, weights: Array, picked: Array, reading: Reading
) -> tuple[State, Bool[Array, ' B']]:
  """Returns the next state but for its penalty, and the rows that continue.

  `picked` `[B, K, h]` are the keys that were chosen.
  """
  reached = state.halting + weights.max(-1)
  continued = state.running & (reached <= reading.threshold)
  halting = jnp.where(continued, reached, state.halting)
  following = State(
    query=_updated(state.query, weights, picked, continued, reading),
    penalty=state.penalty,
    running=continued & (halting < reading.threshold),
    halting=halting,
  )
  return following, continued


def _scores(keys: Array, query: Array, reading: Reading) -> Array:
  # Highest precision: a TPU would otherwise multiply in bfloat16.
  keys_axes = 'ch' if keys.ndim == 2 else 'bch'
  return jnp.einsum(
    f'bh,{keys_axes}->bc',
    _scaled(query, reading),
    keys,
    precision=jax.lax.Precision.HIGHEST,
  )


def _scaled(query: Array, reading: Reading) -> Array:
  # Scale the query before the product: XLA fuses a later division with the
  # softmax's subtraction, which gives NaN for scores above about 3e9.
  return query * reading.query_dim**-0.5


def _updated(query, weights, picked, continued, reading) -> Array:
  """Returns the next query `[B, h]`, merged with the picked `[B, K, h]`."""
  merged = (weights[..., None] * picked).sum(1)
  if reading.query_update == 'average':
    merged = (query + merged) / 2
  return jnp.where(continued[:, None], merged, query)


def _without(penalty: Array, indices: Array, continued: Array) -> Array:
  # Halted rows use an out-of-range index, which the scatter drops.
  places = jnp.where(continued[:, None], indices, penalty.shape[1])
  rows = jnp.arange(penalty.shape[0])[:, None]
  return penalty.at[rows, places].set(-jnp.inf, mode='drop')
