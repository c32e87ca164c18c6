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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

# (variables, carry) -> (carry, outputs); every array has the rows first.
Stage = Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]


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
  """

  error: BaseException
  during: str


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
  """What is asked and answered; `encode` is called from many threads."""

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
