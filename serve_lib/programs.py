"""Device programs of the engine.

One for every stage, variant, length and batch size, and small ones that copy
rows between batches. Warm-up compiles all of them; afterwards a missing one
raises KeyError. With `lazy` each is compiled when it is first needed.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from jax.extend.core import jaxpr_as_fun

from core.errors import ConfigError
from serve_lib import loops
from serve_lib.chain import Chain, Grid, Group
from serve_lib.pool import Pool
from serve_lib.program_cache import ProgramCache

_MAX_MAPS = '/proc/sys/vm/max_map_count'
PAUSE = 10.0  # seconds between lines of progress
_SHARE_OF_MAPS = 0.9  # that may be in use when a program is compiled
# Products by Eigen: 1.08 to 1.37 times as fast as by YNNPACK, XLA's default.
CPU_OPTIONS: Any = {'xla_cpu_experimental_ynn_fusion_type': ''}


class WarmUp(NamedTuple):
  """Result of a warm-up."""

  programs: int
  seconds: float
  backend: str  # that runs them, 'xla' or 'onnxruntime'


class Traced(NamedTuple):
  """A stage for one group and batch size, before it is compiled."""

  function: Callable[[Any, Any], Any]  # (the variables it reads, carry)
  read: tuple[int, ...]  # their numbers among the leaves of all variables
  variables: list[Any]
  carry: Any  # shapes of what it takes
  new: Any  # shapes of the carry that it returns
  donate: tuple[int, ...]
  name: Any  # equal for equal programs


class Programs:
  """Compiled programs of a chain, on the device of its variables.

  See `Engine` for the arguments.
  """

  pool = Pool  # of rows between the stages
  backend = 'xla'
  padding = 0  # tokens, for which rows of other lengths join a batch
  max_ahead = 8  # batches, as a call returns before it has finished

  def __init__(
    self,
    chain: Chain,
    grid: Grid,
    *,
    lazy: bool = False,
    cache_directory: str = '',
  ):
    self.chain, self.grid, self.loop = chain, grid, loops.loop_of(chain)
    leaves = jax.tree.leaves(chain.variables)
    devices = [
      d for x in leaves if isinstance(x, jax.Array) for d in x.devices()
    ]
    device = (devices or jax.devices())[0]
    self._variables = jax.device_put(chain.variables, device)
    self._sharding = jax.sharding.SingleDeviceSharding(device)
    self._options = CPU_OPTIONS if device.platform == 'cpu' else {}
    self._cache = ProgramCache(cache_directory)
    self._lazy, self._lock = lazy, threading.RLock()
    self._table: dict[tuple[Any, ...], Any] = {}
    self._traced: dict[tuple[Group, int], Traced] = {}
    self._compiled: dict[Any, Any] = {}
    self._row_bytes: dict[Group, int] = {}  # of its carry entering the stage
    # Row shapes of the carries of stages that change the rows' length buckets.
    self._moving: dict[tuple[int, str], list[Any]] = {}

  def run(
    self, group: Group, size: int, carry: Any, alone: bool = False
  ) -> tuple[Any, Any]:
    """Runs a stage; returns (carry, outputs) without waiting for them."""
    program, variables = self._find('stage', group, size)
    return program(variables, carry)

  def copy(
    self, kind: str, group: Group, sizes: tuple[int, int], *arrays: Any
  ) -> Any:
    """Copies rows with `_gather` or `_join`, from and to batches of `sizes`."""
    return self._find(kind, group, sizes)(*arrays)

  def _find(self, *key: Any) -> Any:
    if key not in self._table:
      if not self._lazy:
        raise KeyError(f'no program {key} was compiled by warm_up()')
      with self._lock, self._cache.used():
        if key not in self._table:  # no other thread has compiled it meanwhile
          self._add(*key)
    return self._table[key]

  @property
  def widest_bytes(self) -> int:
    """Most memory of full open batches that one finished batch can create."""
    sizes: collections.Counter[Any] = collections.Counter()
    for group, count in list(self._row_bytes.items()):
      moved = (group.stage - 1, group.variant) in self._moving
      if self.loop and group.stage == self.loop.stage + 1:  # or stay in it
        group = group._replace(stage=self.loop.stage)
      sizes[group[:2] if moved else group] += count
    return self.grid.capacity * max(sizes.values(), default=0)

  def compile(self, progress: bool = True, threads: int = 1) -> WarmUp:
    """Compiles the whole grid, with `lazy` nothing; see `Engine`."""
    started = time.perf_counter()
    executor = concurrent.futures.ThreadPoolExecutor(threads)
    with self._cache.used(), contextlib.ExitStack() as stack:
      stack.callback(executor.shutdown, cancel_futures=True)
      jobs = [
        executor.submit(self._compile_column, *column)
        for column in (() if self._lazy else self._columns())
      ]
      console = rich.console.Console(stderr=True, quiet=not progress)
      if jobs and not console.is_terminal:  # which has a bar
        console.print(f'compiling the programs of {len(jobs)} sizes of batches')
      told = started
      for number, job in enumerate(rich.progress.track(
        concurrent.futures.as_completed(jobs), 'compiling', len(jobs),
        console=console, disable=not progress or self._lazy,
      ), 1):  # fmt: skip
        job.result()
        now = time.perf_counter()
        if now > told + PAUSE and not console.is_terminal:
          console.print(f'compiled those of {number} of {len(jobs)} sizes')
          told = now
    seconds = time.perf_counter() - started
    return WarmUp(len(self._compiled), seconds, self.backend)

  def _compile_column(self, variant: str, length: int, size: int) -> None:
    """Compiles all programs of one variant, length and batch size in order."""
    capacity = self.grid.capacity
    for stage in range(self.chain.num_stages):
      group = Group(stage, variant, length)
      self._add('stage', group, size)
      # Batches of one row are never joined.
      if stage and capacity > 1 and length in self.grid.lengths:
        self._add('gather', group, (size, capacity))
        self._add('gather', group, (capacity, size))
        self._add('join', group, (size, capacity))

  def stages(self) -> Iterator[tuple[Group, int, Traced]]:
    """Yields group, batch size and traced stage of the whole grid."""
    for variant, length, size in self._columns():
      for stage in range(self.chain.num_stages):
        group = Group(stage, variant, length)
        yield group, size, self._trace(group, size)

  def _columns(self) -> Iterator[tuple[str, int, int]]:
    """Returns each variant, length and batch size."""
    grid = self.grid
    return itertools.product(self.chain.variants, grid.lengths, grid.batches)

  def _add(self, kind: str, group: Group, sizes: Any) -> None:
    """Compiles a program into the table."""
    if kind == 'stage':
      one = self._trace(group, sizes)
      options: Any = dict(donate=one.donate, name=one.name)
      program = self._build(one.function, one.variables, one.carry, **options)
      self._table[kind, group, sizes] = program, one.variables
      return
    source, target = sizes
    carry = self._trace(group, source).carry
    if kind == 'gather':
      places = self._abstract(np.zeros(target, np.int32))
      program = self._build(_gather, carry, places)
    else:
      places = self._abstract(np.zeros(source, np.int32))
      pool = self._trace(group, target).carry
      program = self._build(_join, pool, carry, places, donate=(0,))
    self._table[kind, group, sizes] = program

  def _trace(self, group: Group, size: int) -> Traced:
    """Traces a stage, and those before it, for a group and batch size."""
    if (group, size) in self._traced:
      return self._traced[group, size]
    if group.stage == 0:
      carry = self._abstract(self.chain.pad([], group.length, size))
    else:
      carry = self._trace(group._replace(stage=group.stage - 1), size).new
    self._check(group, size, carry)
    if group.stage > 0:
      leaves = jax.tree.leaves(carry)
      count = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
      self._row_bytes[group] = count // size
    step = self.chain.stage(*group)
    loop = loops.at(self.loop, group.stage)
    is_last = not loop and group.stage == self.chain.num_stages - 1
    times = loop.iterations if loop else 1

    def stage(variables: Any, carry: Any) -> Any:
      return loops.repeat(functools.partial(step, variables), carry, times)

    leaves = jax.tree.leaves(self._variables)
    traced, shapes = jax.make_jaxpr(stage, return_shape=True)(
      self._variables, carry
    )
    new, outputs = self._abstract(shapes)
    if loop and jax.tree.flatten(carry) != jax.tree.flatten(new):
      expected = f'that into it, {_shapes(carry)}, got {_shapes(new)}'
      raise ValueError(f'carry out of {group}, a loop: expected {expected}')
    if 'length' in outputs and not is_last:
      # Rows of a loop move to other lengths of itself, too.
      for number in (group.stage, group.stage - bool(loop)):
        self._moving.setdefault((number, group.variant), _row_shapes(new))
    # Each argument of a call takes 0.3 microseconds, so only the variables that
    # the stage reads are passed (this can differ between shapes).
    used = {id(one) for eqn in traced.jaxpr.eqns for one in eqn.invars}
    used |= set(map(id, traced.jaxpr.outvars))
    inputs = traced.jaxpr.invars[: len(leaves)]
    read = [number for number, one in enumerate(inputs) if id(one) in used]
    replay, structure = jaxpr_as_fun(traced), jax.tree.structure(shapes)

    def run(variables: Any, carry: Any) -> Any:
      """The stage, replayed, so that the model is traced once."""
      everything = list(leaves)
      for number, leaf in zip(read, variables, strict=True):
        everything[number] = leaf
      results = replay(*everything, *jax.tree.leaves(carry))
      carry, outputs = jax.tree.unflatten(structure, results)
      return (None if is_last else carry), outputs

    # XLA reuses the memory of a carry for a new one of the same shapes.
    reused = group.stage > 0 and not is_last and _shapes(carry) == _shapes(new)
    result = Traced(
      run, tuple(read), [leaves[number] for number in read], carry, new,
      (1,) * reused, (step, times, is_last, *read),
    )  # fmt: skip
    return self._traced.setdefault((group, size), result)

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
      self._check_memory_maps()
      lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
      self._compiled[signature] = lowered.compile(self._options)
    return self._compiled[signature]

  def _abstract(self, tree: Any) -> Any:
    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
      dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
      return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=self._sharding)

    return jax.tree.map(abstract, tree)

  def _check_memory_maps(self) -> None:
    """Raises ConfigError before the compiler would end the process.

    A program takes 100 to 200 memory maps, and LLVM aborts without one.
    """
    try:
      most = int(pathlib.Path(_MAX_MAPS).read_text())
      used = pathlib.Path('/proc/self/maps').read_bytes().count(b'\n')
    except OSError:  # not on Linux
      return
    if used > _SHARE_OF_MAPS * most:
      raise ConfigError(
        'engine.lengths', self.grid.lengths,
        'fewer lengths, batches or stages, or a higher limit: '
        f'{len(self._compiled)} programs are compiled, and the process has '
        f'{used} of {most} memory maps (sysctl vm.max_map_count)',
      )  # fmt: skip

  def _check(self, group: Group, size: int, carry: Any) -> None:
    """Raises ValueError if rows of the carry could not be copied or moved."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
      if leaf.shape[:1] != (size,):
        name = jax.tree_util.keystr(path)
        raise ValueError(
          f'carry{name} into {group}: expected {size} rows on the first axis, '
          f'got shape {leaf.shape}; put batch-wide values into the variables'
        )
    shapes = _row_shapes(carry)
    expected = self._moving.get((group.stage - 1, group.variant), shapes)
    if shapes != expected:
      legal = f"shapes {expected} at every length, as a stage outputs 'length'"
      raise ValueError(f'carry into {group}: expected {legal}, got {shapes}')


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
