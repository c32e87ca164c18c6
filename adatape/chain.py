"""Serving AdaTape: read the tape, then encode with a tape of that length.

The first stage reads the tapes until every row of the batch has halted, in ONNX
Runtime, which has no loop, by all steps. Each row then continues with rows of
the same length bucket or, in ONNX Runtime, of a similar tape.
"""

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import export

from adatape.model import TapeClassifier
from adatape.policy import Options, TapePolicy
from core.errors import ConfigError
from serve_lib import classifier
from serve_lib.chain import Resizable, Stage

# Ten pad a tape of mean T / 2 by a tenth; every bucket takes a program for each
# batch size and leaves a partial batch.
MAX_BUCKETS = 10
VARIANT = 'tape'


class TapeChain(Resizable):
  """A `TapeClassifier` as `serve_lib.chain.Chain` of two stages.

  Length buckets are tape lengths. `inputs` maps a batch of the reader to the
  model's inputs. `others` are variants with another reading.
  """

  num_stages = 2

  def __init__(
    self,
    model: TapeClassifier,
    variables: Mapping[str, Any],
    reader: Any,
    inputs: Callable[[Mapping[str, Any]], Any],
    others: Mapping[str, TapeClassifier] = types.MappingProxyType({}),
  ):
    self.model, self.variables = model, {'params': variables['params']}
    self.reader, self.pad, self._inputs = reader, reader.pad, inputs
    self._models = {VARIANT: model, **others}
    self.variants = tuple(self._models)
    self._reads = {
      (name, stops): functools.partial(self._read, module, stops)
      for name, module in self._models.items()
      for stops in (True, False)
    }

  def sized(
    self, index: int, variant: str, sizes: Any, alone: bool = False
  ) -> Stage:
    """Returns the pure function of a stage, for `sizes` of one tape length.

    The output of the first is `'length'` int32 `[B]`, the tape lengths; of the
    second `'logits'` float32 `[B, O]`.
    """
    if index:
      return functools.partial(self._classify, *sizes)
    # A program of any size has no loop, and runs all steps.
    is_any = export.is_symbolic_dim(*sizes)
    return self._reads[variant, not is_any]

  def sizes(self, variant: str, length: int) -> tuple[int, ...]:
    """Returns the tape length; see `serve_lib.chain.Resizable`."""
    return (length,)

  def _classify(self, length: Any, variables: Any, carry: Any) -> Any:
    x, tokens, mask = carry
    logits, _ = self.model.apply(
      variables, x, tokens[:, :length], mask[:, :length], method='classify'
    )
    return (), {'logits': logits}

  def _read(self, model: Any, stops: bool, variables: Any, batch: Any) -> Any:
    inputs = self._inputs(batch)
    options: Any = dict(stop_early=stops, method='read')
    result: Any = model.apply(variables, inputs, **options)
    x, tape, _ = result
    return (x, tape.tokens, tape.mask), {'length': tape.length}


def serve(task: Any, options: Mapping[str, Any], run: Any) -> Any:
  """Serves in two stages: read the tape, then encode.

  `run.lengths` are tape buckets; options: `adatape.policy.Options`.
  """
  chosen = classifier.read_options(Options, options)
  lengths = tape_lengths(task.model.max_steps, run.lengths)
  reader = classifier.item_reader(task, lengths[-1])

  def chain(variables: Any, others: Any) -> TapeChain:
    return TapeChain(task.model, variables, reader, task.inputs, others)

  return classifier.with_files(
    task, run, chosen.setting, VARIANT, lengths, chain, TapePolicy
  )


def tape_lengths(
  max_steps: int, lengths: Sequence[int] | None
) -> tuple[int, ...]:
  """Returns the tape buckets, ascending up to `max_steps`.

  `lengths` are wanted buckets; None for multiples of the smallest step from 2
  that gives at most `MAX_BUCKETS`.
  """
  if lengths is None:
    step = max(2, math.ceil(max_steps / MAX_BUCKETS))
    lengths = range(step, max_steps, step)
  for length in lengths:
    if type(length) is not int or not 1 <= length <= max_steps:
      legal = f'numbers of tape tokens from 1 to {max_steps} (model.max_steps)'
      raise ConfigError('lengths', tuple(lengths), legal)
  return tuple(sorted({*lengths, max_steps}))
