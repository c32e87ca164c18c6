"""What the tasks of `dataset_lib.graves_tasks` have in common.

Numbers are made of random bits, so that a record is a function of its index.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64


@runtime_checkable
class SyntheticTask(Protocol):
  """A task: its shapes, and what it makes of random bits.

  Attributes:
    input_shape: (T, E): most inputs in a sequence, numbers in an input.
    num_classes: classes of a target.
    num_targets: targets at one step, G.
    num_draws: random numbers that a record takes.
  """

  input_shape: tuple[int, int]
  num_classes: int
  num_targets: int
  num_draws: int

  def records(self, bits: UInt64[np.ndarray, 'B N']) -> dict[str, np.ndarray]:
    """The arrays of `arrays`, made of `num_draws` random numbers per record."""


def integers(
  bits: UInt64[np.ndarray, '*S'], low: int, high: int
) -> Int[np.ndarray, '*S']:
  """Uniform over low .. high, both included, to 2**-32."""
  count = np.uint64(high - low + 1)
  drawn = ((bits >> np.uint64(32)) * count) >> np.uint64(32)
  return drawn.astype(np.int64) + low


def normals(
  bits: UInt64[np.ndarray, '*S'], more_bits: UInt64[np.ndarray, '*S']
) -> Float[np.ndarray, '*S']:
  """Standard normal numbers (Box and Muller, 1958)."""
  # In (0, 1], as the logarithm needs, with 53 bits.
  uniform = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) / 2**53
  angle = (more_bits >> np.uint64(11)).astype(np.float64) / 2**53
  return np.sqrt(-2.0 * np.log(uniform)) * np.cos(2.0 * np.pi * angle)


def arrays(
  inputs: np.ndarray,
  valid: Bool[np.ndarray, 'B T'],
  targets: Int[np.ndarray, 'B T G'],
  has_target: Bool[np.ndarray, 'B T'],
) -> dict[str, np.ndarray]:
  """Arrays of a batch in their types, with zeros wherever nothing stands."""
  return {
    'inputs': np.where(valid[..., None], inputs, 0).astype(np.float32),
    'valid': valid.astype(np.float32),
    'targets': np.where(has_target[..., None], targets, 0).astype(np.int32),
    'target_mask': has_target.astype(np.float32),
  }


def leading(
  count: Int[np.ndarray, '*S'], length: int
) -> Bool[np.ndarray, '*S L']:
  """Marks the first `count` places of `length`."""
  return np.arange(length) < count[..., None]
