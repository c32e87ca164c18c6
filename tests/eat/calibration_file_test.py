"""The file calibration.json: drift that is measured against it, refusals."""

import json

import jax
import numpy as np
import pytest

from dataset_lib.errors import ConfigError
from serve_lib.engine import Engine
from tests.eat.calibrated import LENGTH, build


@pytest.mark.parametrize(
  'options',
  [
    {'tau': 0.55},
    {'tau': 0.99},
    {'tau': 'guaranteed'},
    {'rule': 'entropy', 'tau': 0.65},
    {'rule': 'patience', 'veto_margin': 0.5},
    {'rule': 'never'},
  ],
)
def test_drift_is_checked_whatever_the_rule(finished, options):
  report = json.loads((finished[0] / 'calibration.json').read_text())
  turns = []
  _, policy = build(
    finished, options, on_drift=lambda *turn: turns.append(turn)
  )
  check = policy.monitor.drift
  assert check.calibration.threshold == report['drift']['threshold'] == 0.55
  for confidence in 3 * report['drift']['confidences']:
    policy.monitor.record_exit(3, 'confidence', confidence)
  assert not turns
  assert check.report()['tests'] > 0
  for _ in range(1000):
    policy.monitor.record_exit(3, 'confidence', 1.0)
  assert [drifted for drifted, _ in turns] == [True]
  assert policy.monitor.full_depth


def test_rows_that_are_like_the_calibration_split_do_not_drift(finished):
  """Confidences by the chain are those that the evaluator recorded."""
  chain, policy = build(finished, {'rule': 'never'})
  lines = (finished[0] / 'train.tsv').read_text().splitlines()[1:]
  texts = [line.split('\t')[0] for line in lines]
  seen = []
  policy.monitor.drift.add = seen.append
  with Engine(chain, policy, (LENGTH,), (16,)) as engine:
    answers = engine.predict(texts)
  assert {answer.depth for answer in answers} == {4}
  expected = policy.monitor.drift.calibration.confidences
  np.testing.assert_allclose(np.sort(seen), expected, atol=1e-5)


def test_a_calibration_of_other_parameters_is_refused(finished):
  directory, task, variables = finished
  other = jax.tree.map(lambda leaf: leaf * 1.0001, variables)
  with pytest.raises(ConfigError) as error:
    build((directory, task, other), step=1500)
  assert error.value.field.endswith('calibration.json')
  assert (
    f'run python -m launch.evaluate --workdir={directory} --evals=calibration '
    '--step=1500 --config.evals.calibration.epsilon=0.2 '
    '--config.evals.calibration.delta=0.1'
  ) in str(error.value)


@pytest.mark.parametrize(
  'text',
  [
    '{',
    '[]',
    '{"drift": {"confidences": []}}',
    '{"drift": {"confidences": [], "threshold": 0.9}}',
    '{"drift": {"confidences": [0.5], "threshold": "x"}}',
    '{"drift": 3}',
    '{"temperatures": [1.0, 2.0, 3.0]}',
    '{"temperatures": [1.0, -2.0]}',
  ],
)
def test_a_damaged_calibration_is_a_readable_error(run, text):
  (run[0] / 'calibration.json').write_text(text)
  with pytest.raises(ConfigError, match=r'calibration\.json|temperatures'):
    build(run)
