"""Device programs of the engine, compiled ahead of time.

One program for every stage, variant, length and batch size, and small ones that
copy rows between batches. Nothing is compiled after warm-up; a missing program
raises KeyError.
"""

import collections
import concurrent.futures
import ctypes
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from jax.experimental.compilation_cache import compilation_cache

from serve_lib.chain import Chain, Grid, Group

# Copies compile in milliseconds; cache them too, for fast restarts.
CACHE = {
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}
# Options of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


class WarmUp(NamedTuple):
  """Result of a warm-up."""

  programs: int
  seconds: float
  worst_case_bytes: int  # memory if every group had a full open batch


class Programs:
  """Compiled programs of a chain, on the device of its variables."""

  def __init__(self, chain: Chain, grid: Grid):
    self.chain, self.grid = chain, grid
    self.copies = 0  # of rows between batches
    leaves = jax.tree.leaves(chain.variables)
    found = [d for x in leaves if isinstance(x, jax.Array) for d in x.devices()]
    device = (found or jax.devices())[0]
    self._variables = jax.device_put(chain.variables, device)
    self._sharding = jax.sharding.SingleDeviceSharding(device)
    self._table: dict[tuple[Any, ...], Any] = {}
    self._compiled: dict[Any, Any] = {}
    self._row_bytes: dict[Group, int] = {}  # of its carry entering the stage
    # Row shapes of the carries of stages that change the rows' length buckets.
    self._moving: dict[tuple[int, str], list[Any]] = {}

  def run(self, group: Group, size: int, carry: Any) -> tuple[Any, Any]:
    """Runs a stage; returns (carry, outputs) without waiting for them."""
    program, variables = self._find('stage', group, size)
    return program(variables, carry)

  def copy(
    self, kind: str, group: Group, sizes: tuple[int, int], *arrays: Any
  ) -> Any:
    """Copies rows with `_gather` or `_join`, from and to batches of `sizes`."""
    self.copies += 1
    return self._find(kind, group, sizes)(*arrays)

  def _find(self, *key: Any) -> Any:
    if key not in self._table:
      raise KeyError(f'no program {key} was compiled by warm_up()')
    return self._table[key]

  def batch_bytes(self, group: Group) -> int:
    """Returns the device memory of one open batch."""
    return self.grid.capacity * self._row_bytes.get(group, 0)

  @property
  def widest_bytes(self) -> int:
    """Most memory of the open batches that one finished batch can create."""
    sizes: collections.Counter[Any] = collections.Counter()
    for group in self._row_bytes:
      moved = (group.stage - 1, group.variant) in self._moving
      sizes[group[:2] if moved else group] += self.batch_bytes(group)
    return max(sizes.values(), default=0)

  def compile(
    self, progress: bool = True, threads: int = 1, cache_directory: str = ''
  ) -> WarmUp:
    """Compiles the whole grid; see `Engine`."""
    started, grid = time.perf_counter(), self.grid
    columns = itertools.product(self.chain.variants, grid.lengths, grid.batches)
    options = {'jax_compilation_cache_dir': cache_directory, **CACHE}
    before = _configure(options if cache_directory else {})
    executor = concurrent.futures.ThreadPoolExecutor(threads)
    try:
      jobs = [executor.submit(self._compile_column, *one) for one in columns]
      for job in rich.progress.track(
        concurrent.futures.as_completed(jobs), 'compiling', len(jobs),
        console=rich.console.Console(stderr=True), disable=not progress,
      ):  # fmt: skip
        job.result()
    finally:
      executor.shutdown(cancel_futures=True)
      _configure(before)
    return WarmUp(
      programs=len(self._compiled),
      seconds=time.perf_counter() - started,
      worst_case_bytes=sum(map(self.batch_bytes, self._row_bytes)),
    )

  def _compile_column(self, variant: str, length: int, size: int) -> None:
    """Compiles all stages of one variant, length and batch size in order."""
    carry = self._abstract(self.chain.pad([], length, size))
    for stage in range(self.chain.num_stages):
      group = Group(stage, variant, length)
      self._check(group, size, carry)
      if stage > 0:
        leaves = jax.tree.leaves(carry)
        count = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        self._row_bytes[group] = count // size
        self._compile_copies(group, size, carry)
      carry = self._compile_stage(group, size, carry)

  def _compile_stage(self, group: Group, size: int, carry: Any) -> Any:
    """Compiles one stage; returns the shapes of its carry."""
    stage = self.chain.stage(*group)
    is_last = group.stage == self.chain.num_stages - 1
    leaves, structure = jax.tree.flatten(self._variables)
    traced, (new, outputs) = jax.make_jaxpr(stage, return_shape=True)(
      self._variables, carry
    )
    # Each argument of a call takes 0.3 microseconds, so only the variables that
    # the stage reads are passed (this can differ between shapes).
    used = {id(one) for eqn in traced.jaxpr.eqns for one in eqn.invars}
    used |= set(map(id, traced.jaxpr.outvars))
    inputs = traced.jaxpr.invars[: len(leaves)]
    read = [number for number, one in enumerate(inputs) if id(one) in used]

    def run(variables: Any, carry: Any) -> Any:
      everything = list(leaves)
      for number, leaf in zip(read, variables, strict=True):
        everything[number] = leaf
      carry, outputs = stage(jax.tree.unflatten(structure, everything), carry)
      return (None if is_last else carry), outputs

    # XLA reuses the memory of a carry for a new one of the same shapes.
    reused = group.stage > 0 and not is_last and _shapes(carry) == _shapes(new)
    variables = [leaves[number] for number in read]
    name, donate = (stage, is_last, *read), (1,) * reused
    program = self._build(run, variables, carry, donate=donate, name=name)
    self._table['stage', group, size] = program, variables
    if 'length' in outputs and not is_last:
      self._moving.setdefault(group[:2], _row_shapes(new))
    return self._abstract(new)

  def _compile_copies(self, group: Group, size: int, carry: Any) -> None:
    capacity = self.grid.capacity
    if capacity == 1:
      return  # batches of one row are never joined
    places = [np.zeros(n, np.int32) for n in (capacity, size)]
    whole, part = self._abstract(places)
    pool = self._abstract(jax.eval_shape(_gather, carry, whole))
    table, build = self._table, self._build
    table['gather', group, (size, capacity)] = build(_gather, carry, whole)
    table['gather', group, (capacity, size)] = build(_gather, pool, part)
    join = build(_join, pool, carry, part, donate=(0,))
    table['join', group, (size, capacity)] = join

  def _build(
    self,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    name: Any = None,
  ) -> Any:
    """Returns a program; compiles equal ones, by name or function, once."""
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    signature = (name or function, donate, shapes, structure)
    if signature not in self._compiled:
      jitted = jax.jit(function, donate_argnums=donate)
      self._compiled[signature] = jitted.lower(*arguments).compile()
    return self._compiled[signature]

  def _abstract(self, tree: Any) -> Any:
    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
      dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
      return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=self._sharding)

    return jax.tree.map(abstract, tree)

  def _check(self, group: Group, size: int, carry: Any) -> None:
    """Raises ValueError if rows of the carry could not be copied or moved."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
      if leaf.shape[:1] != (size,):
        name = jax.tree_util.keystr(path)
        raise ValueError(
          f'carry{name} into {group}: expected {size} rows on the first axis, '
          f'got shape {leaf.shape}; put batch-wide values into the variables'
        )
    found = _row_shapes(carry)
    expected = self._moving.get((group.stage - 1, group.variant), found)
    if found != expected:
      legal = f"shapes {expected} at every length, as a stage outputs 'length'"
      raise ValueError(f'carry into {group}: expected {legal}, got {found}')


def _configure(options: dict[str, Any]) -> dict[str, Any]:
  """Sets options of JAX's cache of programs; returns their old values."""
  before = {name: getattr(jax.config, name) for name in options}
  for item in options.items():
    jax.config.update(*item)
  if options:
    # JAX reads them once in a process, or after a reset.
    compilation_cache.reset_cache()
  return before


def _gather(carry: Any, source: Any) -> Any:
  return jax.tree.map(
    lambda leaf: jnp.take(leaf, source, axis=0, mode='clip'), carry
  )


def _join(pool: Any, carry: Any, places: Any) -> Any:
  """Copies rows to `places`; ignores an index outside of the pool."""
  return jax.tree.map(
    lambda old, new: old.at[places].set(new, mode='drop'), pool, carry
  )


def _shapes(tree: Any) -> list[tuple[Any, str]]:
  return sorted((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree))


def _row_shapes(tree: Any) -> list[Any]:
  return [leaf.shape[1:] for leaf in jax.tree.leaves(tree)]


def keep_freed_memory() -> bool:
  """Keeps freed host memory in the process instead of the kernel.

  glibc returns XLA's temporaries above 32 MB to the kernel after each run of a
  CPU program, and the next run faults the same pages in again. Keeping them
  saves 0 to 13 % of the time of a BERT-base at batch 16, and a fifth of a
  training step of a ViT of width 64. Irreversible; call it before threads are
  created, whose arenas it does not reach. Returns True if the C library has all
  options.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (OSError, TypeError, AttributeError):
    return False
  options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
  known = [mallopt(option, value) for option, value in options]
  return all(known)
