"""What the engine serves: a model as a chain of stages, and a policy.

The engine knows no model. A `Chain` is the device's side of one: pure
functions with static shapes, each taking a batch from one possible exit to
the next. A `Policy` is the host's side: it turns an item into arrays, decides
after every stage which rows leave, and words the answer. Early exits, halting
and tapes of different lengths are all chains: between two stages the engine
sees rows that go on and rows that do not.
"""

import concurrent.futures
import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

# (variables, carry) -> (carry, outputs); every array has the rows first.
Stage = Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]

MAX_DETAILS = 10_000  # characters; a message may hold a whole item


class InputError(ValueError):
  """An item that cannot be served; the message says what is wrong with it."""


class ClosedError(RuntimeError):
  """The engine is closed: it takes nothing more, or dropped this row."""


class OverloadedError(TimeoutError):
  """No room among the pending rows within the time the caller would wait."""


@dataclasses.dataclass(frozen=True)
class Failure:
  """The answer to an item that could not be answered.

  Attributes:
    error: what went wrong, for this item alone or for its batch.
    during: 'encode', 'stage 0', 'stage 1', ..., 'answer', 'close', or
      'engine' for a defect of the engine itself.
    details: the end of the error's traceback as text, for a log. The error
      has none any more: its frames would hold the item and all it was made
      into, for as long as the answer is kept and in a cycle with it.
  """

  error: BaseException
  during: str
  details: str = dataclasses.field(default='', repr=False)

  @classmethod
  def of(
    cls,
    error: BaseException,
    during: str,
    handled: BaseException | None = None,
  ) -> 'Failure':
    """The failure of an error that has been caught.

    Args:
      error: loses its traceback, and so do those that led to it.
      during: see `Failure`.
      handled: what the caller's own code was handling when it called the
        engine; Python chains it to `error`, and it is none of our business.
    """
    details = _details(error)
    _drop_tracebacks(error, handled)
    return cls(error, during, details)


def _details(error: BaseException) -> str:
  try:
    return ''.join(traceback.format_exception(error))[-MAX_DETAILS:]
  except Exception:
    return ''  # whoever waits for the failure gets it without them


def _drop_tracebacks(
  error: BaseException, handled: BaseException | None
) -> None:
  seen = {id(handled)}
  left: list[BaseException | None] = [error]
  while left:
    one = left.pop()
    if one is None or id(one) in seen:
      continue
    seen.add(id(one))
    one.__traceback__ = None
    if one.__context__ is handled:
      one.__context__ = None
    left += [one.__cause__, one.__context__]
    if isinstance(one, BaseExceptionGroup):
      left += one.exceptions


@dataclasses.dataclass(frozen=True)
class Encoded:
  """An item as the chain takes it.

  Attributes:
    inputs: unpadded arrays of one row, as `Chain.pad` expects them.
    length: what must fit the length bucket; tokens, as a rule.
    variant: the chain's variant that is to serve the row.
    context: anything the policy wants to find again in `Row.encoded`.
  """

  inputs: Mapping[str, Any]
  length: int
  variant: str
  context: Any = None


@dataclasses.dataclass(eq=False)
class Row:
  """One item on its way through the chain.

  Attributes:
    encoded: what `Policy.encode` made of it.
    length: its length bucket.
    future: where its answer goes.
    submitted: when it was accepted, seconds of a monotonic clock.
    since: since when it has been waiting where it is now.
    outputs: what each stage so far gave for this row, `{name: array [...]}`.
  """

  encoded: Encoded
  length: int
  future: concurrent.futures.Future
  submitted: float
  since: float
  outputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@runtime_checkable
class Chain(Protocol):
  """A model cut into pure stages.

  What a stage computes for a row must not depend on the other rows: batches
  hold padding and rows of anybody, in any order.
  """

  @property
  def num_stages(self) -> int:
    """How many stages; every row leaves after the last one at the latest."""

  @property
  def variants(self) -> tuple[str, ...]:
    """Names of the forms it is served in, like 'pruned' and 'full'."""

  @property
  def variables(self) -> Any:
    """The parameters, a pytree of arrays."""

  def stage(self, index: int, variant: str, length: int) -> Stage:
    """The function of one stage for one length bucket.

    It is jitted, once for every batch bucket. The carry is a pytree whose
    arrays all have the rows first; that of the last stage is ignored. The
    outputs are what the host gets to see: a dict of small arrays `[B, ...]`.
    Stages that are the same computation should be the same function object:
    it is then compiled once.

    Args:
      index: the stage, from 0.
      variant: one of `variants`.
      length: the length bucket; the shapes of all stages may depend on it.
    """

  def example(self, length: int, rows: int) -> Mapping[str, Any]:
    """NumPy inputs of stage 0 with the shapes and dtypes of `pad`."""

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> Mapping[str, Any]:
    """NumPy inputs of stage 0 for some rows.

    Args:
      rows: `Encoded.inputs` of the rows.
      length: the length bucket.
      size: the batch bucket; rows behind `rows` are padding.
    """


@runtime_checkable
class Policy(Protocol):
  """What is asked and answered; `encode` is called from many threads.

  A policy that records what it decides has an attribute `monitor`, a
  `serve_lib.monitor.Monitor`: the engine then keeps its statistics there too,
  unless it is given another.
  """

  def encode(self, item: Any) -> Encoded:
    """Turns an item into arrays, in the thread of the caller.

    Raises:
      InputError: the item cannot be served.
    """

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Which rows leave here; not called after the last stage.

    Args:
      stage: the stage that has just run.
      rows: the rows of the batch, without padding; the last of `row.outputs`
        is what this stage gave.
      outputs: the same for all rows at once, NumPy arrays `[b, ...]`.
    """

  def answer(self, row: Row) -> Any:
    """The answer to a row that has left."""


class OneStage:
  """A `Chain` of one stage, for a model without exits.

  Args:
    apply: (variables, batch) -> logits `[B, O]`.
    variables: a pytree of arrays on one device.
    reader: its `pad` makes batches; see `image_items` and `text_items`.
  """

  num_stages = 1
  variants = ('whole',)

  def __init__(
    self, apply: Callable[[Any, Any], Any], variables: Any, reader: Any
  ):
    self.variables, self.pad = variables, reader.pad
    self._stage = lambda variables, batch: (
      (),
      {'logits': apply(variables, batch)},
    )

  def stage(self, index: int, variant: str, length: int) -> Stage:
    """Returns the whole model."""
    return self._stage

  def example(self, length: int, rows: int) -> Mapping[str, Any]:
    """Returns inputs for compiling."""
    return self.pad([], length, rows)


class ServedRun(NamedTuple):
  """The run that a task is served from; the default is a task without files.

  Attributes:
    directory: of the run, with its tokenizer and calibration; '' for none.
    step: of the checkpoint, for messages.
    lengths: wanted length buckets; None for those of the model or its data.
    on_drift: see `serve_lib.drift.DriftCheck`.
  """

  directory: str = ''
  step: int | None = None
  lengths: tuple[int, ...] | None = None
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None


NO_RUN = ServedRun()


class Loaded(NamedTuple):
  """A run read for serving: the first arguments of `serve_lib.engine.Engine`.

  Attributes:
    chain: the model, with its parameters on the first device.
    policy: encodes, decides, answers; its `warnings` are lines to print.
    lengths: length buckets, ascending.
  """

  chain: Any
  policy: Any
  lengths: tuple[int, ...]
