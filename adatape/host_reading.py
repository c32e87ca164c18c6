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
from adatape.tape import State


@dataclasses.dataclass(frozen=True)
class HostReading:
  """The first stage, as `serve_lib.chain.Program`.

  The carry is (tokens at the insertion `[B, L, H]`, tape `[B, T, H]`, its mask
  `[B, T]`).
  """

  begin: Any  # programs, see `build`
  step: Any
  result: Any
  bank_size: int

  def __call__(self, arguments: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Reads until all rows have halted; outputs `'length'`, int32 `[B]`."""
    inputs, *like = arguments
    found, _ = self.begin([inputs, *like])
    x, query = found.pop('x'), found.pop('query')
    rows, (_, shape, _) = len(x), self.result[0]
    tokens = np.zeros((rows, *shape.shape[1:]), np.float32)
    mask = np.zeros(tokens.shape[:2], np.float32)
    penalty = np.zeros((rows, self.bank_size), np.float32)
    running, halting = np.ones(rows, bool), np.zeros(rows, np.float32)
    state = State(query, penalty, running, halting)
    for time in range(tokens.shape[1]):
      if not state.running.any():
        break
      mask[:, time] = state.running
      given = found | state._asdict()
      new, _ = self.step([given, *like])
      tokens[state.running, time] = new['token'][state.running]
      on = np.flatnonzero(new['continued'])
      penalty[on[:, None], new['indices'][on]] = -np.inf
      state = State(new['query'], penalty, new['running'], new['halting'])
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
  own: dict[str, int] = {}  # the size of the bank, known when it is traced

  def begin(module: Any, batch: Any) -> Any:
    x, bank = module.embed(convert(batch))
    x = module.encoder.before(x)
    found = {'x': x, 'query': module.encoder.query(x)}
    own['size'] = bank.shape[-2]
    if bank.ndim == 3:
      keys = module.encoder.tape_norm(bank, reading.query_dim)
      found |= {'bank': bank, 'keys': keys}
    return found, {}

  def step(module: Any, given: Any) -> Any:
    norm = module.encoder.tape_norm
    state = State(**{name: given[name] for name in State._fields})
    if 'bank' in given:
      indices, weights = tape.choose(given['keys'], state, reading)
      picked = jnp.take_along_axis(given['bank'], indices[..., None], axis=1)
    else:
      bank = module.embed(convert(jax.tree.map(_row_of_zeros, inputs)))[1]
      keys = norm(bank, reading.query_dim)
      indices, weights = tape.choose(keys, state, reading)
      picked = tape.gather(bank, indices[:, None])[:, 0]
    picked = norm(picked, picked.shape[-1])
    state, continued = tape.advance(
      state, weights, picked[..., : reading.query_dim], reading
    )
    found = state._asdict() | {'indices': indices, 'continued': continued}
    found['token'] = (weights[..., None] * picked).sum(1)
    del found['penalty']
    return found, {}

  def compiled(function: Any, given: Any) -> Any:
    def run(variables: Any, carry: Any) -> Any:
      return model.apply(variables, carry, method=function)

    return compile(run, given)

  first = compiled(begin, inputs)
  shapes = {**first.result[0]}
  x, query = shapes.pop('x'), shapes.pop('query')
  rows, width, array = x.shape[0], x.shape[-1], jax.ShapeDtypeStruct
  shapes |= State(
    query, array((rows, own['size']), jnp.float32), array((rows,), bool),
    array((rows,), jnp.float32),
  )._asdict()  # fmt: skip
  tape_of = array((rows, reading.max_steps, width), jnp.float32)
  carry = x, tape_of, array((rows, reading.max_steps), jnp.float32)
  later = compiled(step, shapes)
  return HostReading(first, later, (carry, {}), own['size'])


def _row_of_zeros(leaf: Any) -> jax.Array:
  return jnp.zeros((1, *leaf.shape[1:]), leaf.dtype)
