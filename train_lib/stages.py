"""Stages and knobs: the changes within one run.

A *knob* is a traced scalar that follows a schedule within its stage (a prune
ratio, a loss weight): it changes every step and never recompiles. A *stage*
changes static parts: the trained parameters, model keywords. Both depend only
on the step, so a resumed run continues at its step.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

# An ml_collections.ConfigDict, or a mapping like it.
Config = Any


@dataclasses.dataclass(frozen=True)
class Stage:
  """Consecutive steps with one compiled train step."""

  name: str
  start: int
  stop: int  # one past the last step
  knobs: Mapping[str, Any]  # their schedules
  trainable: str  # regular expression; parameters whose path it matches train
  model: Mapping[str, Any]  # keywords that differ in this stage

  def knob_values(self, step: int) -> dict[str, np.ndarray]:
    """Returns the knobs at a step, float32 scalars."""
    last = max(self.stop - self.start - 1, 1)
    place = min(max(step - self.start, 0), last)
    return {
      name: np.asarray(knob_value(schedule, place, last), np.float32)
      for name, schedule in self.knobs.items()
    }


def knob_value(schedule: Any, step: int, last_step: int) -> float:
  """Returns the value of a schedule at a step in [0, last_step] of its stage.

  A number is constant. A shape goes from the first to the last value, but
  'alternate' takes them in turns.
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


def build_stages(entries: Config, steps_per_epoch: int) -> tuple[Stage, ...]:
  """Orders stages by name (stage2 < stage10) and computes `start`, `stop`."""
  stages: list[Stage] = []
  start = 0
  for name in sorted(entries, key=order):
    entry = entries[name]
    steps = int(entry['steps'] or round(entry['epochs'] * steps_per_epoch))
    knobs, model = (dict(entry.get(key, {})) for key in ('knobs', 'model'))
    stop = start + max(steps, 1)
    trainable = entry.get('trainable', '.*')
    stages.append(Stage(name, start, stop, knobs, trainable, model))
    start = stop
  return tuple(stages)


def order(name: str) -> list[Any]:
  """Returns the place of a stage by its name: stage2 is before stage10."""
  parts = re.split(r'(\d+)', name)
  return [int(part) if part.isdigit() else part for part in parts]
