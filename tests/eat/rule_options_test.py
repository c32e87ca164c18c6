"""Options of serving with a rule of a user."""

import dataclasses

import pytest

from core.errors import ConfigError
from eat.policy import read_options
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
