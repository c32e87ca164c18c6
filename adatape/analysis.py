"""Tapes of the rows of a split: how long they are and what they read.

The numbers of AdaTape's Figures 4 and 10, and the sequence lengths of Table 2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from core.errors import ConfigError
from core.fields import ConfigLike
from dataset_lib import builder
from dataset_lib.source import DatasetInfo
from eval_lib import predictions
from model_lib import flops

BATCH = 64


@dataclasses.dataclass(frozen=True)
class Tapes:
  """The tapes of N rows."""

  index: Int[np.ndarray, ' N']  # of each row in its split
  # Class of each row, or its classes padded with -1.
  label: Int[np.ndarray, 'N ...']
  correct: Bool[np.ndarray, ' N']  # True if the answer is a class of the row
  length: Int[np.ndarray, ' N']  # tape tokens of each row
  picks: Int[np.ndarray, 'N T K']  # bank tokens by tape token, -1 beyond it
  input_tokens: int  # of every row, with [CLS] if there is one
  bank_size: int  # tokens of the bank, C
  max_steps: int  # most tape tokens of a row, T

  @property
  def counts(self) -> Int[np.ndarray, ' C']:
    """The number of rows that read each bank token; a row reads it once."""
    read = self.picks[self.picks >= 0]
    return np.bincount(read, minlength=self.bank_size)


def read(task: Any, variables: Any, data: builder.Dataset) -> Tapes:
  """Reads and classifies every row of `data` without noise.

  `task` has a `TapeClassifier`. Raises ConfigError for a model without a bank.
  """
  model, sizes = task.model, dict[str, int]()
  if model.reading() is None:
    expected = 'a model with a bank; without one there is nothing to analyse'
    raise ConfigError('model.bank', model.bank, expected)

  @jax.jit
  def run(variables: Any, batch: Any) -> dict[str, Any]:
    given = {'params': variables['params'], **variables['model_state']}
    x, tape, size = model.apply(given, task.inputs(batch), method='read')
    sizes.update(input_tokens=x.shape[1], bank_size=size)
    logits, _ = model.apply(given, x, tape.tokens, tape.mask, method='classify')
    on_tape = tape.mask[..., None] > 0
    picks = jnp.where(on_tape, tape.indices, -1)
    return {'logits': logits, 'length': tape.length, 'picks': picks}

  found = predictions.collect(data, variables, run)
  return Tapes(
    index=found['index'],
    label=found['label'],
    correct=predictions.correct(found['logits'], found['label']),
    length=found['length'],
    picks=found['picks'],
    max_steps=model.max_steps,
    **sizes,
  )


def spread_rows(
  config: ConfigLike, split: str, rows: int, run: DatasetInfo | None = None
) -> builder.Dataset:
  """Opens at most `rows` records of a split; see `builder.spread`."""
  return builder.spread(builder.build_source(config, split, run), rows, BATCH)


def chosen_inputs(source: Any, records: Int[np.ndarray, ' N']) -> list[Any]:
  """Returns inputs of the model, one for each record, in this order."""
  data = builder.chosen(source, records, BATCH)
  return [
    row
    for batch in data.batches()
    for row in batch[data.info.input_key][batch['mask'] > 0]
  ]


def bank_grid(model: Any, input_shape: tuple[int, ...]) -> tuple[int, int]:
  """Returns rows and columns of a bank made from the input.

  `(1, N)` for a bank of N symbols, `(0, 0)` for one that is learned.
  """
  if len(input_shape) == 1:
    return 1, input_shape[0]
  if model.bank != 'input':
    return 0, 0
  across = input_shape[1] // model.bank_patch_size
  total = flops.num_patches(input_shape, model.bank_patch_size)
  return total // across, across
