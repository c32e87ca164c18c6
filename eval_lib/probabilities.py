"""Probabilities of classes, of logits of one or several heads, in NumPy."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from jaxtyping import Float

Temperature = Annotated[float, Interval(ge=1e-3, le=1e3)]  # of a head's logits


def softmax(
  logits: Float[np.ndarray, '*B C'],
) -> Float[np.ndarray, '*B C']:
  """Computes class probabilities."""
  powers = np.exp(logits - logits.max(-1, keepdims=True))
  return powers / powers.sum(-1, keepdims=True)


def sigmoid(
  logits: Float[np.ndarray, '*B C'],
) -> Float[np.ndarray, '*B C']:
  """Computes the probability of each class by itself."""
  return np.exp(-np.logaddexp(0.0, -logits))


def margin(probabilities: Float[np.ndarray, '*B C']) -> Float[Any, '*B']:
  """Returns the difference of the two largest probabilities of each row."""
  ordered = np.sort(probabilities, axis=-1)
  return ordered[..., -1] - ordered[..., -2]


def scale(
  logits: Float[np.ndarray, 'E *B C'],
  temperatures: Sequence[float] | np.ndarray,
) -> Float[np.ndarray, 'E *B C']:
  """Divides the logits of each head by its temperature (Guo et al. 2017)."""
  shape = (-1,) + (1,) * (logits.ndim - 1)
  return logits / np.asarray(temperatures, logits.dtype).reshape(shape)
