"""Stages laid end to end, and knobs that follow their schedules."""

import pytest

from dataset_lib.errors import ConfigError
from train_lib import run_config
from train_lib.stages import build_stages, check_stage, knob_value


def entry(**fields):
  return dict(steps=0, epochs=0.0, trainable='.*') | fields


def test_stages_follow_their_names_and_lengths():
  stages = build_stages(
    {'stage2': entry(epochs=1.5), 'stage1': entry(steps=7)}, steps_per_epoch=10
  )
  assert [(s.name, s.start, s.stop) for s in stages] == [
    ('stage1', 0, 7),
    ('stage2', 7, 22),
  ]


def test_knobs_go_from_first_to_last_value_within_their_stage():
  stages = build_stages(
    {
      's1': entry(steps=10, knobs={'prune': 0.0}),
      's2': entry(steps=5, knobs={'prune': ('linear', 0.0, 0.4)}),
    },
    steps_per_epoch=1,
  )
  values = [
    float(stages[1].knob_values(step)['prune']) for step in (10, 12, 14)
  ]
  assert values == pytest.approx([0.0, 0.2, 0.4])
  assert float(stages[0].knob_values(9)['prune']) == 0.0


@pytest.mark.parametrize(
  ('schedule', 'expected'),
  [
    (0.3, [0.3, 0.3, 0.3]),
    ((0.3,), [0.3, 0.3, 0.3]),
    (('constant', 0.3, 0.0), [0.3, 0.3, 0.3]),
    (('linear', 1.0, 0.0), [1.0, 0.5, 0.0]),
    (('cosine', 0.0, 1.0), [0.0, 0.5, 1.0]),
  ],
)
def test_schedules(schedule, expected):
  values = [knob_value(schedule, progress) for progress in (0.0, 0.5, 1.0)]
  assert values == pytest.approx(expected)
  check_stage('stages.s', entry(steps=1, knobs={'tau': schedule}))


@pytest.mark.parametrize(
  ('fields', 'key'),
  [
    (dict(), 'stages.s.steps'),
    (dict(steps=-1), 'stages.s.steps'),
    (dict(epochs=float('nan')), 'stages.s.epochs'),
    (dict(steps=1, knobs={'tau': ('bent', 0.0, 1.0)}), 'stages.s.knobs.tau'),
    (dict(steps=1, knobs={'tau': float('inf')}), 'stages.s.knobs.tau'),
    (dict(steps=1, knobs={'tau': ('linear', 0.0)}), 'stages.s.knobs.tau'),
  ],
)
def test_illegal_stages_name_their_key(fields, key):
  with pytest.raises(ConfigError, match=key):
    check_stage(
      'stages.s', run_config.complete({'stages': {'s': fields}})['stages']['s']
    )
