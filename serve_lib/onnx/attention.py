"""Attention as one operator of ONNX Runtime.

A row of 24 tokens through a MiniLM (6 x 384) takes 5 to 10 % less time than
with the products, the softmax and the transposes between them.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from model_lib.attention import MASKED_SCORE
from serve_lib.onnx.graph import OWN, Graph, Value

# Axes that a product contracts, and axes of the batch.
_SCORES = ((3,), (3,)), ((0, 1), (0, 1))
_MIXED = ((3,), (2,)), ((0, 1), (0, 1))
_PROJECTED = ((1,), (0,)), ((), ())
_SWAPPED = (0, 2, 1, 3)  # heads before the length, and back


def fuse(graph: Graph, given: Sequence[Value], params: Any) -> Value | None:
  """Returns attention if a product is that of its weights and values, or None.

  Only that of `model_lib.attention.attend`, with one mask of the keys or none,
  or with a mask of queries and keys. The mask of the values is left out: each
  row has a valid key, and the values of padding are finite.
  """
  weights, values = given
  weights, weights_mask = _unmasked(weights, 0.0)
  if params['dimension_numbers'] != _MIXED or weights.scores is None:
    return None
  scores, mask = _unmasked(weights.scores, MASKED_SCORE)
  values, values_mask = _unmasked(values, 0.0)
  name, inputs, product = scores.made
  if name != 'dot_general' or product['dimension_numbers'] != _SCORES:
    return None
  (query, keys), scale = inputs, 1.0
  if query.made[0] == 'mul':
    factor = query.made[1][1].array
    if factor is not None and factor.size == 1:
      query, scale = query.made[1][0], float(factor)
  batch, heads, length, size = query.shape
  rows, valid, bias = (batch, keys.shape[2]), None, None
  if not keys.shape == values.shape == (batch, heads, rows[1], size):
    return None
  if weights_mask and (not mask or _origin(weights_mask) != _origin(mask)):
    return None
  if values_mask:
    if not mask or values_mask.shape != (batch, 1, rows[1], 1):
      return None
    if graph.reshape(values_mask, rows).name not in _keys(graph, mask, rows):
      return None
  if mask and mask.shape == (batch, 1, 1, rows[1]):
    valid = graph.as_int32(graph.reshape(mask, rows))
  elif mask:
    if mask.shape != (batch, 1, length, rows[1]):
      return None
    fill = [graph.constant(np.float32(n)) for n in (0.0, MASKED_SCORE)]
    bias = graph.elementwise('Where', mask, *fill)
  flat = [
    graph.reshape(
      graph.transpose(one, _SWAPPED), (batch, one.shape[2], heads * size)
    )
    for one in (query, keys, values)
  ]
  options: Any = dict(shape=flat[0].shape, domain=OWN, num_heads=heads)
  options |= dict(scale=scale, mask_filter_value=MASKED_SCORE)
  if projected := _projected(graph, flat):
    attended = graph.add('Attention', *projected, valid, None, bias, **options)
  else:
    masks = None, valid, bias
    attended = graph.add('MultiHeadAttention', *flat, *masks, **options)
  by_head = graph.reshape(attended, (batch, length, heads, size))
  return graph.transpose(by_head, _SWAPPED)


def fuse_rotation(graph: Graph, given: Sequence[Value]) -> Value | None:
  """Returns a rotation by positions if a concatenation is one, or None.

  Only that of `model_lib.modern_bert.rotate`.
  """
  kinds = [one.made[0] for one in given]
  if kinds != ['sub', 'add'] or given[0].shape != given[1].shape:
    return None
  products = [part.made for one in given for part in one.made[1]]
  if any(name != 'mul' for name, *_ in products):
    return None
  (first, cos), (second, sin), *others = [inputs for _, inputs, _ in products]
  crossed = [[second.name, cos.name], [first.name, sin.name]]
  halves = [one.made for one in (first, second)]
  ends = [(name, part.get('output')) for name, _, part in halves]
  if [[a.name, b.name] for a, b in others] != crossed:
    return None
  if ends != [('split', 0), ('split', 1)]:
    return None
  (heads,), (rows, length, _, half) = halves[0][1], cos.shape
  batch, _, count, size = heads.shape
  if heads is not halves[1][1][0] or size != 2 * half or cos.shape != sin.shape:
    return None
  flat = graph.reshape(heads, (batch, length, count * size))
  # An angle for each token: of all rows, or of one for all.
  tokens = rows * length
  tables = [graph.reshape(one, (tokens, half)) for one in (cos, sin)]
  places = graph.numbers(tokens)
  places = graph.full(graph.reshape(places, (rows, length)), (batch, length))
  turned = graph.add(
    'RotaryEmbedding', flat, places, *tables, shape=flat.shape, domain=OWN
  )
  return graph.reshape(turned, heads.shape)


def _unmasked(value: Value, fill: float) -> tuple[Value, Value | None]:
  """Returns what a selection with a constant chooses from, and its mask."""
  name, inputs, _ = value.made
  if name != 'select_n' or inputs[0].array is not None:
    return value, None
  is_filled = np.all(inputs[1].array == np.float32(fill))
  return (inputs[2], inputs[0]) if is_filled else (value, None)


def _origin(value: Value) -> str:
  """Returns the name of the value before reshapes."""
  return (value.base or value).name


def _keys(graph: Graph, mask: Value, rows: Any) -> set[str]:
  """Returns the names of the masks of keys that a mask consists of."""
  while mask.made[0] in ('broadcast_in_dim', 'reshape', 'expand_dims'):
    mask = mask.made[1][0]
  parts = mask.made[1] if mask.made[0] == 'and' else [mask]
  count = math.prod(rows)
  same = [one for one in parts if math.prod(one.shape) == count]
  return {graph.reshape(one, rows).name for one in same}


def _projected(graph: Graph, parts: Sequence[Value]) -> list[Value] | None:
  """Returns tokens, kernels and biases if these make all parts."""
  tokens, kernels, biases = {}, [], []
  width = parts[0].shape[-1]
  for one in parts:
    name, inputs, _ = one.made
    if name != 'add' or inputs[1].array is None:
      return None
    if (bias := inputs[1].array).shape not in ((width,), (1, 1, width)):
      return None
    biases.append(bias.ravel())
    name, inputs, product = inputs[0].made
    if name == 'reshape':
      name, inputs, product = inputs[0].made
    if name != 'dot_general' or product['dimension_numbers'] != _PROJECTED:
      return None
    if np.shape(inputs[1].array) != (width, width):
      return None
    rows = graph.reshape(inputs[0], one.shape)
    tokens[rows.name] = rows
    kernels.append(inputs[1].array)
  if len(tokens) > 1:
    return None
  merged = np.concatenate(kernels, axis=1), np.concatenate(biases)
  return [*tokens.values(), *map(graph.constant, merged)]
