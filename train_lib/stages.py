"""Stages and knobs: the changes within one run.

A *knob* is a traced scalar that follows a schedule within its stage (a prune
ratio, a loss weight): it changes every step and never recompiles. A *stage*
changes static parts: the trained parameters, model keywords. Both are functions
of the step alone, so a resumed run continues at its step.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from dataset_lib.errors import ConfigError

# An ml_collections.ConfigDict, or a mapping like it.
Config = Any
SHAPES = ('constant', 'linear', 'cosine')


@dataclasses.dataclass(frozen=True)
class Stage:
  """Consecutive steps with one compiled train step.

  Attributes:
    name: its key in `config.stages`; stages run in the order of their names,
      stage2 before stage10.
    start: first step.
    stop: one past the last step.
    knobs: schedule of each knob.
    trainable: regular expression; parameters whose path it matches train.
    model: model keywords that differ in this stage.
  """

  name: str
  start: int
  stop: int
  knobs: Mapping[str, Any]
  trainable: str
  model: Mapping[str, Any]

  def knob_values(self, step: int) -> dict[str, np.ndarray]:
    """Returns the knobs at a step, float32 scalars."""
    length = max(self.stop - self.start - 1, 1)
    progress = min(max((step - self.start) / length, 0.0), 1.0)
    return {
      name: np.asarray(knob_value(schedule, progress), np.float32)
      for name, schedule in self.knobs.items()
    }


def knob_value(schedule: Any, progress: float) -> float:
  """Returns the value of a schedule at `progress` in [0, 1] of its stage.

  A number is constant, and so is `(number,)`, the form of a command line's
  override; `('linear', a, b)` and `('cosine', a, b)` go from a at the first
  step to b at the last.
  """
  schedule = _without_brackets(schedule)
  if isinstance(schedule, (int, float)):
    return float(schedule)
  shape, first, last = schedule
  if shape == 'cosine':
    progress = (1 - math.cos(math.pi * progress)) / 2
  if shape == 'constant':
    return float(first)
  return first + (last - first) * progress


def _without_brackets(schedule: Any) -> Any:
  single = isinstance(schedule, (tuple, list)) and len(schedule) == 1
  return schedule[0] if single else schedule


def build_stages(config: Config, steps_per_epoch: int) -> tuple[Stage, ...]:
  """Lays the stages of `config.stages` end to end.

  Each has `steps`, or `epochs` if steps is 0.
  """
  stages = []
  start = 0
  for name in sorted(config, key=_natural):
    entry = config[name]
    steps = int(entry['steps'] or round(entry['epochs'] * steps_per_epoch))
    stages.append(
      Stage(
        name=name,
        start=start,
        stop=start + max(steps, 1),
        knobs=dict(entry.get('knobs', {})),
        trainable=entry.get('trainable', '.*'),
        model=dict(entry.get('model', {})),
      )
    )
    start = stages[-1].stop
  return tuple(stages)


def _natural(name: str) -> list[Any]:
  parts = re.split(r'(\d+)', name)
  return [int(part) if part.isdigit() else part for part in parts]


def check_stage(key: str, entry: Config) -> None:
  """Raises `ConfigError` if the stage has no length or an unknown knob."""
  if not entry['steps'] and not entry['epochs']:
    raise ConfigError(f'{key}.steps', 0, 'steps >= 1, or epochs > 0')
  for name, schedule in entry.get('knobs', {}).items():
    if not _is_schedule(schedule):
      raise ConfigError(
        f'{key}.knobs.{name}',
        schedule,
        f'a finite number or (shape, first, last), shape one of {SHAPES}',
      )


def _is_schedule(schedule: Any) -> bool:
  schedule = _without_brackets(schedule)
  if isinstance(schedule, (int, float)):
    return math.isfinite(schedule)
  return (
    isinstance(schedule, (tuple, list))
    and len(schedule) == 3
    and schedule[0] in SHAPES
    and all(
      isinstance(value, (int, float)) and math.isfinite(value)
      for value in schedule[1:]
    )
  )
