"""Everything the engine runs on the device, compiled ahead of time.

For every (stage, variant, length, batch) one program, and three small ones
that move rows between batches: `open` starts a full-size pool batch with rows
of another batch, `join` adds rows to it in place, `cut` takes its first rows
as a smaller batch. At request time a program that is not in the table is an
error and never a compilation.
"""

import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from jaxtyping import Int

from serve_lib.buckets import Grid, Key
from serve_lib.chain import Chain, Stage


class MissingProgramError(KeyError):
  """Something was to run that `compile` has not compiled."""


@dataclasses.dataclass(frozen=True)
class WarmUp:
  """What a warm-up did.

  Attributes:
    programs: programs in the table that differ.
    seconds: time it took.
    worst_case_bytes: device memory of all pools at their fullest.
  """

  programs: int
  seconds: float
  worst_case_bytes: int


class Programs:
  """The table of compiled programs of a chain on one device.

  Attributes:
    copies: how many times rows have been copied between batches.
    row_bytes: bytes of one row's carry into a stage, by key.
  """

  def __init__(self, chain: Chain, grid: Grid, device: Any = None):
    """Puts the variables on the device.

    Args:
      chain: the model.
      grid: the static shapes.
      device: where to run; None for where the variables are.
    """
    self._chain = chain
    self._grid = grid
    device = device or _device_of(chain.variables)
    self._sharding = jax.sharding.SingleDeviceSharding(device)
    self._variables = jax.device_put(chain.variables, device)
    self._table: dict[tuple[str, Key, int], Any] = {}
    self._compiled: dict[Any, tuple[Any, Any]] = {}
    self.copies = 0
    self.row_bytes: dict[Key, int] = {}
    self._rebucketed: set[tuple[int, str]] = set()

  def run(self, key: Key, size: int, carry: Any) -> tuple[Any, Any]:
    """Runs a stage; returns (carry, outputs) without waiting for them."""
    program, variables = self._find('stage', key, size)
    return program(variables, carry)

  def open(
    self, key: Key, size: int, carry: Any, source: Int[np.ndarray, ' B']
  ) -> Any:
    """A full-size batch whose row i is row `source[i]` of `carry`."""
    self.copies += 1
    return self._find('open', key, size)(carry, source)

  def join(
    self,
    key: Key,
    size: int,
    pool: Any,
    carry: Any,
    places: Int[np.ndarray, ' b'],
  ) -> Any:
    """Writes row i of `carry` to row `places[i]` of `pool`, which is gone.

    Rows whose place is outside the pool are left out.
    """
    self.copies += 1
    return self._find('join', key, size)(pool, carry, places)

  def cut(self, key: Key, size: int, pool: Any) -> Any:
    """The first `size` rows of a full-size batch, as a batch of their own."""
    self.copies += 1
    return self._find('cut', key, size)(pool)

  def _find(self, kind: str, key: Key, size: int) -> Any:
    try:
      return self._table[kind, key, size]
    except KeyError:
      raise MissingProgramError(
        f'no program {kind} for {key} at batch {size}: expected lengths '
        f'{self._grid.lengths}, batches {self._grid.batches} and variants '
        f'{self._chain.variants}, compiled by warm_up()'
      ) from None

  def next_keys(self, key: Key) -> list[Key]:
    """Returns the keys under which rows continue after a stage."""
    lengths = (key.length,)
    if key[:2] in self._rebucketed:
      lengths = self._grid.lengths
    return [Key(key.stage + 1, key.variant, length) for length in lengths]

  # -- ahead of time ---------------------------------------------------------

  def compile(self, progress: bool = True, threads: int = 1) -> WarmUp:
    """Compiles the whole grid.

    Args:
      progress: show a bar on stderr.
      threads: programs compiled at a time; more helps where there are cores.
    """
    started = time.perf_counter()
    grid = self._grid
    columns = list(
      itertools.product(self._chain.variants, grid.lengths, grid.batches)
    )
    bar = rich.progress.Progress(
      *rich.progress.Progress.get_default_columns(),
      rich.progress.TimeElapsedColumn(),
      console=rich.console.Console(stderr=True),
      disable=not progress,
    )
    with bar:
      task = bar.add_task('compiling', total=len(columns))
      for _ in _each(self._compile_column, columns, threads):
        bar.advance(task)
    return WarmUp(
      programs=len(self._compiled),
      seconds=time.perf_counter() - started,
      worst_case_bytes=grid.capacity * sum(self.row_bytes.values()),
    )

  def _compile_column(self, column: tuple[str, int, int]) -> None:
    """All stages of one variant, length and batch size, in their order."""
    variant, length, size = column
    carry = self._abstract(self._chain.example(length, size))
    for index in range(self._chain.num_stages):
      key = Key(index, variant, length)
      _check_rows(key, size, carry)
      if index > 0:
        self.row_bytes[key] = _bytes(carry) // size
        self._compile_copies(key, size, carry)
      carry = self._compile_stage(key, size, carry)

  def _compile_stage(self, key: Key, size: int, carry: Any) -> Any:
    """Compiles one stage; returns the shapes of the next one's carry."""
    stage = self._chain.stage(*key)
    is_last = key.stage == self._chain.num_stages - 1
    leaves, structure = jax.tree.flatten(self._variables)
    # Every argument of a call costs some microseconds, and most stages read
    # few of the variables. Asked anew for every program: what a stage reads may
    # depend on its shapes, and what is not read is zero.
    read = _leaves_read(stage, self._variables, carry)

    def function(variables: Any, carry: Any) -> Any:
      given = dict(zip(read, variables, strict=True))
      everything = [
        given[i] if i in given else jnp.zeros(leaf.shape, leaf.dtype)
        for i, leaf in enumerate(leaves)
      ]
      carry, outputs = stage(jax.tree.unflatten(structure, everything), carry)
      return (None if is_last else carry), outputs

    variables = [leaves[i] for i in read]
    program, out = self._build(
      (stage, is_last, read),
      function,
      (variables, carry),
      may_donate=key.stage > 0 and not is_last,
    )
    self._table['stage', key, size] = program, variables
    if 'length' in out[1]:
      self._rebucketed.add(key[:2])
    return self._abstract(out[0])

  def _compile_copies(self, key: Key, size: int, carry: Any) -> None:
    capacity = self._grid.capacity
    if capacity == 1:
      return  # nothing ever joins anything
    pool = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        (capacity, *leaf.shape[1:]), leaf.dtype, sharding=self._sharding
      ),
      carry,
    )
    whole, part = (
      self._abstract(np.zeros(n, np.int32)) for n in (capacity, size)
    )
    table, build = self._table, self._build
    table['open', key, size], _ = build('open', _open, (carry, whole))
    table['join', key, size], _ = build(
      'join', _join, (pool, carry, part), donate=(0,)
    )
    if size < capacity:
      table['cut', key, size], _ = build(('cut', size), _cut_to(size), (pool,))

  def _build(
    self,
    name: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    donate: tuple[int, ...] = (),
    may_donate: bool = False,
  ) -> tuple[Any, Any]:
    """(program, shapes of its results); the same request compiles once.

    `may_donate`: give the carry away, argument 1, if the new one can take its
    place; XLA can only reuse memory for an array of the same shape.
    """
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    signature = (name, may_donate, shapes, structure)
    if signature not in self._compiled:
      traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
      if may_donate and _shapes(arguments[1]) == _shapes(traced.out_info[0]):
        traced = jax.jit(function, donate_argnums=1).trace(*arguments)
      program = traced.lower().compile()
      self._compiled[signature] = program, traced.out_info
    return self._compiled[signature]

  def _abstract(self, tree: Any) -> Any:
    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape,
        jax.dtypes.canonicalize_dtype(leaf.dtype),
        sharding=self._sharding,
      ),
      tree,
    )


def _open(carry: Any, source: Any) -> Any:
  return jax.tree.map(
    lambda leaf: jnp.take(leaf, source, axis=0, mode='clip'), carry
  )


def _join(pool: Any, carry: Any, places: Any) -> Any:
  return jax.tree.map(
    lambda old, new: old.at[places].set(new, mode='drop'), pool, carry
  )


def _cut_to(size: int) -> Callable[[Any], Any]:
  return lambda pool: jax.tree.map(lambda leaf: leaf[:size], pool)


def _leaves_read(stage: Stage, variables: Any, carry: Any) -> tuple[int, ...]:
  """Which leaves of the variables a stage reads, by their number."""
  jaxpr = jax.make_jaxpr(stage)(variables, carry).jaxpr
  read = {id(one) for equation in jaxpr.eqns for one in equation.invars}
  read |= {id(one) for one in jaxpr.outvars}
  count = len(jax.tree.leaves(variables))
  return tuple(
    i for i, one in enumerate(jaxpr.invars[:count]) if id(one) in read
  )


def _each(function: Any, items: list[Any], threads: int) -> Any:
  """Calls the function on every item; yields as they are done."""
  if threads == 1:
    yield from map(function, items)
    return
  with concurrent.futures.ThreadPoolExecutor(threads) as executor:
    jobs = [executor.submit(function, item) for item in items]
    for job in concurrent.futures.as_completed(jobs):
      yield job.result()


def _device_of(variables: Any) -> Any:
  for leaf in jax.tree.leaves(variables):
    if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1:
      return next(iter(leaf.devices()))
  return jax.devices()[0]


def _shapes(tree: Any) -> list[tuple[Any, str]]:
  return sorted((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _check_rows(key: Key, size: int, carry: Mapping[str, Any] | Any) -> None:
  """Every array must have the rows first, or rows could not be moved."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
    if leaf.shape[:1] != (size,):
      name = jax.tree_util.keystr(path)
      raise ValueError(
        f'carry{name} into {key}: expected {size} rows on the first axis, got '
        f'shape {leaf.shape}; put batch-wide values into the variables'
      )
