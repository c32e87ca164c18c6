"""The outputs of a model for every row of a split, and splits without overlap.

Metrics over a whole split, calibration, thresholds with a guarantee and
frontiers all start from the logits of all heads: recorded once, they serve for
every rule and threshold without running the model again. A model, a temperature
and a threshold look better on the rows that they were chosen for than on
others, hence `open_splits`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval, Predicate
from jaxtyping import Float, Int, Num

from dataset_lib import builder, source
from dataset_lib.errors import ConfigError, InvalidDataError
from eval_lib import evaluator

# The field by which an evaluator learns the layers of the heads.
Layers = Annotated[
  tuple[Annotated[int, Interval(ge=1, le=10_000)], ...],
  Predicate(lambda layers: list(layers) == sorted(set(layers))),
  'ascending layers from 1, one for each head, or () to count the heads',
]


def collect(
  dataset: Any, variables: Any, context: evaluator.EvalContext
) -> dict[str, np.ndarray]:
  """Runs `context.outputs` over a split.

  Args:
    dataset: of `Evaluator.open`; its batches may differ in length.
    variables: `{'params': ..., 'model_state': ...}`.
    context: of the run.

  Returns:
    The arrays of `context.outputs`, `'logits'` `[N, E, C]` among them, with
    `'label'` `[N]` and `'index'` `[N]`; by ascending index, without padding.

  Raises:
    InvalidDataError: the split holds no example.
    FloatingPointError: a logit is NaN or infinite.
    ValueError: rows of different batches differ in shape.
  """
  return collect_rows(dataset, variables, context, context.outputs, 'logits')


def collect_rows(
  dataset: Any,
  variables: Any,
  context: evaluator.EvalContext,
  function: Callable[[Any, Any], Mapping[str, Any]],
  finite: str,
) -> dict[str, np.ndarray]:
  """Runs a function of variables and device batch; see `collect`.

  The array `finite` of its results is checked for NaN and infinity.
  """

  def run(batch):
    batch = context.put(batch)
    rows = {name: batch[name] for name in ('index', 'label', 'mask')}
    return {**function(variables, batch), **rows}

  parts: dict[str, list[np.ndarray]] = {}
  for rows in evaluator.one_late(map(run, dataset.batches())):
    fetched = evaluator.gather(rows)
    is_real = np.asarray(fetched.pop('mask')) > 0
    for name, values in fetched.items():
      parts.setdefault(name, []).append(np.asarray(values)[is_real])
  if not sum(map(len, parts.get('index', ()))):
    raise InvalidDataError(f'{finite}: the split holds no example')
  whole = {name: np.concatenate(part) for name, part in parts.items()}
  if not np.isfinite(whole[finite]).all():
    raise FloatingPointError(
      f'{finite}: expected finite numbers, got NaN or infinity; the run has '
      'diverged, or the model overflows in its compute dtype'
    )
  # Batches and processes distribute the records in different orders.
  order = np.argsort(whole['index'], kind='stable')
  return {name: values[order] for name, values in whole.items()}


def labelled_logits(
  dataset: Any, split: str, variables: Any, context: evaluator.EvalContext
) -> tuple[Float[np.ndarray, 'E N C'], Int[np.ndarray, ' N']]:
  """Returns the logits of all heads and the classes; see `collect`.

  Raises:
    InvalidDataError: the labels of the split are hidden.
  """
  rows = collect(dataset, variables, context)
  logits = np.moveaxis(rows['logits'], 1, 0)
  check_labels(rows['label'], logits.shape[-1], split)
  return logits, rows['label']


def probabilities(
  logits: Float[np.ndarray, 'E N C'],
  temperatures: Float[np.ndarray, ' E'] | None = None,
) -> Float[np.ndarray, 'E N C']:
  """Returns the softmax over the classes of logits over temperatures.

  In the dtype of the logits, float32 as recorded: a confidence may round to 1
  in serving, and a threshold must meet the same numbers here.
  """
  if temperatures is not None:
    logits = logits / temperatures.astype(logits.dtype)[:, None, None]
  powers = np.exp(logits - logits.max(-1, keepdims=True))
  return powers / powers.sum(-1, keepdims=True)


def confidence_exit(
  probabilities: Float[np.ndarray, 'E N C'], threshold: float
) -> Int[np.ndarray, ' N']:
  """Returns the first head of each row with `max_c P >= threshold`.

  EAT, section 4. A row without such a head leaves at the last one.
  """
  confidence = probabilities.max(-1)
  leaves = confidence >= confidence.dtype.type(threshold)
  leaves[-1] = True
  return leaves.argmax(0)


def check_labels(
  labels: Num[np.ndarray, ' N'], num_classes: int, split: str
) -> None:
  """Raises InvalidDataError if labels are hidden, as in GLUE's test splits."""
  wrong = ~((labels >= 0) & (labels < num_classes))
  if wrong.any():
    raise InvalidDataError(
      f'split {split!r}: expected labels in [0, {num_classes}), got '
      f'{labels[wrong][0]} and {wrong.sum() - 1} other wrong ones; labels that '
      'are hidden cannot be evaluated against'
    )


def layers_of(layers: Sequence[int], num_heads: int) -> tuple[int, ...]:
  """Returns the layer of each head; without `layers` its number from 1.

  Raises:
    ConfigError: there are more or fewer layers than heads.
  """
  if layers and len(layers) != num_heads:
    expected = f'{num_heads} layers, one for each head of the model'
    raise ConfigError('layers', tuple(layers), expected)
  return tuple(layers) or tuple(range(1, num_heads + 1))


def head_names(layers: Sequence[int], num_heads: int) -> tuple[str, ...]:
  """Returns names for metrics: `layer_4`, or `head_1` without `layers`."""
  kind = 'layer' if layers else 'head'
  return tuple(f'{kind}_{number}' for number in layers_of(layers, num_heads))


def open_splits(
  owner: Any,
) -> tuple[builder.Dataset, builder.Dataset | None]:
  """Opens the split that an evaluator reports, and the one it fits to.

  Args:
    owner: the evaluator; its fields `dataset`, `split`, `calibration_split`.

  Returns:
    (`split`, `calibration_split` or None).

  Raises:
    ConfigError: `calibration_split` has rows in common with `split` or with
      the training split of the run, or the data have no classes.
  """
  reported = owner.open(owner.split)
  if reported.info.num_classes < 2:
    raise ConfigError(
      'dataset', 'a regression', 'classes: numbers have no confidence'
    )
  if not owner.calibration_split:
    return reported, None
  fitted = owner.open(owner.calibration_split)
  check_apart(reported, fitted, owner.calibration_split)
  check_untrained(fitted, 'calibration_split', owner)
  return reported, fitted


def check_apart(
  reported: builder.Dataset, fitted: builder.Dataset, split: str
) -> None:
  """Raises ConfigError if two parts of a data set have rows in common.

  Args:
    reported: rows that numbers are reported of.
    fitted: rows that something was fitted to.
    split: the value of `calibration_split`, the split of the second.
  """
  shared = len(reported.places() & fitted.places())
  if shared:
    raise ConfigError(
      'calibration_split',
      split,
      f'rows that `split` does not have, it shares {shared}: what was fitted '
      'cannot judge itself',
    )


def check_untrained(dataset: builder.Dataset, field: str, owner: Any) -> None:
  """Raises ConfigError if the run is trained on rows of a data set.

  Args:
    dataset: rows that must be new to the model.
    field: of the evaluator, the name of their split.
    owner: the evaluator.
  """
  train_split, split = owner.context.train_split, getattr(owner, field)
  # The training split is read only if names leave it open: other names than
  # 'train' may mean the same rows, as dev and validation.
  trained, given = _names(train_split), _names(split)
  if not train_split or (trained == {'train'} and 'train' not in given):
    return
  rows = builder.build_source(owner.context.dataset, train_split)
  shared = len(dataset.places() & {*source.places(rows)})
  if shared:
    raise ConfigError(
      field,
      split,
      f'rows that the run is not trained on, it shares {shared} with '
      f"train_split={train_split!r}; hold some out, as 'train[95%:]' of "
      "'train[:95%]'",
    )


def _names(split: str) -> set[str]:
  """Returns the whole splits: `{'train'}` of 'train[:95%]'."""
  return {part.partition('[')[0] for part in split.split('+')}
