"""Device programs of the engine, compiled ahead of time.

One program for every (stage, variant, length, batch), and three small ones
that copy rows between batches: 'open' starts a full-size pool batch with rows
of another batch, 'join' adds rows to it in place, 'cut' takes its first rows
as a smaller batch. A request for a program that is not in the table is an
error and never a compilation.
"""

import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

from serve_lib.chain import Chain, Stage
from serve_lib.schedule import Grid, Key


class MissingProgramError(KeyError):
  """A program that `compile` has not compiled."""


@dataclasses.dataclass(frozen=True)
class WarmUp:
  """Result of a warm-up.

  Attributes:
    programs: number of different programs.
    seconds: duration.
    worst_case_bytes: device memory of all pools when full.
  """

  programs: int
  seconds: float
  worst_case_bytes: int


class Programs:
  """The table of compiled programs of a chain on one device.

  Args:
    chain: the model.
    grid: the static shapes.
    device: to run on; None for the device of the variables.

  Attributes:
    copies: number of copies of rows between batches.
    row_bytes: bytes of one row's carry into a stage, by key.
  """

  def __init__(self, chain: Chain, grid: Grid, device: Any = None):
    self._chain = chain
    self._grid = grid
    device = device or _device_of(chain.variables)
    self._sharding = jax.sharding.SingleDeviceSharding(device)
    self._variables = jax.device_put(chain.variables, device)
    self._table: dict[tuple[str, Key, int], Any] = {}
    self._compiled: dict[Any, tuple[Any, Any]] = {}
    # (stage, variant) of stages that move rows to another length bucket.
    self._moving: set[tuple[int, str]] = set()
    self._moved: dict[tuple[int, str], Any] = {}  # shapes of their carries
    self.copies = 0
    self.row_bytes: dict[Key, int] = {}

  def run(self, key: Key, size: int, carry: Any) -> tuple[Any, Any]:
    """Runs a stage; returns (carry, outputs) without waiting for them."""
    program, variables = self._find('stage', key, size)
    return program(variables, carry)

  def copy(self, kind: str, key: Key, size: int, *arrays: Any) -> Any:
    """Copies rows between batches; returns the new carry.

    - 'open', carry, source `[B]`: row i is row `source[i]` of the carry.
    - 'join', pool, carry, places `[b]`: writes row i of the carry to row
      `places[i]` of the pool, whose memory is reused; places outside of the
      pool are dropped.
    - 'cut', pool: the first `size` rows.
    """
    self.copies += 1
    return self._find(kind, key, size)(*arrays)

  def _find(self, kind: str, key: Key, size: int) -> Any:
    try:
      return self._table[kind, key, size]
    except KeyError:
      raise MissingProgramError(
        f'no program {kind} for {key} at batch {size}: expected lengths '
        f'{self._grid.lengths}, batches {self._grid.batches} and variants '
        f'{self._chain.variants}, compiled by warm_up()'
      ) from None

  def batch_bytes(self, key: Key) -> int:
    """Returns the device memory of one open batch; 0 after the last stage."""
    return self._grid.capacity * self.row_bytes.get(key, 0)

  def next_bytes(self, key: Key) -> int:
    """Returns the device memory of the batches that a batch may open."""
    stage, variant, length = key
    moves = (stage, variant) in self._moving
    lengths = self._grid.lengths if moves else (length,)
    return sum(
      self.batch_bytes(Key(stage + 1, variant, length)) for length in lengths
    )

  @property
  def widest_bytes(self) -> int:
    """The largest value of `next_bytes`."""
    before = {key._replace(stage=key.stage - 1) for key in self.row_bytes}
    return max(map(self.next_bytes, before), default=0)

  # -- ahead of time ---------------------------------------------------------

  def compile(self, progress: bool = True, threads: int = 1) -> WarmUp:
    """Compiles the whole grid.

    Args:
      progress: show a bar on stderr.
      threads: programs compiled at a time.
    """
    started = time.perf_counter()
    grid = self._grid
    columns = list(
      itertools.product(self._chain.variants, grid.lengths, grid.batches)
    )
    console = rich.console.Console(stderr=True)
    bar = rich.progress.Progress(console=console, disable=not progress)
    with bar, concurrent.futures.ThreadPoolExecutor(threads) as executor:
      task = bar.add_task('compiling', total=len(columns))
      jobs = [executor.submit(self._compile_column, one) for one in columns]
      try:
        for job in concurrent.futures.as_completed(jobs):
          job.result()
          bar.advance(task)
      finally:
        executor.shutdown(cancel_futures=True)
    return WarmUp(
      programs=len(self._compiled),
      seconds=time.perf_counter() - started,
      worst_case_bytes=grid.capacity * sum(self.row_bytes.values()),
    )

  def _compile_column(self, column: tuple[str, int, int]) -> None:
    """Compiles all stages of one variant, length and batch size in order."""
    variant, length, size = column
    carry = self._abstract(self._chain.pad([], length, size))
    for index in range(self._chain.num_stages):
      key = Key(index, variant, length)
      self._check(key, size, carry)
      if index > 0:
        count = sum(map(_bytes, jax.tree.leaves(carry)))
        self.row_bytes[key] = count // size
        self._compile_copies(key, size, carry)
      carry = self._compile_stage(key, size, carry)

  def _compile_stage(self, key: Key, size: int, carry: Any) -> Any:
    """Compiles one stage; returns the shapes of its carry."""
    stage = self._chain.stage(*key)
    is_last = key.stage == self._chain.num_stages - 1
    leaves, structure = jax.tree.flatten(self._variables)
    # Every argument of a call takes some microseconds, so only the variables
    # that the stage reads are passed. Which ones may depend on its shapes.
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
    program, (carry, outputs) = self._build(
      (stage, is_last, read),
      function,
      (variables, carry),
      may_donate=key.stage > 0 and not is_last,
    )
    self._table['stage', key, size] = program, variables
    if 'length' in outputs and not is_last:
      self._moving.add(key[:2])
    return self._abstract(carry)

  def _compile_copies(self, key: Key, size: int, carry: Any) -> None:
    capacity = self._grid.capacity
    if capacity == 1:
      return  # batches of one row are never joined
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
    """Returns (program, shapes of its results); compiles equal ones once.

    With `may_donate` the memory of argument 1, the carry, is reused if the new
    carry has the same shapes, as XLA requires.
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

  def _check(self, key: Key, size: int, carry: Any) -> None:
    """Raises ValueError if rows of the carry could not be copied or moved."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
      if leaf.shape[:1] != (size,):
        name = jax.tree_util.keystr(path)
        raise ValueError(
          f'carry{name} into {key}: expected {size} rows on the first axis, '
          f'got shape {leaf.shape}; put batch-wide values into the variables'
        )
    before = key.stage - 1, key.variant
    if before in self._moving:
      shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(carry)]
      expected = self._moved.setdefault(before, shapes)
      if shapes != expected:
        raise ValueError(
          f'carry into {key}: expected the shapes {expected} of every length, '
          f"as the stage before has an output 'length', got {shapes}"
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
  """Returns the numbers of the leaves of the variables that a stage reads."""
  jaxpr = jax.make_jaxpr(stage)(variables, carry).jaxpr
  read = {id(one) for equation in jaxpr.eqns for one in equation.invars}
  read |= {id(one) for one in jaxpr.outvars}
  count = len(jax.tree.leaves(variables))
  return tuple(
    i for i, one in enumerate(jaxpr.invars[:count]) if id(one) in read
  )


def _device_of(variables: Any) -> Any:
  for leaf in jax.tree.leaves(variables):
    if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1:
      return next(iter(leaf.devices()))
  return jax.devices()[0]


def _shapes(tree: Any) -> list[tuple[Any, str]]:
  return sorted((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree))


def _bytes(leaf: Any) -> int:
  return leaf.size * leaf.dtype.itemsize
