"""A graph of ONNX under construction: values, nodes, constants."""

import ast
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# The version of ONNX's operators; those used here are unchanged since.
OPSET = 17
OWN = 'com.microsoft'  # ONNX Runtime's own operators
# Of sizes; quotients are of positive numbers.
_ARITHMETIC = {
  'Add': 'Add', 'Sub': 'Sub', 'Mult': 'Mul', 'floordiv': 'Div', 'min': 'Min',
}  # fmt: skip


class NotTranslatedError(ValueError):
  """A stage contains a primitive, or a form of one, that is not mapped."""


class Value:
  """A value of the graph: a constant, or the name of a node's output.

  `shape` may lack repetition: an operator broadcasts its inputs itself. `made`
  is the primitive that made the value, with its inputs and parameters.
  """

  def __init__(self, name: str, shape: Sequence[Any], array: Any = None):
    self.name, self.shape = name, tuple(shape)
    self.array: Any = array
    self.made: tuple[str, Sequence[Value], Mapping[str, Any]] = ('', (), {})
    self.base: Value | None = None  # that was reshaped to it
    # That was transposed to it, and the order of its axes.
    self.turned: tuple[Value, Sequence[int]] | None = None
    self.scores: Value | None = None  # that it is the softmax of

  def copy(self) -> 'Value':
    """Returns an equal value that another primitive makes."""
    result = Value(self.name, self.shape, self.array)
    result.base, result.turned, result.made = self.base, self.turned, self.made
    return result


def is_static(shape: Sequence[Any]) -> bool:
  """Returns True if no size is symbolic."""
  return all(isinstance(size, int) for size in shape)


def repeated(*shapes: Sequence[Any]) -> tuple[Any, ...]:
  """Returns the shape that all repeat to; sizes may be symbolic."""
  rank = max(map(len, shapes))
  axes = zip(*((1,) * (rank - len(x)) + tuple(x) for x in shapes), strict=True)
  return tuple(next((n for n in sizes if n != 1), 1) for sizes in axes)


class Graph:
  """Builds the nodes of a graph."""

  def __init__(self):
    self.nodes: list[onnx.NodeProto] = []
    self._numbers = itertools.count()
    self._constants: dict[str, np.ndarray] = {}
    self._known: dict[Any, str] = {}
    self._sizes: dict[str, Value] = {}  # of symbolic axes, int64 [1]
    self._extents: dict[Any, Value] = {}

  def constant(self, array: Any) -> Value:
    """Returns the value of an array."""
    return Value('', np.shape(array), np.asarray(array))

  def add(
    self, kind: str, *inputs: Value | None, shape: Any, **options: Any
  ) -> Any:
    """Adds a node; returns its value of a shape, or a list for several."""
    names = [self.name(value) if value else '' for value in inputs]
    shapes = shape if isinstance(shape, list) else [shape]
    outputs = [Value(f'v{next(self._numbers)}', size) for size in shapes]
    ends = [value.name for value in outputs]
    self.nodes.append(helper.make_node(kind, names, ends, **options))
    return outputs if shape is shapes else outputs[0]

  def name(self, value: Value) -> str:
    """Returns the name of a value; a constant becomes an initializer."""
    if value.array is None:
      return value.name
    array = value.array
    key: Any = id(array)  # which is kept, so that it stays unique
    if array.size < 64:
      key = array.dtype, array.shape, array.tobytes()
    if key not in self._known:
      self._known[key] = name = f'c{len(self._known)}'
      self._constants[name] = array
    return self._known[key]

  def as_int32(self, value: Value) -> Value:
    """Returns the value as JAX's integers."""
    return self.add('Cast', value, shape=value.shape, to=TensorProto.INT32)

  def ints(self, numbers: Sequence[int]) -> Value:
    """Returns the value of a list of sizes, axes or places."""
    return self.constant(np.array(numbers, np.int64))

  def measure(self, value: Value) -> None:
    """Reads the sizes of an input's symbolic axes."""
    for axis, size in enumerate(value.shape):
      if not isinstance(size, int) and str(size) not in self._sizes:
        extents = self.add('Shape', value, shape=(len(value.shape),))
        place = self.ints([axis])
        self._sizes[str(size)] = self.add('Gather', extents, place, shape=(1,))

  def extents(self, shape: Sequence[Any]) -> Value:
    """Returns the value of sizes, of which some may be symbolic."""
    if is_static(shape):
      return self.ints(shape)
    key = tuple(map(str, shape))
    if key not in self._extents:
      parts = [
        self.ints([size]) if isinstance(size, int) else self._size(size)
        for size in shape
      ]
      self._extents[key] = self.add(
        'Concat', *parts, shape=(len(parts),), axis=0
      )
    return self._extents[key]

  def numbers(self, size: Any) -> Value:
    """Returns the value of the numbers from 0 to a size, int64."""
    end = self.reshape(self.extents([size]), ())
    first, step = (self.constant(np.array(n, np.int64)) for n in (0, 1))
    return self.add('Range', first, end, step, shape=(size,))

  def _size(self, size: Any) -> Value:
    """Returns the value of a symbolic size, such as `b*l + 1`."""
    if (name := str(size)) in self._sizes:
      return self._sizes[name]
    parts: list[Any] = []
    match ast.parse(name, mode='eval').body:
      case ast.Constant(value=int(number)):
        return self.ints([number])
      case ast.BinOp(left=left, op=op, right=right):
        kind, parts = type(op).__name__, [left, right]
      case ast.Call(func=ast.Name(id=kind), args=parts):
        pass
      case _:
        kind = name
    if kind not in _ARITHMETIC:
      raise NotTranslatedError(f'the size {name}')
    operands = [self._size(ast.unparse(part)) for part in parts]
    result = self.add(_ARITHMETIC[kind], *operands, shape=(1,))
    self._sizes[name] = result
    return result

  def reshape(self, value: Value, shape: Sequence[Any]) -> Value:
    """Returns a value in another shape; reshapes in a row become one."""
    if value.array is not None:
      return self.constant(value.array.reshape(shape))
    base = value.base or value
    if base.shape == tuple(shape):
      return base.copy()
    new = self.add('Reshape', base, self.extents(shape), shape=tuple(shape))
    new.base = base
    return new

  def transpose(self, value: Value, order: Sequence[int]) -> Value:
    """Returns a value with its axes in another order; two turns become one."""
    if value.array is not None:
      return self.constant(value.array.transpose(order))
    source, first = value.turned or (value, range(len(order)))
    axes = [first[axis] for axis in order]
    if axes == [*range(len(order))]:
      return source.copy()
    shape = tuple(source.shape[axis] for axis in axes)
    new = self.add('Transpose', source, shape=shape, perm=axes)
    new.turned = source, axes
    return new

  def full(self, value: Value, shape: Sequence[Any]) -> Value:
    """Returns a value that has all repetitions of its shape."""
    if value.shape == tuple(shape):
      return value
    if value.array is not None and is_static(shape):
      return self.constant(np.broadcast_to(value.array, shape))
    return self.add('Expand', value, self.extents(shape), shape=tuple(shape))

  def item(self, value: Value, place: int) -> Value:
    """Returns `value[place]`."""
    if value.array is not None:
      return self.constant(value.array[place])
    number = self.constant(np.array(place, np.int64))
    return self.add('Gather', value, number, shape=value.shape[1:], axis=0)

  def stack(self, values: Sequence[Value], shape: Sequence[Any]) -> Value:
    """Returns values on a new first axis; the result has a shape."""
    rows = [self.full(one, shape[1:]) for one in values]
    wide = [self.reshape(row, (1, *shape[1:])) for row in rows]
    return self.add('Concat', *wide, shape=shape, axis=0)

  def elementwise(self, kind: str, *inputs: Value) -> Value:
    """Adds a node whose inputs have, or repeat to, the same shape."""
    shape = repeated(*(one.shape for one in inputs))
    flat = []
    for one in inputs:
      if one.array is not None:
        # Fusions expect scales and biases without axes of size 1 before.
        kept = itertools.dropwhile(lambda size: size == 1, one.shape)
        one = self.constant(one.array.reshape(tuple(kept)))
      flat.append(one)
    return self.add(kind, *flat, shape=shape)

  def model(self, inputs: Any, outputs: Any) -> onnx.ModelProto:
    """Returns the model without nodes that no output needs."""
    needed, kept = {one.name for one in outputs}, []
    for node in reversed(self.nodes):
      if needed.intersection(node.output):
        needed.update(node.input)
        kept.append(node)
    constants = [
      numpy_helper.from_array(array, name)
      for name, array in self._constants.items()
      if name in needed
    ]
    graph = helper.make_graph(kept[::-1], 'stage', inputs, outputs, constants)
    opsets = [helper.make_opsetid('', OPSET), helper.make_opsetid(OWN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
