"""Probabilities of classes, of logits of one or several heads, in NumPy."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Interval
from jaxtyping import Float

Temperature = Annotated[float, Interval(ge=1e-3, le=1e3)]  # of a head's logits


def sigmoid(
  logits: Float[np.ndarray, '*B C'],
) -> Float[np.ndarray, '*B C']:
  """Computes the probability of each class by itself."""
  return np.exp(-np.logaddexp(0.0, -logits))


def scale(
  logits: Float[np.ndarray, 'E *B C'],
  temperatures: Sequence[float] | np.ndarray,
) -> Float[np.ndarray, 'E *B C']:
  """Divides the logits of each head by its temperature (Guo et al. 2017)."""
  shape = (-1,) + (1,) * (logits.ndim - 1)
  return logits / np.asarray(temperatures, logits.dtype).reshape(shape)
