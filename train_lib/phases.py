"""Phases and knobs: the changes within one run, functions of the step.

A *knob* is a traced scalar (a prune ratio, a loss weight) that follows a
schedule in its phase and never recompiles. A *phase* changes static parts: the
trained parameters, model keywords.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval, MinLen, Predicate

# An ml_collections.ConfigDict, or a mapping like it.
Config = Any


def is_pattern(text: str) -> bool:
  """Returns True for a regular expression."""
  with contextlib.suppress(re.error):
    return bool(re.compile(text))
  return False


Steps = Annotated[int, Interval(ge=0, le=2**31 - 1)]
Pattern = Annotated[
  str,
  MinLen(1),
  Predicate(is_pattern),
  'a regular expression of parameter paths',
]
_Number = float | int
Knob = Annotated[
  _Number | tuple[Literal['linear', 'cosine', 'alternate'], _Number, _Number],
  'a finite number or (shape, first, last), shape one of linear, cosine, '
  'alternate',
]


@dataclasses.dataclass(frozen=True)
class Phase:
  """Consecutive steps with one compiled train step: `steps` or `epochs`.

  Epochs of few rows are repeated up to `least_steps`.
  Parameters train whose path `trainable` matches; `model` has the fields that
  differ, `knobs` schedules. `name` is for messages.
  """

  name: str = ''
  steps: Steps = 0
  epochs: Annotated[float, Interval(ge=0.0, le=1e6)] = 0.0
  least_steps: Steps = 0
  trainable: Pattern = '.*'
  knobs: dict[str, Knob] = dataclasses.field(default_factory=dict)
  model: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Planned(Phase):
  """A phase and its place among all steps."""

  index: int = 0
  start: int = 0
  stop: int = 0  # one past the last step

  @property
  def label(self) -> str:
    """The name, or 'phase 0'."""
    return self.name or f'phase {self.index}'

  def knob_values(self, step: int) -> dict[str, np.ndarray]:
    """Returns the knobs at a step, float32 scalars."""
    last = max(self.stop - self.start - 1, 1)
    place = min(max(step - self.start, 0), last)
    return {
      name: np.asarray(knob_value(schedule, place, last), np.float32)
      for name, schedule in self.knobs.items()
    }


def knob_value(schedule: Any, step: int, last_step: int) -> float:
  """Returns the value of a schedule at a step in [0, last_step] of its phase.

  A number is constant; 'alternate' takes the first and last value in turns.
  """
  if isinstance(schedule, (int, float)):
    return float(schedule)
  shape, first, last = schedule
  if shape == 'alternate':
    return last if step % 2 else first
  progress = step / last_step
  if shape == 'cosine':
    progress = (1 - math.cos(math.pi * progress)) / 2
  return first + (last - first) * progress


def plan(phases: Iterable[Phase], steps_per_epoch: int) -> tuple[Planned, ...]:
  """Returns the phases with their steps; each has at least one."""
  planned: list[Planned] = []
  start = 0
  for index, phase in enumerate(phases):
    steps = int(phase.steps or round(phase.epochs * steps_per_epoch))
    stop = start + max(steps, 1 if phase.steps else phase.least_steps, 1)
    place = Planned(**vars(phase), index=index, start=start, stop=stop)
    planned.append(place)
    start = stop
  return tuple(planned)
