"""Options of serving with a rule of a user."""

import dataclasses

import numpy as np
import pytest

from core.errors import ConfigError
from eat.policy import check_rows, read_options
from halting.row_rules import ClassRule, Tolerance


@dataclasses.dataclass(frozen=True)
class Odds(ClassRule):
  """A rule of a user."""

  least: float = 9.0

  def sure(self, probabilities, agreed):
    """See the base."""
    best = probabilities.max(-1)
    return best >= self.least * (1.0 - best)


ODDS = f'{__name__}:Odds'


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('least', 'expected rule.least'),
    *((name, 'expected none: Odds has no such field')
      for name in ('tau', 'patience', 'tolerance', 'rule.tau')),
  ],
)  # fmt: skip
def test_fields_that_the_rule_lacks_are_refused(name, expected):
  field = name.removeprefix('rule.')
  with pytest.raises(ConfigError, match=f'serve.{field}: {expected}'):
    read_options({'rule': ODDS, name: 1.0}, {}, 2)


def test_the_rule_takes_the_fields_that_it_has():
  given = {'rule': ODDS, 'rule.least': 2.0, 'veto_margin': 0.5}
  assert read_options(given, {}, 2)[1] == Odds(2.0, veto_margin=0.5)
  given = {'rule': ODDS, 'tolerance': 0.5}  # of a regression
  assert read_options(given, {}, 0)[1] == Tolerance(0.5)


class SureOfAll(ClassRule):
  """One bool for all rows."""

  def sure(self, probabilities, agreed):
    return bool(probabilities.max() >= 0.9)


class SureOfFirst(ClassRule):
  def sure(self, probabilities, agreed):
    return probabilities[:1].max(-1) >= 0.9


class SureOfClass(ClassRule):
  """A decision for each class."""

  def sure(self, probabilities, agreed):
    return np.float32(probabilities >= 0.9)

  def leaves(self, logits, agreed):
    return self.sure(logits, agreed)


@pytest.mark.parametrize('rule', [SureOfAll(), SureOfFirst(), SureOfClass()])
def test_a_rule_by_which_rows_depend_on_their_batch_is_refused(rule):
  with pytest.raises(ConfigError, match='for each row by itself') as raised:
    check_rows(rule, 3)
  assert raised.value.field == 'serve.rule'
