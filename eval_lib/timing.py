"""Honest comparison of running times inside one process.

Machines drift: clocks change, neighbours come and go. So what is compared is
run interleaved (A B, then B A, ...), after a warm-up that compiles, with every
result waited for, and reported as a median with its spread; a ratio is taken
within each round, where both sides met the same machine.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from eval_lib.report import Estimate


@dataclasses.dataclass(frozen=True)
class Timings:
  """Seconds of every repeat, by name; entry r of each belongs to round r.

  Attributes:
    seconds: per name `[rounds]`.
  """

  seconds: Mapping[str, Float[np.ndarray, ' R']]

  def estimate(self, name: str) -> Estimate:
    """Seconds of one call."""
    return Estimate.of(self.seconds[name])

  def ratio(self, numerator: str, denominator: str) -> Estimate:
    """How many times longer `numerator` takes, round by round."""
    return Estimate.of(self.seconds[numerator] / self.seconds[denominator])


def measure(
  functions: Mapping[str, Callable[[], Any]],
  *,
  repeats: int = 10,
  warmup: int = 2,
  clock: Callable[[], float] = time.perf_counter,
) -> Timings:
  """Times functions against each other.

  Args:
    functions: what to call, by name. Their results are waited for; a function
      whose inputs are donated must carry its own state from call to call.
    repeats: rounds; every round calls every function once.
    warmup: rounds that are not counted; the first one compiles.
    clock: seconds, monotonic.

  Raises:
    ValueError: there is nothing to time.
  """
  if not functions or repeats < 1 or warmup < 0:
    raise ValueError(
      'timing.measure: expected functions, repeats >= 1 and warmup >= 0, got '
      f'{list(functions)}, {repeats}, {warmup}'
    )
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  for round_index in range(warmup + repeats):
    names = list(functions)
    # Alternating directions: whoever goes first is not always the same.
    for name in names if round_index % 2 == 0 else reversed(names):
      started = clock()
      jax.block_until_ready(functions[name]())
      elapsed = clock() - started
      if round_index >= warmup:
        seconds[name].append(elapsed)
  return Timings({name: np.array(values) for name, values in seconds.items()})
