"""What whoever starts a service is told, and when nothing is to be told."""

import types

import pytest

from tests.eat.calibrated import LENGTH, WORDS, build, change


def test_a_file_of_an_older_version_is_read_with_a_warning(run):
  report = change(run[0], parameters=None, dataset=None)
  _, policy = build(run, {'tau': 'guaranteed'})
  (warning,) = policy.warnings
  assert 'does not say of which checkpoint it is' in warning
  assert '--evals=calibration' in warning
  assert policy.settings.rule.tau == report['guarantee']['threshold']
  assert policy.monitor.drift is not None


def test_no_drift_check_says_why(run):
  directory, task, variables = run
  change(directory, drift=None)
  _, policy = build(run)
  assert policy.monitor.drift is None
  assert 'has no statistics' in policy.warnings[0]
  (directory / 'calibration.json').unlink()
  _, policy = build(run)
  (warning,) = policy.warnings
  assert warning.startswith('no drift check: ')
  assert 'calibration.json is not there; run python -m' in warning
  names = dict(task.info.__dict__, class_names=())
  numbers = types.SimpleNamespace(
    model=task.model,
    info=types.SimpleNamespace(**names),
    config=task.config,
  )
  _, policy = build((directory, numbers, variables))
  drift, early = policy.warnings
  assert drift == 'no drift check: a regression has no confidences'
  assert 'a regression with patience=2 waits for 2 heads, and 1 are' in early


@pytest.mark.parametrize(
  ('options', 'warns'),
  [
    ({'rule': 'patience', 'patience': 1}, False),
    ({'rule': 'patience'}, True),
    ({'rule': 'combined', 'tau': 0.6, 'patience': 3}, True),
    ({'rule': 'confidence', 'patience': 3}, False),
    ({'rule': 'never'}, False),
  ],
)
def test_a_rule_by_which_nobody_leaves_early_is_told(finished, options, warns):
  warnings = build(finished, options)[1].warnings
  if not warns:
    assert warnings == ()
    return
  (warning,) = warnings
  assert warning.startswith('no row will ever leave early: rule=')
  assert 'and 1 are before the last layer (at 3)' in warning


def test_texts_cut_off_before_those_of_the_calibration_are_told(finished):
  _, policy = build(finished, max_length=8)
  assert policy.encode(' '.join(WORDS[:10])).length == 8
  (warning,) = policy.warnings
  assert 'texts are cut off after 8 tokens, those of the calibration' in warning
  assert build(finished, max_length=LENGTH)[1].warnings == ()
