"""Exact compaction for programs that read their sizes at run time.

The host packs the running tokens of a batch before each iteration and unpacks
them after it; one program serves all iterations. See
`albert_act.compaction`, whose sizes are static.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array

from albert_act import compaction
from albert_act.model import AlbertClassifier
from model_lib import attention


@dataclasses.dataclass(frozen=True)
class HostStage:
  """Some iterations of a batch, a program of `serve_lib.chain.Resizable`.

  The carry is that of `begin`, contiguous arrays that are changed in place.
  """

  iterate: Any  # programs, see the functions of these names below
  classify: Any
  result: Any
  iterations: int
  limit: int  # iterations of a row
  state: tuple[str, ...]  # fields of the rule's state, arrays `[B, L]`
  begin: Any = None  # of the first stage

  def __call__(self, arguments: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Runs `iterations` at most; returns the outputs of `AlbertChain.sized`."""
    (carry,) = arguments
    if self.begin:
      carry, _ = self.begin([carry])
    packed = 'x', *self.state
    flat = {
      name: np.reshape(carry[name], (-1, *carry[name].shape[2:]), copy=False)
      for name in (*packed, 'keys', 'values')
    }
    for _ in range(self.iterations):
      place = np.flatnonzero(flat['running'])
      if not len(place):
        break
      tokens = {name: flat[name][place] for name in packed}
      new, _ = self.iterate([tokens | self._inputs(carry, place)])
      carry['iteration'] += 1
      for name, values in new.items():
        flat[name][place] = values
    _, outputs = self.classify([carry['x'][:, 0]])
    outputs |= {'running': carry['running'].any(1), 'steps': carry['steps']}
    return carry, outputs

  def _inputs(self, carry: Any, place: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the inputs of `iterate` but for the packed states."""
    rows, length = carry['valid'].shape
    row, numbers = place // length, np.arange(len(place), dtype=np.int32)
    count = np.bincount(row, minlength=rows)
    first = (np.cumsum(count) - count)[row].astype(np.int32)
    nth = numbers - first  # in its own row
    queries = np.zeros((rows, count.max()), np.int32)
    queries[row, nth] = numbers
    return {
      'is_last': (carry['iteration'] == self.limit - 1)[row],
      'first': first,
      'queries': queries,
      'place': (row * queries.shape[1] + nth).astype(np.int32),
    } | {name: carry[name] for name in ('keys', 'values', 'valid')}


def stages(
  model: AlbertClassifier,
  iterations: int,
  inputs: Any,
  compile: Callable[..., Any],
) -> tuple[HostStage, HostStage]:
  """Returns the first stage and a later one, for `AlbertChain.programs`."""

  def compiled(function: Callable[..., Any], example: Any) -> Any:
    return compile(functools.partial(model.apply, method=function), example)

  first = compiled(begin, inputs)
  shapes: Any = first.result[0]
  rows, _, width = shapes['x'].shape
  packed, most = export.symbolic_shape('m, q', scope=rows.scope)
  array = jax.ShapeDtypeStruct
  state = (*vars(model.rule.start(np.zeros(0, bool))),)
  example = {
    'x': array((packed, width), model.dtype),
    'is_last': array((packed,), bool),
    'first': array((packed,), jnp.int32),
    'queries': array((rows, most), jnp.int32),
    'place': array((packed,), jnp.int32),
  }
  example |= {name: array((packed,), shapes[name].dtype) for name in state}
  example |= {name: shapes[name] for name in ('keys', 'values', 'valid')}
  programs = {
    'iterate': compiled(iterate, example),
    'classify': compiled(classify, array((rows, width), model.dtype)),
    'result': first.result,
  }
  later = HostStage(
    iterations=iterations, limit=model.max_iterations, state=state, **programs
  )
  return dataclasses.replace(later, begin=first), later


def begin(model: AlbertClassifier, inputs: Any) -> tuple[Any, Any]:
  """Returns the fields of `compaction.begin`, and of the state of the rule."""
  names = 'tokens', 'token_types', 'length'
  tokens = compaction.begin(model, *(inputs[name] for name in names))
  carry = dict(vars(tokens))
  halting = carry.pop('halting')
  return carry | vars(halting), {}


def iterate(model: AlbertClassifier, packed: Any) -> tuple[Any, Any]:
  """Runs an iteration of M packed tokens.

  `packed` has their `x` `[M, D]`, the rule's state, `is_last` and `first` `[M]`
  (see `compaction.iteration`), the tokens that run in each row, `queries`
  `[B, Q]`, the place of each among them `[M]`, and of all tokens `keys`,
  `values` and `valid` `[B, L, ...]`. Returns what changes of the packed tokens.
  """
  split = functools.partial(attention.split_heads, heads=model.num_heads)

  def attend(query: Any, *unused: Any, **none: Any) -> tuple[Any, None]:
    rows: Any = _taken(attention.join_heads(query)[0], packed['queries'])
    keys_values = split(packed['keys']), split(packed['values'])
    attended, _ = attention.attend(split(rows), *keys_values, packed['valid'])
    flat = attention.join_heads(attended).reshape(-1, rows.shape[-1])
    return split(_taken(flat, packed['place'])[None]), None

  before: Any = model.rule.start(jnp.ones_like(packed['is_last']))
  before = before.replace(**{name: packed[name] for name in vars(before)})
  x, keys, values, after = compaction.iteration(model)(
    attend, packed['x'], before, packed['is_last'], packed['first']
  )
  return {'x': x, 'keys': keys, 'values': values, **vars(after)}, {}


def classify(model: AlbertClassifier, cls: Any) -> tuple[Any, Any]:
  """Returns the logits of [CLS] states `[B, D]`."""
  return (), {'logits': model.classify(cls)[0]}


def _taken(x: Array, places: Array) -> Array:
  """Returns `x[places]`, without a check for negative numbers."""
  return x.at[places].get(mode='promise_in_bounds', wrap_negative_indices=False)
