"""Functions and chains of JAX in ONNX Runtime, which is faster on a CPU.

A function is traced to a jaxpr, whose primitives become operators one by one;
operations on constants are computed here. A chain has one program per stage,
for batches of any size: sizes are read at run time, so a batch has the length
of its longest row and no unused rows.
"""

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
from jax import export
from jax.extend.core import ClosedJaxpr, Literal
from onnx import helper

from core import machine
from serve_lib import loops, process
from serve_lib.chain import Grid, Group, Resizable
from serve_lib.onnx import primitives
from serve_lib.onnx.graph import Graph, NotTranslatedError, Value, is_static
from serve_lib.pool import HostPool
from serve_lib.programs import WarmUp

INLINED = ('jit', 'pjit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call')
MOST_BYTES = 2**31  # of all copies of the weights
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

  They look for work for some milliseconds before they sleep. Waking the threads
  of one session after another took a fifth of the time of an EAT's row alone.
  """
  onnxruntime.set_global_thread_pool_sizes(machine.cores(), 1)


def translate(
  function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[onnx.ModelProto, Any]:
  """Returns the model of `function(*arguments)` and the shapes of its result.

  Inputs `i0`, `i1`, ... are the leaves of the arguments, outputs the leaves
  of the result, in JAX's order. Arrays that the function closes over become
  constants. Sizes of `jax.export.symbolic_shape`, which arguments have, are
  read at run time. Raises NotTranslatedError.
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
  # What is not split into steps has the shape that it has in the body. Names of
  # parameters that count it differ between versions of JAX.
  body = params['jaxpr']
  ends = zip(eqn.outvars, body.out_avals, strict=True)
  count = sum(atom.aval.shape == inner.shape for atom, inner in ends)
  starts = zip(eqn.invars, body.in_avals, strict=True)
  kept = sum(atom.aval.shape == inner.shape for atom, inner in starts)
  first = kept - count
  fixed, inputs = full[:first], full[first + count :]
  carry, rows = full[first : first + count], list[list[Value]]()
  for n in range(params['length']):
    parts = [graph.item(value, n) for value in inputs]
    results = _run(graph, body, [*fixed, *carry, *parts])
    carry, made = results[:count], results[count:]
    rows.append(made)
  outputs = zip(zip(*rows, strict=True), eqn.outvars[count:], strict=True)
  return carry + [graph.stack(row, atom.aval.shape) for row, atom in outputs]


class OnnxStages:
  """The interface of `serve_lib.programs.Programs`; its grid has every size.

  Raises NotTranslatedError for a chain that XLA has to run.
  """

  pool, backend = HostPool, 'onnxruntime'
  # Tokens whose computation takes as long as reading all weights from memory:
  # 34 of a MiniLM on 2 cores, and of any width, as both grow with its square.
  padding = 32
  max_ahead = 0  # a call returns when it has finished
  widest_bytes = 0  # of batches between stages; not known before

  def __init__(self, chain: Resizable, grid: Grid, lazy: bool = False):
    self.chain, self._lazy = chain, lazy
    self.loop = loops.loop_of(chain)
    self._started = time.perf_counter()
    longest = grid.lengths[-1]
    lengths = range(min(2, longest), longest + 1)
    self.grid = Grid((*lengths,), (*range(1, grid.capacity + 1),))
    self._weights = jax.tree.map(jnp.asarray, chain.variables)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(self._weights))
    copies = MOST_BYTES // max(weights, 1)  # a chain may have none
    if copies < len(chain.variants):
      raise NotTranslatedError(f'more than {MOST_BYTES} bytes of weights')
    # Rows alone have programs of their own.
    both = chain.alone and chain.num_stages > 1
    both &= copies >= 2 * len(chain.variants)
    self._alone = (True, False) if both else (False,)
    self._builds = threading.RLock()
    # Arrays whose lengths are the sizes of a variant and length.
    self._like = functools.cache(
      lambda *key: [np.zeros(size, np.int8) for size in chain.sizes(*key)]
    )
    # A list of programs for each variant, and whether for rows alone.
    self._built: dict[tuple[str, bool], Any] = {}
    self._programs(chain.variants[0], self._alone[0])

  def run(
    self, group: Group, size: int, carry: Any, alone: bool = False
  ) -> tuple[Any, Any]:
    """Runs a stage; returns (carry, outputs) as NumPy arrays."""
    alone &= self._alone[0] and group.length <= self.padding
    program = self._programs(group.variant, alone)[group.stage]
    like = self._like(group.variant, group.length)
    loop = loops.at(self.loop, group.stage)
    count = loop.iterations if loop else 1
    return loops.repeat_on_host(lambda x: program([x, *like]), carry, count)

  def copy(
    self, kind: str, group: Group, sizes: tuple[int, int], *arrays: Any
  ) -> Any:
    """Copies rows of a carry."""
    carry, places = arrays
    return jax.tree.map(lambda leaf: leaf.take(places, axis=0), carry)

  def merge(self, carries: Sequence[Any], slots: Sequence[Any]) -> Any:
    """Copies the rows at `slots` of each carry into one, padded to its size."""

    def merged(*leaves: np.ndarray) -> np.ndarray:
      shape = np.max([leaf.shape[1:] for leaf in leaves], axis=0, initial=0)
      count = sum(map(len, slots))
      result = np.zeros((count, *shape.astype(int)), leaves[0].dtype)
      first = 0
      for leaf, places in zip(leaves, slots, strict=True):
        inner = tuple(map(slice, leaf.shape[1:]))
        result[(slice(first, first + len(places)), *inner)] = leaf[places]
        first += len(places)
      return result

    return jax.tree.map(merged, *carries)

  def compile(self, progress: bool = True, threads: int = 1) -> WarmUp:
    """Builds the programs of all variants, with `lazy` of the first."""
    if not self._lazy:
      for one in itertools.product(self.chain.variants, self._alone):
        self._programs(*one)
    count = sum(map(len, self._built.values()))
    seconds = time.perf_counter() - self._started
    return WarmUp(count, seconds, self.backend)

  def _programs(self, *key: Any) -> Any:
    """Returns the programs of a variant, maybe for rows alone; built once."""
    if key not in self._built:
      with self._builds:
        if key not in self._built:  # since it had to wait
          self._built[key] = self._build(*key)
    return self._built[key]

  def _build(self, variant: str, alone: bool) -> Any:
    further = [f'k{n}' for n, _ in enumerate(self.chain.sizes(variant, 1))]
    names, longest = ['b', 'l', *further], self.grid.lengths[-1]
    limits = [f'l <= {longest}', f'l >= {min(2, longest)}']
    for other, name in itertools.pairwise(names[1:]):
      limits += [f'{name} <= {other}', f'{name} >= 1']
    b, length, *sizes = export.symbolic_shape(
      ', '.join(names), constraints=limits
    )
    # The axes of the length are those that change with it.
    batches = [self.chain.pad([], longest - n, 2) for n in (0, longest > 1)]

    def abstract(one: Any, other: Any) -> Any:
      pairs = zip(one.shape[1:], other.shape[1:], strict=True)
      shape = b, *(n if n == m else length for n, m in pairs)
      dtype = jax.dtypes.canonicalize_dtype(one.dtype)
      return jax.ShapeDtypeStruct(shape, dtype)

    inputs = jax.tree.map(abstract, *batches)
    like = [jax.ShapeDtypeStruct((size,), np.int8) for size in sizes]

    def compiled(stage: Any, carry: Any, is_last: bool = False) -> Any:
      def run(carry: Any, *like: Any) -> Any:
        """Runs a stage; arrays as long as its sizes make them known."""
        carry, outputs = stage(self._weights, carry)
        return (None if is_last else carry), outputs

      return build(run, [carry, *like])

    try:
      return self.chain.programs(variant, (*sizes,), alone, inputs, compiled)
    except Exception as error:  # JAX's own for sizes is not public
      raise NotTranslatedError(f'{type(error).__name__}: {error}') from error
