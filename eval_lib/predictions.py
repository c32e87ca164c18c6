"""Logits of all heads for every row of a split, and splits without overlap.

Logits are recorded once for all rules, temperatures and thresholds. Rows used
for fitting are excluded from reporting.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from annotated_types import Interval, Predicate
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float, Int, Num

from core.errors import ConfigError, InvalidDataError, MissingDataError
from dataset_lib import builder, source
from eval_lib import evaluator
from eval_lib.probabilities import scale
from halting.row_rules import softmax

# Logits or probabilities of all heads, and one number for each.
Heads = Float[np.ndarray, 'E N C']
PerHead = Float[np.ndarray, ' E']
Labels = Int[np.ndarray, ' N']

# The field by which an evaluator learns the layers of the heads.
Layers = Annotated[
  tuple[Annotated[int, Interval(ge=1, le=10_000)], ...],
  Predicate(lambda layers: list(layers) == sorted(set(layers))),
  'ascending layers from 1, one for each head, or () to count the heads',
]


def collect(
  dataset: Any,
  variables: Any,
  outputs: Callable[[Any, Any], Mapping[str, Any]],
  put: Callable[[Any], Any] = jax.device_put,
  finite: str = 'logits',
  labelled: bool = True,
) -> dict[str, np.ndarray]:
  """Runs `outputs(variables, batch)`, arrays `[B, ...]` by name, over a split.

  `put` puts a batch on the devices. Batches may differ in length; the output
  `finite` may hold no NaN or infinity. Returns the outputs, e.g. 'logits'
  `[N, E, C]`, with 'index' `[N]` and, if batches have it, 'label' `[N]`; by
  ascending index, without padding and, if only `labelled`, without rows that
  have no label. Raises InvalidDataError without examples, FloatingPointError if
  the output `finite` is not finite.
  """

  def run(batch):
    batch = put(batch)
    rows = {n: batch[n] for n in ('index', 'label', 'mask') if n in batch}
    return {**outputs(variables, batch), **rows}

  parts: dict[str, list[np.ndarray]] = {}
  for rows in evaluator.one_late(map(run, dataset.batches())):
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


def probabilities(logits: Heads, temperatures: PerHead | None = None) -> Heads:
  """Returns the softmax over the classes of logits over temperatures.

  The dtype is that of the logits, float32 as in serving, so that thresholds
  behave equally where a confidence rounds to 1.
  """
  if temperatures is not None:
    logits = scale(logits, temperatures)
  return softmax(logits)


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


def confidence_exit(probabilities: Heads, threshold: float) -> Labels:
  """Returns the first head with `max_c P >= threshold`, else the last one.

  Indices by the confidence rule of EAT, section 4.
  """
  confidence = probabilities.max(-1)
  leaves = confidence >= confidence.dtype.type(threshold)
  leaves[-1] = True
  return leaves.argmax(0)


def check_labels(
  labels: Num[np.ndarray, ' N'], most: int | float, what: str
) -> None:
  """Raises InvalidDataError if labels are hidden, as in GLUE's test splits."""
  wrong = ~((labels >= 0) & (labels <= most))
  if wrong.any():
    raise InvalidDataError(
      f'{what}: expected labels in [0, {most}], got '
      f'{labels[wrong][0]} and {wrong.sum() - 1} other wrong ones; labels that '
      'are hidden cannot be evaluated against'
    )


def head_layers(layers: Sequence[int], num_heads: int) -> dict[str, int]:
  """Returns layers by head name: `layer_4: 4`; without layers `head_1: 1`.

  Raises ConfigError if there are more or fewer layers than heads.
  """
  if layers and len(layers) != num_heads:
    expected = f'{num_heads} layers, one for each head of the model'
    raise ConfigError('layers', tuple(layers), expected)
  if layers:
    return {f'layer_{number}': number for number in layers}
  return {f'head_{number}': number for number in range(1, num_heads + 1)}


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """Base of evaluators of the heads of a classifier.

  Temperatures are fitted on `calibration_split`; it may share no row with
  `split`, which is reported, or with the training split of the run.
  """

  NEEDS_OUTPUTS: ClassVar[bool] = True
  split: evaluator.Split = 'validation'
  calibration_split: Annotated[
    evaluator.Split | None,
    'the name of a split that training does not use, or None',
  ] = None
  layers: Layers = ()  # of the heads; () for the model's

  def __post_init__(self):
    self.layers = self.layers or self.context.layers
    self._data = {'split': self.open(self.split)}
    info = self._data['split'].info
    if info.num_classes < 2 or info.max_labels:
      kind = 'several labels a row' if info.max_labels else 'a regression'
      expected = 'one class a row: others have no single confidence'
      raise ConfigError('dataset', kind, expected)
    if self.calibration_split:
      self._data['calibration_split'] = self.open(self.calibration_split)
      expected = (
        'rows that `split` does not have, it shares {}: what was fitted cannot '
        'judge itself'
      )
      reported = self._data['split'].source
      self._check_apart('calibration_split', reported, expected)
      self.check_untrained('calibration_split')

  def heads(self, field: str, variables: Any) -> tuple[Heads, Labels]:
    """Returns logits and labels of the split that a field names."""
    logits, rows = self.rows(field, variables, self.context.outputs)
    return logits, rows['label']

  def rows(
    self, field: str, variables: Any, outputs: Any
  ) -> tuple[Heads, dict[str, np.ndarray]]:
    """Returns the logits, and all arrays of `collect`, of a field's split."""
    data = self._data[field]
    rows = collect(data, variables, outputs, self.context.put)
    self.unlabelled += len(data.source) - len(rows['label'])
    return np.moveaxis(rows['logits'], 1, 0), rows

  def check_untrained(self, field: str) -> None:
    """Raises ConfigError if the run is trained on rows of a field's split."""
    train_split = self.context.train_split
    # The training split is read only if the names do not decide it: other names
    # than 'train' may mean the same rows, as dev and validation.
    trained, evaluated = (
      {part.name for part in source.parts(split)}
      for split in (train_split, getattr(self, field))
    )
    if not train_split or (trained == {'train'} and 'train' not in evaluated):
      return
    rows = builder.build_source(
      self.context.dataset, train_split, is_checked=True
    )
    expected = (
      f'rows that the run is not trained on, it shares {{}} with {train_split=}'
      "; hold some out, as 'train[95%:]' of 'train[:95%]'"
    )
    self._check_apart(field, rows, expected)

  def check_unfitted(self, file: Any) -> None:
    """Raises ConfigError if a calibration is fitted to rows of `split`."""
    # Other data may be reported where rows of the calibration are gone.
    gone = [MissingDataError] if self.dataset else []
    with contextlib.suppress(*gone):
      if (fitted := file.fitted_rows(self.context.dataset)) is not None:
        expected = 'rows that no temperature was fitted to, it shares {}'
        self._check_apart('split', fitted, expected)

  def _check_apart(self, field: str, others: Any, expected: str) -> None:
    self.check_apart(field, self._data[field].source, others, expected)
