"""Stages laid end to end, and knobs that follow their schedules."""

import pytest

from dataset_lib import fields
from train_lib import config_schema
from train_lib.stages import build_stages, knob_value


def check(**given):
  return fields.check(config_schema.Stage, given, 'stages.s')


def test_stages_follow_the_numbers_in_their_names():
  config = {
    'stage10': check(epochs=1.5),
    'stage1': check(steps=10, knobs={'prune': 0.0}),
    'stage2': check(steps=5, knobs={'prune': ('linear', 0, 0.4)}),
  }
  first, second, third = build_stages(config, steps_per_epoch=10)
  assert [(s.name, s.start, s.stop) for s in (first, second, third)] == [
    ('stage1', 0, 10), ('stage2', 10, 15), ('stage10', 15, 30),
  ]  # fmt: skip
  values = [float(second.knob_values(step)['prune']) for step in (10, 12, 14)]
  assert values == pytest.approx([0.0, 0.2, 0.4])
  assert float(first.knob_values(9)['prune']) == 0.0
  assert third.knob_values(20) == {}


@pytest.mark.parametrize(
  ('schedule', 'expected'),
  [
    (0.3, [0.3, 0.3, 0.3]),
    (['linear', 1, 0.0], [1.0, 0.5, 0.0]),
    (('cosine', 0.0, 1.0), [0.0, 0.5, 1.0]),
  ],
)
def test_schedules(schedule, expected):
  schedule = check(knobs={'tau': schedule})['knobs']['tau']
  values = [knob_value(schedule, progress) for progress in (0.0, 0.5, 1.0)]
  assert values == pytest.approx(expected)
