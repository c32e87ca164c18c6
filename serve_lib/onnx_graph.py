"""Stages as ONNX graphs, which ONNX Runtime runs faster on few rows.

For small products XLA's CPU client gains nothing from a second core. A stage is
traced to a jaxpr and its primitives are mapped one by one. Operations on
constants are computed here, and mean, softmax, GELU and normalisation are
written as ONNX Runtime knows them, which fuses them.
"""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from onnx import TensorProto, helper, numpy_helper

# The version of ONNX's operators; those used here are unchanged since.
OPSET = 17
# Primitives with the same meaning as an operator, element by element.
SAME = {
  'abs': 'Abs', 'add': 'Add', 'and': 'And', 'cos': 'Cos', 'div': 'Div',
  'eq': 'Equal', 'erf': 'Erf', 'exp': 'Exp', 'floor': 'Floor',
  'ge': 'GreaterOrEqual', 'gt': 'Greater', 'le': 'LessOrEqual', 'log': 'Log',
  'logistic': 'Sigmoid', 'lt': 'Less', 'max': 'Max', 'min': 'Min', 'mul': 'Mul',
  'neg': 'Neg', 'not': 'Not', 'or': 'Or', 'sign': 'Sign', 'sin': 'Sin',
  'sqrt': 'Sqrt', 'sub': 'Sub', 'tanh': 'Tanh', 'round': 'Round',
}  # fmt: skip
ONLY_BOOL = ('and', 'or', 'not')
IDENTITIES = ('stop_gradient', 'copy', 'copy_p')
INLINED = ('jit', 'pjit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call')
REDUCTIONS = {'reduce_sum': 'ReduceSum', 'reduce_max': 'ReduceMax'}
ROOT = np.float32(np.sqrt(0.5))  # of GELU


class NotTranslatedError(ValueError):
  """A stage contains a primitive, or a form of one, that is not mapped."""


class _Value:
  """A value of the graph: a constant, or the name of a node's output.

  `shape` may lack repetition: an operator broadcasts its inputs itself. `made`
  is the primitive that made the value and its inputs.
  """

  def __init__(
    self,
    name: str,
    shape: Sequence[int],
    array: np.ndarray | None = None,
    made: tuple[str, Sequence['_Value']] = ('', ()),
  ):
    self.name, self.shape = name, tuple(shape)
    self.array: Any = array
    self.made = made
    self.base: _Value | None = None  # that was reshaped to it


class _Graph:
  """Builds the nodes of a graph."""

  def __init__(self):
    self.nodes: list[onnx.NodeProto] = []
    self._numbers = itertools.count()
    self._constants: dict[str, np.ndarray] = {}
    self._known: dict[Any, str] = {}

  def input(self, name: str, shape: Sequence[int]) -> _Value:
    return _Value(name, shape)

  def constant(self, array: Any) -> _Value:
    return _Value('', np.shape(array), np.asarray(array))

  def add(self, kind: str, *inputs: _Value, shape: Any, **options: Any) -> Any:
    """Adds a node; returns its value of a shape, or a list for several."""
    names = [self.name(one) for one in inputs]
    several = isinstance(shape, list)
    outputs = [
      _Value(f'v{next(self._numbers)}', one)
      for one in (shape if several else [shape])
    ]
    outputs_names = [one.name for one in outputs]
    self.nodes.append(helper.make_node(kind, names, outputs_names, **options))
    return outputs if several else outputs[0]

  def name(self, value: _Value) -> str:
    """Returns the name of a value; a constant becomes an initializer."""
    if value.array is None:
      return value.name
    array = value.array
    key = (
      (array.dtype, array.shape, array.tobytes())
      if array.size < 64
      else id(array)
    )
    if key not in self._known:
      self._known[key] = name = f'c{len(self._known)}'
      self._constants[name] = array
    return self._known[key]

  def ints(self, numbers: Sequence[int]) -> _Value:
    return self.constant(np.array(numbers, np.int64))

  def reshape(self, value: _Value, shape: Sequence[int]) -> _Value:
    if value.array is not None:
      return self.constant(value.array.reshape(shape))
    base = value.base or value
    if base.shape == tuple(shape):
      return _copied(base)
    new = self.add('Reshape', base, self.ints(shape), shape=tuple(shape))
    new.base = base
    return new

  def full(self, value: _Value, shape: Sequence[int]) -> _Value:
    """Returns a value that has all repetitions of its shape."""
    if value.shape == tuple(shape):
      return value
    if value.array is not None:
      return self.constant(np.broadcast_to(value.array, shape))
    return self.add('Expand', value, self.ints(shape), shape=tuple(shape))

  def model(self, inputs: Any, outputs: Any) -> onnx.ModelProto:
    """Returns the model without nodes that no output needs."""
    needed, kept = {one.name for one in outputs}, []
    for node in reversed(self.nodes):
      if needed.intersection(node.output):
        needed.update(node.input)
        kept.append(node)
    nodes = self._merged(kept[::-1])
    needed = {name for node in nodes for name in node.input}
    constants = [
      numpy_helper.from_array(array, name)
      for name, array in self._constants.items()
      if name in needed
    ]
    graph = helper.make_graph(nodes, 'stage', inputs, outputs, constants)
    opsets = [helper.make_opsetid('', OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)

  def _merged(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Makes one product of those of the same rows, as query, key and value."""
    known: dict[str, Any] = self._constants
    users = collections.defaultdict[str, Any](list)
    for node in nodes:
      for name in node.input:
        users[name].append(node)
    groups = collections.defaultdict[Any, Any](list)  # by rows: (product, sum)
    for node in nodes:
      later = users[node.output[0]]
      if node.op_type == 'MatMul' and len(later) == 1:
        weights, (last,) = known.get(node.input[1]), later
        bias = known.get(last.input[-1])
        is_sum = last.op_type == 'Add' and last.input[0] == node.output[0]
        if is_sum and weights is not None and bias is not None:
          key = node.input[0], len(weights)
          is_vector = bias.shape == weights.shape[1:] != ()
          groups[key] += [(node, last)] * is_vector
    merged, gone = {}, set[str]()
    for (rows, _), pairs in groups.items():
      if len(pairs) < 2:
        continue
      products, sums = zip(*pairs, strict=True)
      weights = [known[one.input[1]] for one in products]
      biases = [known[one.input[1]] for one in sums]
      sizes = self.ints([one.shape[-1] for one in weights])
      both = map(self.constant, (np.hstack(weights), np.hstack(biases)))
      name, (w, b, count) = (
        products[0].output[0],
        map(self.name, (*both, sizes)),
      )
      ends = [one.output[0] for one in sums]
      merged[name] = [
        helper.make_node('MatMul', [rows, w], [f'{name}w']),
        helper.make_node('Add', [f'{name}w', b], [f'{name}b']),
        helper.make_node('Split', [f'{name}b', count], ends, axis=-1),
      ]
      gone.update(one.output[0] for pair in pairs for one in pair)
    result = []
    for node in nodes:
      result += merged.get(node.output[0], [])
      if node.output[0] not in gone:
        result.append(node)
    return result


def translate(
  function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[onnx.ModelProto, Any]:
  """Returns the model of `function(*arguments)` and the shapes of its result.

  Inputs are `i0`, `i1`, ... and outputs `o0`, `o1`, ..., the leaves of the
  arguments and of the result in JAX's order. Arrays that the function closes
  over become constants. Raises NotTranslatedError.
  """
  closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
  graph = _Graph()
  leaves = jax.tree.leaves(arguments)
  inputs = [graph.input(f'i{n}', x.shape) for n, x in enumerate(leaves)]
  found = _run(graph, closed, inputs)
  outputs = []
  for number, (value, leaf) in enumerate(
    zip(found, jax.tree.leaves(result), strict=True)
  ):
    value = graph.full(value, leaf.shape)
    node = helper.make_node('Identity', [graph.name(value)], [f'o{number}'])
    graph.nodes.append(node)
    outputs.append(_info(f'o{number}', leaf))
  infos = [_info(f'i{number}', leaf) for number, leaf in enumerate(leaves)]
  return graph.model(infos, outputs), result


def _info(name: str, leaf: Any) -> onnx.ValueInfoProto:
  return helper.make_tensor_value_info(name, _dtype(leaf.dtype), leaf.shape)


def _dtype(dtype: Any) -> int:
  try:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
  except (KeyError, TypeError) as error:
    raise NotTranslatedError(f'dtype {dtype}') from error


def _run(
  graph: _Graph, closed: ClosedJaxpr, inputs: Sequence[_Value]
) -> list[_Value]:
  """Translates the equations of a jaxpr in order; returns its outputs."""
  jaxpr = closed.jaxpr
  values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
  for variable, array in zip(jaxpr.constvars, closed.consts, strict=True):
    values[variable] = graph.constant(array)

  def read(atom: Any) -> _Value:
    return (
      graph.constant(atom.val) if isinstance(atom, Literal) else values[atom]
    )

  for eqn in jaxpr.eqns:
    given = [read(atom) for atom in eqn.invars]
    name = eqn.primitive.name
    if name in INLINED:
      inner = eqn.params.get('jaxpr') or eqn.params.get('call_jaxpr')
      results = _run(graph, inner, given)
    elif all(one.array is not None for one in given):
      full = [
        np.broadcast_to(one.array, atom.aval.shape)
        for one, atom in zip(given, eqn.invars, strict=True)
      ]
      results = [graph.constant(x) for x in _compute(eqn.primitive, full, eqn)]
    else:
      results = [_translate(graph, eqn, given, eqn.outvars[0].aval.shape)]
      results[0].made = name, given
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _compute(
  primitive: Primitive, arrays: Sequence[Any], eqn: Any
) -> list[Any]:
  found = primitive.bind(*arrays, **eqn.params)
  return [
    np.asarray(x) for x in (found if primitive.multiple_results else [found])
  ]


def _translate(
  graph: _Graph, eqn: Any, given: Sequence[_Value], shape: tuple[int, ...]
) -> _Value:
  """Translates one equation."""
  name, params = eqn.primitive.name, eqn.params
  is_bool = eqn.invars[0].aval.dtype == bool
  if fused := _fused(graph, name, given, params):
    return fused
  if name in SAME and (is_bool or name not in ONLY_BOOL):
    if name == 'round' and int(params['rounding_method']) != 1:
      raise NotTranslatedError('round away from zero')
    return _elementwise(graph, SAME[name], *given)
  if name in IDENTITIES:
    return _same(given[0])
  if name in REDUCTIONS:
    return _reduce(graph, name, eqn, given[0], shape)
  if translated := _OTHERS.get(name):
    whole = [
      graph.full(one, atom.aval.shape)
      for one, atom in zip(given, eqn.invars, strict=True)
    ]
    lazy = name in ('broadcast_in_dim', 'transpose', 'select_n')
    return translated(graph, given if lazy else whole, params, shape)
  raise NotTranslatedError(f'primitive {name}')


def _same(value: _Value) -> _Value:
  result = _copied(value)
  result.made = value.made
  return result


def _elementwise(graph: _Graph, kind: str, *given: _Value) -> _Value:
  shape = np.broadcast_shapes(*(one.shape for one in given))
  # Fusions expect scales and biases without axes of size 1 before.
  flat = [
    graph.constant(one.array.reshape(_stripped(one.shape)))
    if one.array is not None
    else one
    for one in given
  ]
  return graph.add(kind, *flat, shape=shape)


def _stripped(shape: Sequence[int]) -> tuple[int, ...]:
  """Removes leading axes of size 1."""
  return tuple(itertools.dropwhile(lambda size: size == 1, shape))


def _fused(
  graph: _Graph, name: str, given: Sequence[_Value], params: Any
) -> _Value | None:
  """Writes mean, softmax, GELU and normalisation in the form that is fused."""
  first, second = (*given, *given)[:2]
  if name == 'div' and second.array is not None and first.made[0] == _WIDE:
    (narrow,) = first.made[1]
    whole = narrow.made[1][0] if narrow.made[0] == 'reduce_sum' else None
    if whole and second.array == whole.shape[-1] and first.shape[-1] == 1:
      shape = (*whole.shape[:-1], 1)
      if shape == first.shape:  # the sum was over the last axis
        return graph.add('ReduceMean', whole, shape=shape, axes=[-1])
  if name == 'div' and first.made[0] == 'exp' and second.made[0] == _WIDE:
    (total,), (power,) = second.made[1], first.made[1]
    if total.made == ('reduce_sum', [first]) and power.made[0] == 'sub':
      value, shift = power.made[1]
      if shift.shape == second.shape == (*value.shape[:-1], 1):
        return graph.add('Softmax', value, shape=value.shape, axis=-1)
  if name == 'mul':
    for one, other in ((first, second), (second, first)):
      if other.made[0] == 'rsqrt':
        root = _elementwise(graph, 'Sqrt', other.made[1][0])
        return _elementwise(graph, 'Div', one, root)
      if other.array is not None and (other.array == ROOT).all():
        return _elementwise(graph, 'Div', one, graph.constant(1 / ROOT))
  if name in ('square', 'integer_pow'):
    power = graph.constant(np.float32(params.get('y', 2)))
    return _elementwise(graph, 'Pow', first, power)
  if name == 'erfc':
    one = graph.constant(np.float32(1.0))
    return _elementwise(graph, 'Sub', one, _elementwise(graph, 'Erf', first))
  return None


def _reduce(
  graph: _Graph, name: str, eqn: Any, value: _Value, shape: tuple[int, ...]
) -> _Value:
  value_full = graph.full(value, eqn.invars[0].aval.shape)
  axes = eqn.params['axes']
  if name == 'reduce_sum':
    return graph.add(
      'ReduceSum', value_full, graph.ints(axes), shape=shape, keepdims=0
    )
  return graph.add('ReduceMax', value_full, shape=shape, axes=axes, keepdims=0)


def _broadcast(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  """Inserts axes of size 1; operators repeat along them by themselves."""
  placed = [1] * len(shape)
  for axis, size in zip(
    params['broadcast_dimensions'], given[0].shape, strict=True
  ):
    placed[axis] = size
  return _copied(graph.reshape(given[0], placed))


def _copied(value: _Value) -> _Value:
  result = _Value(value.name, value.shape, value.array)
  result.base = value.base
  return result


def _transpose(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  axes = params['permutation']
  placed = [given[0].shape[axis] for axis in axes]
  return graph.add('Transpose', given[0], shape=tuple(placed), perm=axes)


def _select(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  which, *cases = given
  if len(cases) != 2:
    raise NotTranslatedError('select_n of more than two cases')
  return _elementwise(graph, 'Where', which, cases[1], cases[0])


def _cast(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  return graph.add('Cast', *given, shape=shape, to=_dtype(params['new_dtype']))


def _slice(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  starts, ends = params['start_indices'], params['limit_indices']
  steps = params['strides'] or [1] * len(shape)
  axes = range(len(shape))
  parts = map(graph.ints, (starts, ends, axes, steps))
  return graph.add('Slice', *given, *parts, shape=shape)


def _concatenate(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  return graph.add('Concat', *given, shape=shape, axis=params['dimension'])


def _sort(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  if len(given) > 1 or params['dimension'] != len(shape) - 1:
    raise NotTranslatedError('sort of several arrays or of another axis')
  found = graph.add(
    'TopK', *given, graph.ints(shape[-1:]), shape=[shape, shape], largest=0
  )
  return found[0]


def _rest(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  return graph.add('Mod', *given, shape=shape, fmod=1)


def _product(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
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
      placed = [value.shape[axis] for axis in order]
      value = (
        graph.constant(value.array.transpose(order))
        if value.array is not None
        else graph.add('Transpose', value, shape=tuple(placed), perm=order)
      )
    size = [value.shape[axis] for axis in range(len(outer))]
    count = int(np.prod([given[number].shape[axis] for axis in free]))
    k = given[number].shape[inner]
    parts.append(
      graph.reshape(
        value, [*size, *((count, k) if number == 0 else (k, count))]
      )
    )
  left, right = parts
  if left.base and left.base.shape[-1] == left.shape[-1] and not batch[0]:
    left = left.base  # a product needs no flat rows
  whole = (*left.shape[:-1], right.shape[-1])
  return _copied(
    graph.reshape(graph.add('MatMul', left, right, shape=whole), shape)
  )


def _gather(graph: _Graph, given: Any, params: Any, shape: Any) -> _Value:
  """Translates the look-up of rows of a table, or within each of a batch."""
  table, places = given
  numbers, sizes = params['dimension_numbers'], params['slice_sizes']
  batch = tuple(numbers.operand_batching_dims)
  axis = len(batch)
  whole = tuple(table.shape[axis + 1 :])
  if (
    batch not in ((), (0,))
    or tuple(numbers.start_indices_batching_dims) != batch
    or tuple(map(int, numbers.start_index_map)) != (axis,)
    or tuple(map(int, numbers.collapsed_slice_dims)) != (axis,)
    or sizes[axis + 1 :] != whole
    or places.shape[-1] != 1
    or (*places.shape[:-1], *whole) != shape
  ):
    raise NotTranslatedError('a gather other than of whole rows')
  if batch:
    where = graph.add('Cast', places, shape=places.shape, to=TensorProto.INT64)
    return graph.add('GatherND', table, where, shape=shape, batch_dims=1)
  rows = graph.reshape(places, places.shape[:-1])
  return graph.add('Gather', table, rows, shape=shape, axis=0)


_WIDE = 'broadcast_in_dim'
_OTHERS: Mapping[str, Callable[..., _Value]] = {
  _WIDE: _broadcast,
  'concatenate': _concatenate,
  'convert_element_type': _cast,
  'dot_general': _product,
  'expand_dims': lambda g, given, params, shape: g.reshape(given[0], shape),
  'gather': _gather,
  'ne': lambda g, given, params, shape: g.add(
    'Not', _elementwise(g, 'Equal', *given), shape=shape
  ),
  'rem': _rest,
  'reshape': lambda g, given, params, shape: _copied(
    g.reshape(given[0], shape)
  ),
  'rsqrt': lambda g, given, params, shape: g.add(
    'Reciprocal', _elementwise(g, 'Sqrt', *given), shape=shape
  ),
  'select_n': _select,
  'slice': _slice,
  'sort': _sort,
  'squeeze': lambda g, given, params, shape: _copied(
    g.reshape(given[0], shape)
  ),
  'transpose': _transpose,
}
