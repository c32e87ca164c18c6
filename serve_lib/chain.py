"""The two halves of a served model, a `Chain` and a `Policy`, and their data.

A `Chain` runs on the device: pure functions, each of the layers between two
exits. A `Policy` runs on the host. Rows are padded to length buckets, batches
to batch buckets (`Grid`).
"""

import abc
import bisect
import concurrent.futures
import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from core.errors import ConfigError

# (variables, carry) -> (carry, outputs); the first axis of every array is rows.
Stage = Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]

MAX_ID = 1000  # characters; an answer that waits to be read holds it
ILLEGAL_ID = (
  f'expected an id: a number, or a text of at most {MAX_ID} characters'
)
MAX_DETAILS = 10_000  # characters; a message may contain a whole item
_KINDS = {
  type(None): 'null', bool: 'boolean', int: 'number', float: 'number',
  str: 'text', dict: 'object',
}  # fmt: skip


class InputError(ValueError):
  """An item that cannot be served; the message says why."""


class ClosedError(RuntimeError):
  """The engine is closed: it accepts no item, or dropped this row."""


class OverloadedError(TimeoutError):
  """`max_pending` rows were pending for the whole timeout of a caller."""


@dataclasses.dataclass(frozen=True)
class Failure:
  """The answer to an item that failed."""

  # Without traceback and context, whose frames reference the item.
  error: BaseException
  # 'encode', 'stage 0', ..., 'answer', 'close', or 'engine' for its defect.
  during: str
  # The traceback; of an `InputError` the last line.
  details: str = dataclasses.field(default='', repr=False)

  @classmethod
  def of(
    cls,
    error: BaseException,
    during: str,
    handled: BaseException | None = None,
  ) -> 'Failure':
    """Returns the failure of a caught error, whose traceback it removes.

    `handled`, an exception that the caller is handling, is not modified.
    """
    details = ''
    with contextlib.suppress(Exception):
      # The traceback of an illegal item would take most of its time.
      lines = (
        traceback.format_exception_only(error)
        if isinstance(error, InputError)
        else traceback.format_exception(error)
      )
      details = ''.join(lines)[-MAX_DETAILS:]
    errors: list[BaseException | None] = [error]
    while errors:
      one = errors.pop()
      if one is None or one is handled:
        continue
      if one.__traceback__ or one.__context__:
        errors += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
          errors += one.exceptions
        one.__traceback__ = one.__context__ = None
    return cls(error, during, details)


def kind_of(kind: type) -> str:
  """Returns the name in JSON of a type of Python, for errors."""
  return _KINDS.get(kind, kind.__name__)


def take_id(item: Any) -> dict[str, Any]:
  """Removes a legal 'id' from an item; returns it as `{'id': ...}`, else {}."""
  own = item.get('id', {}) if isinstance(item, dict) else {}
  # The answer repeats it; a nested one could be too deep to write.
  is_long = isinstance(own, str) and len(own) > MAX_ID
  is_illegal = is_long or isinstance(own, (dict, list, bool))
  return {} if is_illegal else {'id': item.pop('id')}


def checked(answers: Sequence[Any]) -> Sequence[Any]:
  """Returns the answers; raises RuntimeError if one is a `Failure`."""
  for answer in answers:
    if isinstance(answer, Failure):
      raise RuntimeError(f'no answer: {answer.during}') from answer.error
  return answers


@dataclasses.dataclass(frozen=True)
class Encoded:
  """An item as the chain takes it: unpadded arrays of one row."""

  inputs: Mapping[str, Any]
  length: int  # usually in tokens
  variant: str  # of the chain
  context: Any = None  # for the policy's own use


@dataclasses.dataclass(eq=False)
class Row:
  """One item on its way through the chain."""

  encoded: Encoded
  length: int  # its length bucket
  future: concurrent.futures.Future
  submitted: float  # seconds of a monotonic clock
  since: float  # when it began to wait for its next stage
  bytes: int = 0  # host memory of its inputs
  turn: float = 0.0  # its place in the order of `RequestQueue`
  flow: Any = None  # of a `RequestQueue`
  alone: bool = False  # runs in batches of its own
  # One dict {name: array [...]} per finished stage, of a loop per visit.
  outputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Group(NamedTuple):
  """Key of rows that can run in one batch; `stage` is their next one."""

  stage: int
  variant: str
  length: int


@dataclasses.dataclass(frozen=True)
class Grid:
  """Length buckets of rows and row counts of batches, both ascending."""

  lengths: tuple[int, ...]
  batches: tuple[int, ...]

  def __post_init__(self):
    for name in ('lengths', 'batches'):
      sizes = getattr(self, name)
      legal = sizes and all(type(size) is int and size > 0 for size in sizes)
      if not legal or list(sizes) != sorted(set(sizes)):
        raise ConfigError(
          f'engine.{name}', sizes, 'a tuple of ascending positive integers'
        )

  @property
  def capacity(self) -> int:
    """Rows of a full batch."""
    return self.batches[-1]

  def fit_length(self, length: int) -> int:
    """Returns the length bucket of a row, or raises InputError."""
    lengths = self.lengths
    if not 1 <= length <= lengths[-1]:
      raise InputError(
        f'length: expected 1 to {lengths[-1]}, the longest bucket, got '
        f'{length}; truncate the item or serve with a longer bucket'
      )
    return lengths[bisect.bisect_left(lengths, length)]

  def fit_rows(self, rows: int) -> int:
    """Returns the smallest batch bucket that holds `rows` rows."""
    return self.batches[bisect.bisect_left(self.batches, rows)]


def doubling(largest: int) -> tuple[int, ...]:
  """Returns batch buckets 1, 2, 4, ... up to `largest`, which is included."""
  powers = {2**power for power in range(largest.bit_length())}
  return tuple(sorted({*powers, largest}))


@runtime_checkable
class Chain(Protocol):
  """A model cut into pure stages; one may be a loop, see `serve_lib.loops`.

  The result of a row must not depend on the other rows of its batch, which may
  be padding or other requests, in any order. The first of `variants` serves
  most rows.
  """

  num_stages: int
  variants: tuple[str, ...]
  variables: Any

  def stage(self, index: int, variant: str, length: int) -> Stage:
    """Returns the function of a stage, from 0, for one length bucket.

    Equal stages should be the same function object, which is compiled once.
    Outputs are small arrays `[B, ...]` for the host. An output `'length'`, int
    `[B]`, moves each row to the bucket that holds this length; the shapes of
    the carry must then not depend on the length.
    """

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> Mapping[str, Any]:
    """Returns inputs of stage 0: up to `size` `Encoded.inputs`, and padding."""


class Resizable(abc.ABC):
  """Base of a `Chain` whose stages are also compiled for any size."""

  num_stages: int
  variants: tuple[str, ...]
  variables: Any
  pad: Callable[..., Any]
  alone = False  # whether rows alone have programs of their own
  loop: Any = None  # see `serve_lib.loops`

  @abc.abstractmethod
  def sized(
    self, index: int, variant: str, sizes: tuple[Any, ...], alone: bool = False
  ) -> Stage:
    """Returns a stage for `sizes`, maybe symbolic; see `Chain.stage`."""

  def stage(self, index: int, variant: str, length: int) -> Stage:
    """Returns the function of a stage; see `Chain`."""
    return self.sized(index, variant, self.sizes(variant, length))

  def sizes(self, variant: str, length: int) -> tuple[int, ...]:
    """Returns sizes within the stages that depend on the length, descending."""
    return ()

  def programs(
    self,
    variant: str,
    sizes: tuple[Any, ...],
    alone: bool,
    inputs: Any,
    compile: Callable[..., Any],
  ) -> list[Any]:
    """Returns a program for each stage, of rows `alone` or of batches.

    `sizes` are sizes of `jax.export`, `inputs` the shapes of the first stage's.
    `compile(stage, carry, is_last=False)` returns a program, which maps [carry,
    *arrays as long as `sizes`] to (carry, outputs), with `is_last` to (None,
    outputs); its `result` are the shapes of these.
    """
    programs, carry, last = list[Any](), inputs, self.num_stages - 1
    ends = not self.loop or self.loop.stage < last  # a loop returns its carry
    for index in range(self.num_stages):
      stage = self.sized(index, variant, sizes, alone)
      programs.append(compile(stage, carry, is_last=ends and index == last))
      carry = programs[-1].result[0]
    return programs


@runtime_checkable
class Policy(Protocol):
  """Encodes items, decides which rows leave, builds answers.

  The engine records its statistics in `monitor`, a `serve_lib.monitor.Monitor`.
  A policy of `Task.serve` also has `lengths`, the length buckets in ascending
  order, and `warnings`, lines for the user.
  """

  monitor: Any

  def encode(self, item: Any) -> Encoded:
    """Turns an item into arrays in the caller's thread; raises InputError."""

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns True for the rows that leave; not called after the last stage.

    Of a loop it is called after each visit: True for the rows that leave it.
    `outputs` `[b, ...]` are of `stage`; `row.outputs` includes them.
    """

  def answer(self, row: Row) -> Any:
    """Returns the answer to a row that has left."""
