"""Functions of JAX that ONNX Runtime runs, which is faster on a CPU.

A function is traced to a jaxpr, whose primitives become operators one by one;
operations on constants are computed here.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from jax.extend.core import ClosedJaxpr, Literal
from onnx import helper

from core import machine
from serve_lib import process
from serve_lib.onnx import primitives
from serve_lib.onnx.graph import Graph, NotTranslatedError, Value, is_static

INLINED = ('jit', 'pjit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call')
MOST_STEPS = 256  # of a scan, whose body is repeated


@dataclasses.dataclass(frozen=True)
class OnnxProgram:
  """A compiled function."""

  session: Any
  read: tuple[int, ...]  # the leaves of its arguments that it uses
  structure: Any  # of its result
  result: Any  # the same with shapes

  def __call__(self, arguments: Sequence[Any]) -> Any:
    """Runs the program; returns NumPy arrays."""
    leaves = jax.tree.leaves(arguments)
    feed = {f'i{number}': leaves[number] for number in self.read}
    results = self.session.run(None, feed)
    return jax.tree.unflatten(self.structure, results)


def build(
  function: Callable[..., Any], arguments: Sequence[Any]
) -> OnnxProgram:
  """Returns a program for arguments of these shapes; see `translate`."""
  model, result = translate(function, arguments)
  options = onnxruntime.SessionOptions()
  if process.OWNED.is_set():
    _share_threads()
    options.use_per_session_threads = False
  else:
    options.intra_op_num_threads = machine.cores()
    # Threads of a program that is not running take no time from the others.
    options.add_session_config_entry('session.force_spinning_stop', '1')
  options.log_severity_level = 3  # errors
  session = onnxruntime.InferenceSession(
    model.SerializeToString(), options, providers=['CPUExecutionProvider'],
    # The first one flattens the rows; others fuse a bias with what follows,
    # faster. The second one's operator takes three times as long as its parts.
    disabled_optimizers=['MatMulAddFusion', 'SkipLayerNormFusion'],
  )  # fmt: skip
  read = tuple(int(one.name[1:]) for one in session.get_inputs())
  return OnnxProgram(session, read, jax.tree.structure(result), result)


@functools.cache
def _share_threads() -> None:
  """Creates the threads of all sessions, once in a process.

  They look for work for some milliseconds before they sleep. Waking those of
  one session after another took a fifth of the time of an EAT's row alone.
  """
  onnxruntime.set_global_thread_pool_sizes(machine.cores(), 1)


def translate(
  function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[onnx.ModelProto, Any]:
  """Returns the model of `function(*arguments)` and the shapes of its result.

  Inputs `i0`, `i1`, ... are the leaves of the arguments, outputs those of the
  result, in JAX's order. Arrays that the function closes over become constants.
  Sizes of `jax.export.symbolic_shape`, which arguments have, are read at run
  time. Raises NotTranslatedError.
  """
  closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
  graph = Graph()
  leaves = jax.tree.leaves(arguments)
  inputs = [Value(f'i{n}', x.shape) for n, x in enumerate(leaves)]
  for one in inputs:
    graph.measure(one)
  found = _run(graph, closed, inputs)
  outputs: dict[str, onnx.ValueInfoProto] = {}
  for value, leaf in zip(found, jax.tree.leaves(result), strict=True):
    value = graph.full(value, leaf.shape)
    if not value.name.startswith('v') or value.name in outputs:
      # An input, a constant, or an output already.
      value = graph.add('Identity', value, shape=leaf.shape)
    outputs[value.name] = _info(value.name, leaf)
  infos = [_info(f'i{number}', leaf) for number, leaf in enumerate(leaves)]
  return graph.model(infos, [*outputs.values()]), result


def _info(name: str, leaf: Any) -> onnx.ValueInfoProto:
  return helper.make_tensor_value_info(
    name,
    primitives.dtype_of(leaf.dtype),
    [n if isinstance(n, int) else str(n) for n in leaf.shape],
  )


def _run(
  graph: Graph, closed: ClosedJaxpr, inputs: Sequence[Value]
) -> list[Value]:
  """Translates the equations of a jaxpr in order; returns its outputs."""
  jaxpr = closed.jaxpr
  values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
  for variable, array in zip(jaxpr.constvars, closed.consts, strict=True):
    values[variable] = graph.constant(array)

  def read(atom: Any) -> Value:
    if not isinstance(atom, Literal):
      return values[atom]
    aval: Any = atom.aval
    return graph.constant(np.asarray(atom.val, aval.dtype))

  for eqn in jaxpr.eqns:
    for atom in eqn.outvars:
      primitives.dtype_of(atom.aval.dtype)  # may be refused
    given = [read(atom) for atom in eqn.invars]
    name, atoms = eqn.primitive.name, (*eqn.invars, *eqn.outvars)
    is_constant = all(one.array is not None for one in given)
    is_constant &= all(is_static(atom.aval.shape) for atom in atoms)
    if name in INLINED:
      inner = eqn.params.get('jaxpr') or eqn.params.get('call_jaxpr')
      results = _run(graph, inner, given)
    elif name == 'scan':
      results = _unrolled(graph, eqn, given)
    elif is_constant and name != 'dim_as_value':
      full = [
        np.broadcast_to(one.array, atom.aval.shape)
        for one, atom in zip(given, eqn.invars, strict=True)
      ]
      arrays = eqn.primitive.bind(*full, **eqn.params)
      arrays = arrays if eqn.primitive.multiple_results else [arrays]
      results = [graph.constant(array) for array in arrays]
    else:
      shape = eqn.outvars[0].aval.shape
      results = primitives.translate(graph, eqn, given, shape)
      if not isinstance(results, list):
        results = [results]
      for place, one in enumerate(results):
        one.made = name, given, eqn.params | {'output': place}
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _unrolled(graph: Graph, eqn: Any, given: Sequence[Value]) -> list[Value]:
  """Translates a scan: its body once for each step."""
  params, pairs = eqn.params, zip(given, eqn.invars, strict=True)
  if params['reverse'] or params['length'] > MOST_STEPS:
    raise NotTranslatedError('a scan backwards, or of many steps')
  full = [graph.full(value, atom.aval.shape) for value, atom in pairs]
  first, count = params['num_consts'], params['num_carry']
  fixed, inputs = full[:first], full[first + count :]
  carry, rows = full[first : first + count], list[list[Value]]()
  for n in range(params['length']):
    parts = [graph.item(value, n) for value in inputs]
    results = _run(graph, params['jaxpr'], [*fixed, *carry, *parts])
    carry, made = results[:count], results[count:]
    rows.append(made)
  outputs = zip(zip(*rows, strict=True), eqn.outvars[count:], strict=True)
  return carry + [graph.stack(row, atom.aval.shape) for row, atom in outputs]
