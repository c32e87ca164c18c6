"""Drift as the policy sees it: what it compares, and where it sends rows."""

import numpy as np
import pytest

from eat import exits
from eat.exits import Rule
from serve_lib.drift import Calibration, DriftCheck
from serve_lib.monitor import Monitor
from tests.eat.policies import a_row, decide, make


def test_drift_sends_everything_to_full_depth_and_ends(words):
  draw = np.random.default_rng(0)

  def sure():
    return [draw.uniform(3.0, 9.0), 0.0, 0.0]

  confidences = [
    float(exits.softmax(np.array(sure(), np.float32)).max()) for _ in range(500)
  ]
  normal = Calibration(np.array(confidences), 0.9)
  drift = DriftCheck(normal, window=50, every=10, confirm=1, recover=1)
  policy = make(words, monitor=Monitor(drift=drift))

  def serve(logits, count):
    reasons = []
    for _ in range(count):
      row = a_row(policy, 'w0', [logits()])
      if not decide(policy, [row])[0]:
        row.outputs = row.outputs * 3
      reasons.append(policy.answer(row).exit_reason)
    return reasons

  assert set(serve(sure, 100)) == {'confidence'}
  serve(lambda: [3.2, 0.0, 0.0], 100)  # confident, but not as before
  assert policy.monitor.full_depth
  before = policy.monitor.snapshot()['depth']
  assert serve(sure, 1) == ['full depth']
  # What ran is counted, not what the rule would have asked for.
  after = policy.monitor.snapshot()['depth']
  assert after == before | {4: before.get(4, 0) + 1}
  serve(sure, 200)
  assert not policy.monitor.full_depth
  assert serve(sure, 1) == ['confidence']


def draw_logits(seed, count):
  rng = np.random.default_rng(seed)
  return [[rng.uniform(0.0, 8.0), 0.0, 0.0] for _ in range(count)]


def draw_rows(policy, count, *sources):
  """Rows like those of the calibration split, of the sources in turn."""
  for number, logits in enumerate(draw_logits(1, count)):
    source = sources[number % len(sources)]
    item = {'text': 'w0 w1 w2 w3 w4 w5', 'source': source}
    yield a_row(policy, item, [logits] * 3)


@pytest.mark.nightly
@pytest.mark.parametrize(
  'settings',
  [
    dict(thresholds={'forum': 0.99}),
    dict(rule=Rule('confidence', tau=0.9, veto_margin=0.99)),
    dict(rule=Rule('confidence', tau=0.97)),
    dict(rule=Rule('entropy', tau=0.2)),
    dict(rule=Rule('patience')),
    dict(rule=Rule('never')),
  ],
)
def test_drift_is_none_where_only_the_rule_differs(words, settings):
  confidences = exits.softmax(np.array(draw_logits(0, 2000))).max(-1)
  normal = Calibration(confidences, 0.9)
  drift = DriftCheck(normal, window=256, every=64, confirm=1)
  policy = make(words, monitor=Monitor(drift=drift), **settings)
  for row in draw_rows(policy, 640, '', 'forum'):
    passed, row.outputs = row.outputs, row.outputs[:1]
    if not decide(policy, [row])[0]:
      row.outputs = passed
    policy.answer(row)
  report = drift.report()
  assert report['tests'] > 5
  assert not report['drifted']
  assert report['distance'] < 0.1
  assert report['psi'] < 0.1


def test_rows_that_keep_all_tokens_are_not_compared_with_those_that_do_not(
  words,
):
  normal = Calibration(np.linspace(0.5, 1.0, 50), 0.9)
  drift = DriftCheck(normal, window=20, every=1)
  policy = make(
    words, monitor=Monitor(drift=drift), minimum_retention={'forum': 1.0}
  )
  for row in draw_rows(policy, 40, 'forum'):
    policy.answer(row)
  assert drift.report()['tests'] == 0
  for row in draw_rows(policy, 40, ''):
    policy.answer(row)
  assert drift.report()['tests'] > 0
