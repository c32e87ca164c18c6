"""Programs that ONNX Runtime runs: the same stages, faster for a single row.

For small products XLA's CPU client gains nothing from a second core. A stage is
traced to a jaxpr, whose primitives become operators one by one; operations on
constants are computed here.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from jax.extend.core import ClosedJaxpr, Literal
from onnx import helper

from serve_lib import onnx_primitives
from serve_lib.onnx_graph import Graph, NotTranslatedError, Value

INLINED = ('jit', 'pjit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call')

# Two at a time would have more threads that spin than there are cores.
_uses_cores = threading.Lock()


@dataclasses.dataclass(frozen=True)
class OnnxProgram:
  """A compiled function of (variables, carry), with variables as constants."""

  session: Any
  structure: Any  # of the result
  bytes: int  # of the variables

  def __call__(self, variables: Any, carry: Any) -> Any:
    """Runs the program; returns NumPy arrays."""
    leaves = enumerate(jax.tree.leaves(carry))
    feed = {f'i{number}': np.asarray(leaf) for number, leaf in leaves}
    with _uses_cores:
      results = self.session.run(None, feed)
    return jax.tree.unflatten(self.structure, results)


def build(
  function: Callable[[Any, Any], Any], variables: Any, carry: Any, cores: int
) -> OnnxProgram | None:
  """Returns a program for carries of the shapes of `carry`.

  Returns None if a primitive has no translation.
  """
  arrays = jax.tree.map(np.asarray, variables)
  count = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
  try:
    model, result = translate(lambda x: function(arrays, x), [carry])
  except NotTranslatedError:
    return None
  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = cores
  # Threads of a program that is not running take no time from the others. (One
  # pool for all programs would take 20 % off an EAT's rows alone, but spins for
  # 40 ms, in which a program of XLA takes up to 1.15 times as long.)
  options.add_session_config_entry('session.force_spinning_stop', '1')
  options.log_severity_level = 3  # errors
  session = onnxruntime.InferenceSession(
    model.SerializeToString(), options, providers=['CPUExecutionProvider'],
    # This one flattens the rows; others fuse a bias with what follows, faster.
    disabled_optimizers=['MatMulAddFusion'],
  )  # fmt: skip
  return OnnxProgram(session, jax.tree.structure(result), count)


def translate(
  function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[onnx.ModelProto, Any]:
  """Returns the model of `function(*arguments)` and the shapes of its result.

  Inputs are `i0`, `i1`, ... and outputs `o0`, `o1`, ..., the leaves of the
  arguments and of the result in JAX's order. Arrays that the function closes
  over become constants. Raises NotTranslatedError.
  """
  closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
  graph = Graph()
  leaves = jax.tree.leaves(arguments)
  inputs = [Value(f'i{n}', x.shape) for n, x in enumerate(leaves)]
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
  return helper.make_tensor_value_info(
    name, onnx_primitives.dtype_of(leaf.dtype), leaf.shape
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
      found = eqn.primitive.bind(*full, **eqn.params)
      found = found if eqn.primitive.multiple_results else [found]
      results = [graph.constant(x) for x in found]
    else:
      results = [
        onnx_primitives.translate(graph, eqn, given, eqn.outvars[0].aval.shape)
      ]
      results[0].made = name, given, eqn.params
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]
