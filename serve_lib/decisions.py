"""From logits to answers: probabilities, confidence, and the `Prediction`.

The functions take NumPy and JAX arrays alike, with the classes on the last
axis, and act on every row by itself.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dataset_lib.errors import ConfigError
from serve_lib.chain import Chain, Encoded, Row
from serve_lib.monitor import Monitor

WHOLE = 'whole model'


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The answer to one item; fields that a family does not have are None.

  Attributes:
    label: name of the class, or the predicted number of a regression.
    probabilities: by class name; empty for a regression.
    depth: layers (EAT) or iterations (ALBERT) that were run; None for a model
      without exits.
    retention: share of the tokens that were kept to the end (EAT).
    exit_reason: name of the rule by which the row left.
    truncated: True if the text was longer than the longest length bucket;
      None for inputs of fixed size.
    iterations: mean number of iterations of a token (ALBERT).
    tokens: of the text as the model read it, [CLS] and [SEP] included.
    token_iterations: iterations of each of `tokens` (ALBERT).
    tape_length: tape tokens that were read (AdaTape).
  """

  label: Any
  probabilities: Mapping[str, float]
  depth: int | None = None
  retention: float | None = None
  exit_reason: str = WHOLE
  truncated: bool | None = None
  iterations: float | None = None
  tokens: tuple[str, ...] | None = None
  token_iterations: tuple[int, ...] | None = None
  tape_length: int | None = None

  def as_dict(self) -> dict[str, Any]:
    """Returns the fields that are not None, for JSON."""
    fields = dataclasses.asdict(self)
    return {name: value for name, value in fields.items() if value is not None}


def softmax(logits: Float[Any, '*B C']) -> Float[Any, '*B C']:
  """Computes class probabilities."""
  xp = _module(logits)
  powers = xp.exp(logits - logits.max(-1, keepdims=True))
  return powers / powers.sum(-1, keepdims=True)


def entropy(logits: Float[Any, '*B C']) -> Float[Any, '*B']:
  """Computes the entropy of the class probabilities, in nats."""
  xp = _module(logits)
  shifted = logits - logits.max(-1, keepdims=True)
  powers = xp.exp(shifted)
  total = powers.sum(-1)
  return xp.log(total) - (powers * shifted).sum(-1) / total


def confidence(probabilities: Float[Any, '*B C']) -> Float[Any, '*B']:
  """Returns the largest probability of each row."""
  return probabilities.max(-1)


def margin(probabilities: Float[Any, '*B C']) -> Float[Any, '*B']:
  """Returns the difference of the two largest probabilities of each row."""
  ordered = _module(probabilities).sort(probabilities, axis=-1)
  return ordered[..., -1] - ordered[..., -2]


def scale(
  logits: Float[Any, 'E *B C'], temperatures: Float[Any, ' E'] | Sequence[float]
) -> Float[Any, 'E *B C']:
  """Divides the logits of each head by its temperature (Guo et al. 2017)."""
  xp = _module(logits)
  shape = (-1,) + (1,) * (logits.ndim - 1)
  return logits / xp.asarray(temperatures, logits.dtype).reshape(shape)


def named(
  probabilities: Float[np.ndarray, ' C'], class_names: Sequence[str]
) -> tuple[str, dict[str, float]]:
  """Returns the most probable class and all probabilities by class name."""
  pairs = zip(class_names, probabilities.tolist(), strict=True)
  return class_names[int(probabilities.argmax())], dict(pairs)


def check_finite(logits: Float[Any, ' C'], head: str = '') -> None:
  """Raises FloatingPointError if a logit is NaN or infinite.

  Args:
    logits: of one row.
    head: name of the head for the error, like ' at the head of layer 4'.
  """
  if not np.isfinite(logits).all():
    raise FloatingPointError(
      f'logits: expected finite numbers, got {np.asarray(logits).tolist()}'
      f'{head}; the parameters are not finite, or the model overflows in its '
      'compute dtype'
    )


def check_no_options(given: Mapping[str, Any]) -> None:
  """Raises ConfigError if there is an option; the model has none."""
  for name, value in given.items():
    raise ConfigError(f'serve.{name}', value, 'no options for this model')


class ClassifierPolicy:
  """Policy of a classifier whose rows all run to the last stage.

  Families with exits override `decide` and `describe`.

  Args:
    chain: the model; its last stage has the output `'logits'` `[B, O]`.
    reader: turns items into arrays; see `text_items.TextReader` and
      `image_items`.
    class_names: of the labels; () for a regression.
    lengths: length buckets, ascending.
    monitor: records the exits; None for a new one.

  Attributes:
    lengths: as given.
    class_names: as given.
    monitor: as given.
    warnings: lines to print before a service starts.
  """

  def __init__(
    self,
    chain: Chain,
    reader: Any,
    class_names: Sequence[str],
    lengths: Sequence[int],
    monitor: Monitor | None = None,
  ):
    self.chain: Any = chain
    self.reader = reader
    self.class_names, self.lengths = tuple(class_names), tuple(lengths)
    self.monitor = monitor or Monitor()
    self.warnings: tuple[str, ...] = ()

  def encode(self, item: Any) -> Encoded:
    """Reads an item; see `serve_lib.chain.Policy`."""
    return self.reader.read(item, self.chain.variants[0])

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Lets no row leave early."""
    return np.zeros(len(rows), bool)

  def describe(self, row: Row) -> dict[str, Any]:
    """Returns the fields of `Prediction` that only this family has."""
    return {'truncated': row.encoded.context.get('truncated')}

  def answer(self, row: Row) -> Prediction:
    """Returns the prediction of the last head that the row passed.

    Raises:
      FloatingPointError: a logit is NaN or infinite.
    """
    logits = row.outputs[-1]['logits']
    check_finite(logits)
    label: Any = float(logits[0])
    probabilities: dict[str, float] = {}
    if self.class_names:
      shares = softmax(np.asarray(logits, np.float64))
      label, probabilities = named(shares, self.class_names)
    prediction = Prediction(label, probabilities, **self.describe(row))
    self.record(prediction)
    return prediction

  def record(self, prediction: Prediction) -> None:
    """Records the exit of a row in `monitor`."""
    self.monitor.record_exit(1, prediction.exit_reason, None)


def _module(array: Any) -> Any:
  return jnp if isinstance(array, jax.Array) else np
