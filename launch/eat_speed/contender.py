"""What the contenders of `launch.benchmark eat_speed` have in common."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

# Rows whose logits are compared between contenders.
CHECKED_ROWS = 4


class Built(NamedTuple):
  """A contender, ready to run.

  Attributes:
    cases: what can be asked for; a call returns the number of examples.
    scores: difference of the logits of the first rows, to compare contenders
      that should compute the same; () if it computes nothing comparable.
    device: where it runs.
    versions: of what it runs on, by package.
  """

  cases: Mapping[str, Callable[[], int]]
  scores: Float[np.ndarray, ' R'] | tuple[()]
  device: str
  versions: Mapping[str, str]


def token_rows(
  specification: Mapping[str, Any], vocab_size: int
) -> Int[np.ndarray, 'N L']:
  """Random token ids, the same ones in every process."""
  shape = (
    max(*specification['batches'], CHECKED_ROWS),
    specification['length'],
  )
  rng = np.random.default_rng(1)
  return rng.integers(vocab_size, size=shape, dtype=np.int32)


def forward_cases(
  forward: Callable[[int], Callable[[], Any]], specification: Mapping[str, Any]
) -> tuple[dict[str, Callable[[], int]], Float[np.ndarray, ' R']]:
  """Cases and scores of a contender that classifies one batch in a call.

  Args:
    forward: of a batch size, the function that gives NumPy logits `[B, C]` of
      the first rows of `token_rows`.
    specification: of the batches.
  """
  functions = {batch: forward(batch) for batch in specification['batches']}

  def case(function: Callable[[], Any]) -> Callable[[], int]:
    return lambda: len(function())

  largest = functions[max(functions)]
  scores = score(largest()[:CHECKED_ROWS])
  return {str(b): case(function) for b, function in functions.items()}, scores


def score(logits: Float[np.ndarray, 'R C']) -> Float[np.ndarray, ' R']:
  """What is compared: how much the second class is ahead of the first."""
  return logits[:, 1] - logits[:, 0]
