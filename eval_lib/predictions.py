"""Outputs of a model for every row of a split, and its labels."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float, Int, Num

from core.errors import InvalidDataError

Heads = Float[np.ndarray, 'E N C']  # logits of all heads
PerHead = Float[np.ndarray, ' E']
Labels = Int[np.ndarray, ' N']


def one_late(results: Iterator[Any]) -> Iterator[Any]:
  """Delays results by one, so that device work overlaps fetching.

  The host is at most one batch ahead; more would fill the device's memory.
  """
  for previous, _ in itertools.pairwise(itertools.chain(results, [None])):
    yield previous


def collect(
  dataset: Any,
  variables: Any,
  outputs: Callable[[Any, Any], Mapping[str, Any]],
  put: Callable[[Any], Any] = jax.device_put,
  finite: str = 'logits',
  labelled: bool = True,
) -> dict[str, np.ndarray]:
  """Runs `outputs(variables, batch)`, arrays `[B, ...]` by name, over a split.

  `put` puts a batch on the devices; batches may differ in length. Returns the
  outputs, e.g. 'logits' `[N, E, C]`, with 'index' `[N]` and, if batches have
  it, 'label' `[N]`, by ascending index, without padding and, if `labelled`,
  without rows that have no label. Raises InvalidDataError without examples,
  FloatingPointError if the output `finite` is not finite.
  """

  def run(batch):
    batch = put(batch)
    rows = {n: batch[n] for n in ('index', 'label', 'mask') if n in batch}
    return {**outputs(variables, batch), **rows}

  parts: dict[str, list[np.ndarray]] = {}
  for rows in one_late(map(run, dataset.batches())):
    fetched = multihost_utils.process_allgather(rows, tiled=True)
    is_labelled = np.asarray(fetched.pop('mask')) > 0
    is_real = is_labelled if labelled else np.asarray(fetched['index']) >= 0
    for name, values in fetched.items():
      parts.setdefault(name, []).append(np.asarray(values)[is_real])
  arrays = {name: np.concatenate(part) for name, part in parts.items()}
  if not len(arrays.get('index', ())):
    raise InvalidDataError(f'{finite}: the split holds no example with a label')
  if not np.isfinite(arrays[finite]).all():
    raise FloatingPointError(
      f'{finite}: expected finite numbers, got NaN or infinity; the run has '
      'diverged, or the model overflows in its compute dtype'
    )
  # Batches and processes distribute the records in different orders.
  order = np.argsort(arrays['index'], kind='stable')
  return {name: values[order] for name, values in arrays.items()}


def correct(
  logits: Float[np.ndarray, 'N C'], labels: Int[np.ndarray, 'N ...']
) -> Bool[np.ndarray, ' N']:
  """Returns True where the largest logit is a label; rows may have several."""
  return (logits.argmax(-1) == labels.reshape(len(labels), -1).T).any(0)


def label_text(labels: Any, names: Sequence[str]) -> Any:
  """Returns the names of the labels of a row, or a number as it is."""
  classes = np.atleast_1d(labels).tolist()
  if not names:
    return classes[0]
  return ', '.join(names[label] for label in classes if label >= 0)


def check_labels(
  labels: Num[np.ndarray, ' N'], most: int | float, what: str
) -> None:
  """Raises InvalidDataError if labels are hidden, as in GLUE's test splits."""
  wrong = ~((labels >= 0) & (labels <= most))
  if wrong.any():
    raise InvalidDataError(
      f'{what}: expected labels in [0, {most}], got {labels[wrong][0]} and '
      f'{wrong.sum() - 1} other wrong ones; hidden labels cannot be compared'
    )
