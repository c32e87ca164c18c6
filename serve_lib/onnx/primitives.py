"""JAX's primitives as operators of ONNX.

Mean, softmax, GELU and normalisation are written as ONNX Runtime knows them,
which fuses them; attention becomes one operator here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherDimensionNumbers, GatherScatterMode
from onnx import TensorProto, helper

from serve_lib.onnx import attention
from serve_lib.onnx.graph import OWN, Graph, NotTranslatedError, Value

# Primitives with the same meaning as an operator, element by element.
SAME = {
  'abs': 'Abs', 'add': 'Add', 'and': 'And', 'cos': 'Cos', 'div': 'Div',
  'eq': 'Equal', 'erf': 'Erf', 'exp': 'Exp', 'floor': 'Floor',
  'ge': 'GreaterOrEqual', 'gt': 'Greater', 'le': 'LessOrEqual', 'log': 'Log',
  'logistic': 'Sigmoid', 'lt': 'Less', 'max': 'Max', 'min': 'Min', 'mul': 'Mul',
  'neg': 'Neg', 'not': 'Not', 'or': 'Or', 'sign': 'Sign', 'sin': 'Sin',
  'sqrt': 'Sqrt', 'sub': 'Sub', 'tanh': 'Tanh', 'round': 'Round',
}  # fmt: skip
ONLY_BOOL = ('and', 'or', 'not', 'reduce_and', 'reduce_or')
# Two operators, the first element by element.
PAIRS = {'ne': ('Equal', 'Not'), 'rsqrt': ('Sqrt', 'Reciprocal')}
IDENTITIES = ('stop_gradient', 'copy', 'copy_p')
# Primitives that are one operator with options.
PLAIN: Mapping[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
  'concatenate': ('Concat', lambda p: dict(axis=p['dimension'])),
  'convert_element_type': ('Cast', lambda p: dict(to=dtype_of(p['new_dtype']))),
  'reduce_max': ('ReduceMax', lambda p: dict(axes=p['axes'], keepdims=0)),
  'reduce_min': ('ReduceMin', lambda p: dict(axes=p['axes'], keepdims=0)),
  'rem': ('Mod', lambda p: dict(fmod=1)),
}
# What `_other` does not translate of a primitive.
FORMS = {
  'select_n': ' of more than two cases', 'top_k': ' of another axis',
  'sort': ' of several arrays or of another axis',
  'pad': ' between elements, or a crop',
}  # fmt: skip
_WIDE = 'broadcast_in_dim'
ROOT = np.float32(np.sqrt(0.5))  # of GELU


def dtype_of(dtype: Any) -> int:
  """Returns ONNX's number of a dtype."""
  if np.dtype(dtype).kind not in 'fiub' or dtype == np.float16:
    raise NotTranslatedError(f'dtype {dtype}')  # few operators have it
  return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def translate(
  graph: Graph, eqn: Any, given: Sequence[Value], shape: tuple[Any, ...]
) -> Any:
  """Translates one equation; returns a value, or a list for several."""
  name, params = eqn.primitive.name, eqn.params
  is_bool = bool(eqn.invars) and eqn.invars[0].aval.dtype == bool
  if given and (fused := _fused(graph, name, given, params)):
    return fused
  if name in ONLY_BOOL and not is_bool:
    raise NotTranslatedError(f'primitive {name} of integers')
  if name in SAME:
    if name == 'round' and int(params['rounding_method']) != 1:
      raise NotTranslatedError('round away from zero')
    return graph.elementwise(SAME[name], *given)
  if name in IDENTITIES:
    return given[0].copy()
  if name not in (_WIDE, 'transpose', 'select_n'):
    given = [
      graph.full(one, atom.aval.shape)
      for one, atom in zip(given, eqn.invars, strict=True)
    ]
  if name in PLAIN:
    kind, options = PLAIN[name]
    return graph.add(kind, *given, shape=shape, **options(params))
  if name == 'dot_general':
    return _product(graph, given, params, shape)
  if name == 'gather':
    return _gather(graph, given, params, shape)
  if name == 'scatter':
    return _scatter(graph, given, params, shape)
  return _other(graph, name, given, params, shape)


def _fused(
  graph: Graph, name: str, given: Sequence[Value], params: Any
) -> Value | None:
  """Writes mean, softmax, GELU, normalisation, attention in a fast form."""
  first, second = (*given, *given)[:2]
  total = _last_sum(first if second.array is not None else second)
  if name == 'div' and total and (count := second.array) is not None:
    shape = (*total.shape[:-1], 1)
    if count.size == 1 and count.item() == total.shape[-1]:
      return graph.add('ReduceMean', total, shape=shape, axes=[-1])
  if name == 'div' and total is first and first.made[0] == 'exp':
    (power,) = first.made[1]
    if power.made[0] == 'sub' and power.made[1][1].shape[-1:] == (1,):
      value = power.made[1][0]  # a shift of whole rows changes nothing
      result = graph.add('Softmax', value, shape=value.shape, axis=-1)
      result.scores = value
      return result
  if name == 'dot_general':
    return attention.fuse(graph, given, params)
  if name == 'concatenate':
    return attention.fuse_rotation(graph, given)
  if name == 'mul':
    for one, other in ((first, second), (second, first)):
      if other.made[0] == 'rsqrt':
        root = graph.elementwise('Sqrt', other.made[1][0])
        return graph.elementwise('Div', one, root)
      if other.made[0] == 'mul':
        half, rest = other.made[1]
        if half.array is not None and (half.array == 0.5).all():
          if _is_gelu(one, rest):
            return graph.add('Gelu', rest, shape=rest.shape, domain=OWN)
          # Of GELU by tanh; exact in any order.
          return graph.elementwise(
            'Mul', graph.elementwise('Mul', one, half), rest
          )
  if name in ('square', 'integer_pow'):
    power = graph.constant(np.float32(params.get('y', 2)))
    return graph.elementwise('Pow', first, power)
  if name == 'erfc':
    one = graph.constant(np.float32(1.0))
    return graph.elementwise('Sub', one, graph.elementwise('Erf', first))
  if pair := PAIRS.get(name):
    value = graph.elementwise(pair[0], *given)
    return graph.add(pair[1], value, shape=value.shape)
  return None


def _is_gelu(factor: Value, value: Value) -> bool:
  """Returns True if `factor` is `1 + erf(value / sqrt 2)`."""
  for name, number in (('add', 1.0), ('erf', None), ('mul', ROOT)):
    made, inputs, _ = factor.made
    rest = [x for x in inputs if x.array is None or (x.array != number).any()]
    if made != name or len(rest) != 1:
      return False
    factor = rest[0]
  return factor is value


def _last_sum(value: Value) -> Value | None:
  """Returns what `value` is the sum of over the last axis, which it keeps."""
  name, inputs, params = value.made
  if name != _WIDE or inputs[0].made[0] != 'reduce_sum':
    return None
  _, (source,), reduction = inputs[0].made
  rank, places = len(source.shape), params['broadcast_dimensions']
  keeps = reduction['axes'] == (rank - 1,) and places == tuple(range(rank - 1))
  return source if keeps and value.shape == (*source.shape[:-1], 1) else None


def _other(
  graph: Graph, name: str, given: Sequence[Value], params: Any, shape: Any
) -> Any:
  """Translates a primitive whose operator takes its parameters as inputs."""
  first: Any = given[0] if given else None
  axis = params.get('axis', params.get('dimension'))
  match name:
    case 'reshape' | 'expand_dims' | 'squeeze':
      return graph.reshape(first, shape).copy()
    case 'broadcast_in_dim':
      # Inserts axes of size 1; operators repeat along them by themselves.
      axes = params['broadcast_dimensions']
      kept = dict(zip(axes, first.shape, strict=True))
      placed = [kept.get(place, 1) for place in range(len(shape))]
      return graph.reshape(first, placed).copy()
    case 'transpose':
      return graph.transpose(first, params['permutation'])
    case 'dim_as_value':
      return graph.as_int32(graph.reshape(graph.extents([params['dim']]), ()))
    case 'iota':  # along an axis of symbolic size
      numbers, dtype = graph.numbers(shape[axis]), dtype_of(params['dtype'])
      numbers = graph.add('Cast', numbers, shape=numbers.shape, to=dtype)
      placed = [n if place == axis else 1 for place, n in enumerate(shape)]
      return graph.reshape(numbers, placed)
    case 'select_n' if len(given) == 3:
      return graph.elementwise('Where', first, given[2], given[1])
    case 'slice':
      steps = params['strides'] or [1] * len(shape)
      ends = params['start_indices'], params['limit_indices']
      parts = map(graph.extents, (*ends, range(len(shape)), steps))
      return graph.add('Slice', first, *parts, shape=shape)
    case 'sort' | 'top_k' if len(given) == 1 and axis == len(shape) - 1:
      is_top, count = name == 'top_k', graph.extents(shape[-1:])
      options: Any = dict(shape=[shape, shape], largest=int(is_top))
      values, places = graph.add('TopK', first, count, **options)
      return [values, graph.as_int32(places)] if is_top else values
    case 'argmax':
      options = dict(axis=params['axes'][0], keepdims=0)
      return graph.as_int32(graph.add('ArgMax', first, shape=shape, **options))
    case 'split':
      sizes = [*map(int, params['sizes'])]
      shapes = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
      options = dict(shape=shapes, axis=axis)
      return graph.add('Split', first, graph.ints(sizes), **options)
    case 'pad' if _is_plain(params['padding_config']):
      starts, stops, _ = zip(*params['padding_config'], strict=True)
      around = graph.extents(starts + stops)
      return graph.add('Pad', first, around, given[1], shape=shape)
    case 'reduce_sum':
      axes = graph.ints(params['axes'])
      return graph.add('ReduceSum', first, axes, shape=shape, keepdims=0)
    case 'reduce_and' | 'reduce_or':  # as of integers
      kind = 'ReduceMin' if name == 'reduce_and' else 'ReduceMax'
      options = dict(shape=shape, axes=params['axes'], keepdims=0)
      reduced = graph.add(kind, graph.as_int32(first), **options)
      return graph.add('Cast', reduced, shape=shape, to=TensorProto.BOOL)
  raise NotTranslatedError(f'primitive {name}' + FORMS.get(name, ''))


def _is_plain(padding: Any) -> bool:
  """Returns True without padding between elements, or cropping."""
  # Symbolic sizes are of `model_lib.local_attention`.
  first, last, within = zip(*padding, strict=True)
  return not any(within) and not any(
    n < 0 for n in first + last if isinstance(n, int)
  )


def _product(graph: Graph, given: Any, params: Any, shape: Any) -> Value:
  """Translates `dot_general`: batch axes, free axes, one contracted axis."""
  (contract, batch), parts = params['dimension_numbers'], []
  if any(len(axes) != 1 for axes in contract):
    raise NotTranslatedError('a product over several axes')
  for number, value in enumerate(given):
    ranks = range(len(value.shape))
    (inner,), outer = contract[number], list(batch[number])
    free = [axis for axis in ranks if axis not in (inner, *outer)]
    last = [*free, inner] if number == 0 else [inner, *free]
    order = [*outer, *last]
    if order != [*ranks]:
      value = graph.transpose(value, order)
    size = [value.shape[axis] for axis in range(len(outer))]
    count = math.prod(given[number].shape[axis] for axis in free)
    contracted = given[number].shape[inner]
    matrix = [count, contracted] if number == 0 else [contracted, count]
    parts.append(graph.reshape(value, [*size, *matrix]))
  left, right = parts
  if left.base and left.base.shape[-1] == left.shape[-1] and not batch[0]:
    left = left.base  # a product needs no flat rows
  flat_shape = (*left.shape[:-1], right.shape[-1])
  product = graph.add('MatMul', left, right, shape=flat_shape)
  return graph.reshape(product, shape).copy()


def _gather(graph: Graph, given: Any, params: Any, shape: Any) -> Value:
  """Translates the look-up along an axis, or within each row of a batch."""
  table, places = given
  numbers, sizes = params['dimension_numbers'], params['slice_sizes']
  batch = tuple(numbers.operand_batching_dims)
  if places.shape == (1,) and len(table.shape) > 1:
    return _taken(graph, given, params, shape)
  axis = (*map(int, numbers.start_index_map), 0)[0]
  first, trailing = tuple(table.shape[:axis]), tuple(table.shape[axis + 1 :])
  kept = () if batch else first  # axes of the result before the axes of places
  inner = len(shape) - len(trailing)
  offsets = (*range(len(kept)), *range(inner, len(shape)))
  legal = GatherDimensionNumbers(offsets, (axis,), (axis,), batch, batch)
  is_legal = numbers == legal and batch in ((), (0,))
  is_legal &= sizes == (*(1,) * len(batch), *kept, 1, *trailing)
  is_legal &= shape == (*kept, *places.shape[:-1], *trailing)
  if not is_legal or places.shape[-1] != 1:
    raise NotTranslatedError('a gather other than of whole rows')
  if batch:
    where = graph.add('Cast', places, shape=places.shape, to=TensorProto.INT64)
    return graph.add('GatherND', table, where, shape=shape, batch_dims=1)
  places = _unwrapped(places, table.shape[axis])
  rows = graph.reshape(places, shape[axis:inner])
  return graph.add('Gather', table, rows, shape=shape, axis=axis)


def _scatter(graph: Graph, given: Any, params: Any, shape: Any) -> Value:
  """Translates numbers that are written to places within each row."""
  table, places, new = given
  numbers = params['dimension_numbers']
  if (
    tuple(numbers.operand_batching_dims) != (0,)
    or len(shape) != 2
    or params['mode'] != GatherScatterMode.PROMISE_IN_BOUNDS
  ):
    raise NotTranslatedError('a scatter other than of numbers in rows')
  rows = graph.reshape(places, new.shape)
  return graph.add('ScatterElements', table, rows, new, shape=shape, axis=1)


def _unwrapped(places: Value, count: Any) -> Value:
  """Leaves out `where(n < 0, n + count, n)`, which ONNX does itself."""
  value = places
  while value.made[0] in (_WIDE, 'reshape', 'expand_dims'):
    value = value.made[1][0]
  if value.made[0] != 'select_n':
    return places
  is_low, plain, moved = value.made[1]

  def compares(one: Value, kind: str, number: Any) -> bool:
    name, inputs, _ = one.made
    if name != kind or plain.array is not None:
      return False
    return inputs[0].name == plain.name and bool(inputs[1].array == number)

  found = compares(is_low, 'lt', 0) and compares(moved, 'add', count)
  return plain if found else places


def _taken(graph: Graph, given: Any, params: Any, shape: Any) -> Value:
  """Translates `x[:, n]` and `x[:, n : n + size]`."""
  (table, place), numbers = given, params['dimension_numbers']
  axes, sizes = [*map(int, numbers.start_index_map)], params['slice_sizes']
  others = (n for n in range(len(sizes)) if n not in axes)
  if len(axes) != 1 or any(sizes[n] != table.shape[n] for n in others):
    raise NotTranslatedError('a gather other than of whole rows')
  (axis,) = axes
  if numbers.collapsed_slice_dims:
    row = graph.reshape(place, ())
    return graph.add('Gather', table, row, shape=shape, axis=axis)
  first = graph.add('Cast', place, shape=(1,), to=TensorProto.INT64)
  last = graph.elementwise('Add', first, graph.extents([sizes[axis]]))
  return graph.add('Slice', table, first, last, graph.ints(axes), shape=shape)
