"""Tape reading whose steps are called by the host, as ONNX Runtime has no loop.

One program computes a step of all rows; the host hides the tokens that a row
has read. See `adatape.tape` for the algorithm.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adatape import tape
from adatape.model import TapeClassifier
from halting.rule import Halting


@dataclasses.dataclass(frozen=True)
class HostReading:
  """The first stage, a program of `serve_lib.chain.Resizable`.

  The carry is (tokens at the insertion `[B, L, H]`, tape `[B, T, H]`, its mask
  `[B, T]`).
  """

  begin: Any  # programs, see `build`
  step: Any
  result: Any

  def __call__(self, arguments: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Reads until all rows have halted; outputs `'length'`, int32 `[B]`."""
    inputs, *like = arguments
    given, _ = self.begin([inputs, *like])
    x, (_, shape, _) = given.pop('x'), self.result[0]
    tokens = np.zeros((len(x), *shape.shape[1:]), np.float32)
    mask = np.zeros(tokens.shape[:2], np.float32)
    for time in range(tokens.shape[1]):
      if not (running := given['running']).any():
        break
      mask[:, time] = running
      new, _ = self.step([given, *like])
      tokens[running, time] = new.pop('token')[running]
      on = np.flatnonzero(new.pop('continued'))
      given['penalty'][on[:, None], new.pop('indices')[on]] = -np.inf
      given |= new
    return (x, tokens, mask), {'length': mask.sum(1).astype(np.int32)}


def build(
  model: TapeClassifier,
  convert: Callable[[Any], Any],
  inputs: Any,
  compile: Callable[..., Any],
) -> HostReading:
  """Compiles the reading of a model; see `serve_lib.chain.Resizable`.

  `convert` maps a batch of the reader to the model's inputs. Raises ValueError
  for a tape that is not read in steps.
  """
  reading = model.reading()
  if reading is None or reading.fixed_length:
    raise ValueError('a tape of fixed length')

  def first(variables: Any, batch: Any) -> Any:
    return model.apply(variables, convert(batch), method=_begin), {}

  def later(variables: Any, given: Any) -> Any:
    row = convert(jax.tree.map(_row_of_zeros, inputs))
    return model.apply(variables, given, row, method=_step), {}

  begin = compile(first, inputs)
  shapes = {**begin.result[0]}
  x, array = shapes.pop('x'), jax.ShapeDtypeStruct
  rows, steps, width = x.shape[0], reading.max_steps, x.shape[-1]
  tokens = array((rows, steps, width), jnp.float32)
  carry = x, tokens, array((rows, steps), jnp.float32)
  return HostReading(begin, compile(later, shapes), (carry, {}))


def _begin(model: Any, inputs: Any) -> dict[str, Any]:
  """Returns the tokens at the insertion, the state, and a row's own bank."""
  x, bank = model.embed(inputs)
  x = model.encoder.before(x)
  rows, query = x.shape[0], model.encoder.query(x)
  penalty = jnp.zeros((rows, bank.shape[-2]))
  found = {'x': x, 'query': query, 'penalty': penalty}
  found |= vars(model.reading().rule.start(jnp.ones(rows, bool)))
  if bank.ndim == 3:  # else it is in the parameters
    found['bank'] = bank
    found['keys'] = model.encoder.tape_norm(bank, query.shape[-1])
  return found


def _step(model: Any, given: Any, row: Any) -> dict[str, Any]:
  """Returns a step's `token` `[B, H]` and the state but for its penalty.

  Also the rows that are `continued` `[B]`, and `indices` `[B, K]` to hide from
  them. `row` is any input, for a bank that does not depend on it.
  """
  norm, reading = model.encoder.tape_norm, model.reading()
  names = (field.name for field in dataclasses.fields(Halting))
  state = Halting(**{name: given[name] for name in names})
  query, penalty = given['query'], given['penalty']
  if 'bank' in given:
    keys = given['keys']
    indices, weights = tape.choose(keys, query, penalty, reading)
    picked = jnp.take_along_axis(given['bank'], indices[..., None], axis=1)
  else:
    bank = model.embed(row)[1]
    keys = norm(bank, reading.query_dim)
    indices, weights = tape.choose(keys, query, penalty, reading)
    picked = tape.gather(bank, indices[:, None])[:, 0]
  picked = norm(picked, picked.shape[-1])
  state, weight = reading.rule.step(state, weights.max(-1), False)
  keys = picked[..., : reading.query_dim]
  query = tape.updated(query, weights, keys, reading)
  found = {'query': query, 'indices': indices, 'continued': weight > 0}
  found |= vars(state)
  return found | {'token': (weights[..., None] * picked).sum(1)}


def _row_of_zeros(leaf: Any) -> jax.Array:
  return jnp.zeros((1, *leaf.shape[1:]), leaf.dtype)
