"""What a model says of every row of a split, in the order of the records.

Metrics over a whole split, calibration, thresholds with a guarantee and
frontiers all start from the logits of all heads: recorded once, they answer
for every rule and threshold without running the model again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num

from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.fields import Field, integer
from eval_lib import evaluator

MAX_LAYERS = 10_000

# The field by which an evaluator learns where the heads are.
LAYERS = Field(
  'ascending layers from 1, one for each head, or () to count the heads',
  lambda value: (
    isinstance(value, (tuple, list))
    and all(integer(1, MAX_LAYERS).accepts(layer) for layer in value)
    and list(value) == sorted(set(value))
  ),
  (),
)


def collect(
  dataset: Any, variables: Any, context: evaluator.EvalContext
) -> dict[str, np.ndarray]:
  """Runs one pass over a split.

  Args:
    dataset: what `evaluator.build_dataset` gives; its batches may differ in
      length.
    variables: `{'params': ..., 'model_state': ...}`.
    context: of the run; its `outputs` is called.

  Returns:
    The arrays of `context.outputs`, `'logits'` `[N, E, C]` among them, with
    `'label'` `[N]` and `'index'` `[N]`; by ascending index, without padding.

  Raises:
    InvalidDataError: the split holds no example.
    FloatingPointError: a logit is NaN or infinite.
    ValueError: the context has no outputs, or rows differ in shape.
  """
  if context.outputs is None:
    raise ValueError(
      'EvalContext.outputs: expected a function of variables and batch, got '
      'None; give the outputs of the task'
    )
  parts: dict[str, list[np.ndarray]] = {}
  previous = None
  for batch in evaluator.on_devices(dataset, context):
    rows = {key: batch[key] for key in ('index', 'label', 'mask')}
    rows = {**context.outputs(variables, batch), **rows}
    # Fetched one batch late, so that the device is never idle.
    if previous is not None:
      _append(parts, previous)
    previous = rows
  if previous is not None:
    _append(parts, previous)
  if not parts or not sum(map(len, parts['mask'])):
    raise InvalidDataError('predictions: the split holds no example')
  whole = {key: _concatenate(key, value) for key, value in parts.items()}
  del whole['mask']
  # By record: batches and processes deal the records out differently.
  order = np.argsort(whole['index'], kind='stable')
  if not np.isfinite(whole['logits']).all():
    raise FloatingPointError(
      'predictions: expected finite logits, got NaN or infinity; the run has '
      'diverged, or the model overflows in its compute dtype'
    )
  return {key: value[order] for key, value in whole.items()}


def _append(parts: dict[str, list[np.ndarray]], rows: Mapping) -> None:
  """Fetches a batch and keeps its real rows."""
  fetched = evaluator.gather(dict(rows))
  real = np.asarray(fetched['mask']) > 0
  for key, value in fetched.items():
    parts.setdefault(key, []).append(np.asarray(value)[real])


def _concatenate(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
  shapes = {part.shape[1:] for part in parts}
  if len(shapes) > 1:
    raise ValueError(
      f'outputs[{name!r}]: expected rows of one shape in all batches, got '
      f'{sorted(shapes)}; give what depends on the length a fixed size'
    )
  return np.concatenate(parts)


def heads_first(
  rows: Mapping[str, np.ndarray],
) -> Float[np.ndarray, 'E N C']:
  """The logits of all heads, as exit rules take them."""
  return np.moveaxis(rows['logits'], 1, 0)


def labelled_logits(
  dataset: Any, split: str, variables: Any, context: evaluator.EvalContext
) -> tuple[Float[np.ndarray, 'E N C'], Int[np.ndarray, ' N']]:
  """The logits of all heads and the classes of a split; see `collect`.

  Raises:
    InvalidDataError: the labels of the split are hidden.
  """
  rows = collect(dataset, variables, context)
  logits = heads_first(rows)
  check_labels(rows['label'], logits.shape[-1], split)
  return logits, rows['label']


def probabilities(
  logits: Float[np.ndarray, 'E N C'],
  temperatures: Float[np.ndarray, ' E'] | None = None,
) -> Float[np.ndarray, 'E N C']:
  """Softmax over the classes of the logits over temperatures.

  In the dtype of the logits, float32 as recorded: when serving, a confidence
  may round to 1, and a threshold must meet the same numbers here.
  """
  if temperatures is not None:
    logits = logits / temperatures.astype(logits.dtype)[:, None, None]
  powers = np.exp(logits - logits.max(-1, keepdims=True))
  return powers / powers.sum(-1, keepdims=True)


def confidence_exit(
  probabilities: Float[np.ndarray, 'E N C'], threshold: float
) -> Int[np.ndarray, ' N']:
  """The head each row leaves at: the first with `max_c P >= threshold`.

  EAT, section 4. Rows that no head is confident of leave at the last one.
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
  """The layer of each head; heads are counted from 1 without `layers`.

  Raises:
    ConfigError: there are more or fewer layers than heads.
  """
  if layers and len(layers) != num_heads:
    expected = f'{num_heads} layers, one for each head of the model'
    raise ConfigError('layers', tuple(layers), expected)
  return tuple(layers) or tuple(range(1, num_heads + 1))


def head_names(layers: Sequence[int], num_heads: int) -> tuple[str, ...]:
  """How metrics call the heads: `layer_4`, or `head_1` without `layers`."""
  kind = 'layer' if layers else 'head'
  return tuple(f'{kind}_{number}' for number in layers_of(layers, num_heads))
