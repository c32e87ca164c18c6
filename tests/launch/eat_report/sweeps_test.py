"""Settings, rules and the guarantee on logits whose answers are known."""

import numpy as np
import pytest

from launch import command_line
from launch.eat_report import pictures, report_rows, sweeps
from tests.launch.eat_report.toy import (
  LOGITS,
  fake,
  measured,
)


def test_a_setting_by_hand():
  settings = {one.name: one for one in measured(fake(LOGITS))}
  one = settings['confidence=0.8']
  assert one.exits.tolist() == [0, 1, 0]
  # Right, right, and right where the full model is wrong.
  assert one.point.quality == 1
  assert one.point.agreement == pytest.approx(2 / 3)
  assert one.depth.tolist() == [2, 4, 2]
  assert one.retention.tolist() == [1.0, 0.7, 1.0]
  assert one.flops.tolist() == [20, 40, 20]
  assert one.point.flops == pytest.approx(80 / 240)
  assert one.reasons() == ['confidence', 'last layer', 'confidence']
  assert settings['never'].point.quality == pytest.approx(2 / 3)
  # Both heads are left at once; one head agrees with itself.
  assert settings['patience=1'].exits.tolist() == [0, 0, 0]
  assert 'patience=2' not in settings
  # H(0.9) = 0.325 and H(0.6) = 0.673 nats; margins 0.8 and 0.2.
  assert settings['entropy=0.3466'].exits.tolist() == [0, 1, 0]
  assert settings['entropy=0.2079'].exits.tolist() == [1, 1, 1]
  assert settings['margin=0.1'].exits.tolist() == [0, 0, 0]
  assert settings['margin=0.7'].exits.tolist() == [0, 1, 0]


def test_choosing_what_is_timed():
  settings = measured(fake(LOGITS)) + measured(fake(LOGITS, 'no_window'))
  choose = sweeps.choose
  names = lambda *a: [s.name for s in choose(settings, *a)]  # noqa: E731
  # On the frontier: all leave at once (2 of 3 right), or two of them (all).
  auto = names('auto', 'confidence=0.9', 9)
  assert auto[:2] == ['never', 'confidence=0.9']
  points = {(s.point.flops, s.point.quality) for s in choose(settings, *(
    'auto', 'confidence=0.9', 9))}  # fmt: skip
  assert points == {(0.25, 2 / 3), (80 / 240, 1.0), (0.5, 2 / 3)}
  assert not any('no_window' in name for name in auto)
  assert names('none', 'never', 9) == []
  assert len(names('all', 'never', 9)) == len(settings)
  assert names('no_window/never,never,never', 'never', 9) == [
    'no_window/never', 'never',
  ]  # fmt: skip
  with pytest.raises(command_line.UsageError, match=r"--time: .* got 'x'"):
    names('never,x', 'never', 9)


def test_rules_of_a_regression_and_of_one_head():
  regression = fake(np.zeros((2, 3, 1)))
  rules = sweeps.rules(regression)
  assert 'tolerance=0.1' in rules
  assert 'never' in rules
  assert {rule.name for rule, _ in rules.values()} == {'patience', 'never'}
  rule, value = rules['tolerance=0.1']
  left = np.array([0, len(regression.heads) - 1])
  one = sweeps.Setting('tolerance=0.1', regression, rule, value, None, left)
  assert one.reasons() == ['tolerance', 'last layer']  # as `eat.policy` says
  assert pictures._short(one) == '±0.1'
  default = sweeps.default_name
  assert default(regression, 0.9) in rules
  one = fake(LOGITS[:1], heads=(4,))
  assert list(sweeps.rules(one)) == ['never']
  assert default(one, 0.9) == 'never'


def test_combined_and_vetoed_rules_by_hand():
  # Three heads: the confidence of the first class, of three rows.
  sure = np.array([[0.95, 0.95, 0.6], [0.92, 0.05, 0.85], [0.5, 0.5, 0.5]])
  logits = np.log(np.stack([sure, 1.0 - sure], axis=-1))
  settings = {one.name: one for one in measured(fake(logits, heads=(2, 3, 4)))}
  # The second head is the first that can agree with one before it.
  combined = settings['combined=0.9']
  assert combined.exits.tolist() == [1, 2, 2]
  assert settings['combined=0.8'].exits.tolist() == [1, 2, 1]
  assert combined.rule.patience == 2
  assert combined.reasons() == ['combined', 'last layer', 'last layer']
  row = report_rows.setting_row(combined)
  assert (row['rule'], row['value'], row['patience']) == ('combined', 0.9, 2)
  # 0.95 has a margin of 0.9; 0.92 has one of 0.84.
  assert settings['confidence=0.9'].exits.tolist() == [0, 0, 2]
  passed = settings['confidence=0.9+veto=0.85']
  assert passed.exits.tolist() == [0, 0, 2]
  vetoed = settings['confidence=0.9+veto=0.95']
  assert vetoed.exits.tolist() == [2, 2, 2]
  row = report_rows.setting_row(vetoed)
  assert (row['rule'], row['value'], row['veto_margin']) == (
    'confidence', 0.9, 0.95,
  )  # fmt: skip
  assert report_rows.setting_row(combined)['veto_margin'] is None


def test_combined_needs_three_heads_and_the_default_gets_the_vetoes():
  rules = sweeps.rules(fake(LOGITS), 0.7)
  assert not any('combined' in name for name in rules)
  assert [name for name in rules if 'veto' in name] == [
    'confidence=0.7+veto=0.55', 'confidence=0.7+veto=0.7',
    'confidence=0.7+veto=0.85',
  ]  # fmt: skip
  own = sweeps.rules(fake(LOGITS), 0.615)
  names = [name for name in own if name.startswith('confidence')]
  assert names[:4] == [
    'confidence=0.5', 'confidence=0.6', 'confidence=0.615', 'confidence=0.7',
  ]  # fmt: skip


def test_one_head_agrees_with_nobody():
  rows = [report_rows.setting_row(one) for one in measured(fake(LOGITS))]
  assert all(0 <= row['agreement'] <= 1 for row in rows)
  [alone] = measured(fake(LOGITS[:1], heads=(4,)))
  assert report_rows.setting_row(alone)['agreement'] is None
