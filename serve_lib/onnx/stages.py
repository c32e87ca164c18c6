"""A chain in ONNX Runtime: one program per stage, for batches of any size.

Sizes are read at run time: a batch has the length of its longest row and no
unused rows.
"""

import functools
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from serve_lib import loops
from serve_lib.chain import Grid, Group, Resizable
from serve_lib.onnx.graph import NotTranslatedError
from serve_lib.onnx.program import build
from serve_lib.pool import HostPool
from serve_lib.programs import WarmUp

MOST_BYTES = 2**31  # of all copies of the weights


class OnnxStages:
  """The interface of `serve_lib.programs.Programs`; its grid has every size.

  Raises NotTranslatedError for a chain that XLA has to run.
  """

  pool, backend = HostPool, 'onnxruntime'
  # Tokens whose computation takes as long as reading all weights from memory:
  # 34 of a MiniLM on 2 cores, and of any width, as both grow with its square.
  padding = 32
  max_ahead = 0  # a call returns when it has finished

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
    return WarmUp(
      programs=count,
      seconds=time.perf_counter() - self._started,
      backend=self.backend,
    )

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
      run = functools.partial(_run, stage, self._weights, is_last)
      return build(run, [carry, *like])

    try:
      return self.chain.programs(variant, (*sizes,), alone, inputs, compiled)
    except Exception as error:  # JAX's own for sizes is not public
      raise NotTranslatedError(f'{error}') from error


def _run(
  stage: Any, weights: Any, is_last: bool, carry: Any, *like: Any
) -> Any:
  """Runs a stage; arrays as long as its sizes make them known."""
  carry, outputs = stage(weights, carry)
  return (None if is_last else carry), outputs
