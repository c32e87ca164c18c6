"""How rows are let out: the rule, and what differs by source."""

import dataclasses
from collections.abc import Mapping, Sequence

from dataset_lib.errors import ConfigError
from eat.exits import RULES_WITH_TAU, Rule


@dataclasses.dataclass(frozen=True)
class Settings:
  """How rows are let out.

  Attributes:
    rule: when a row leaves.
    temperatures: of each head; () for 1.
    thresholds: by source, instead of the rule's `tau`.
    minimum_retention: by source; a row whose source asks for more than the
      model would keep is served without pruning. The drift check leaves such
      rows out: the calibration split was measured with pruning.
    ensemble_margin: an answer whose margin is below it is the mean of the
      probabilities of all heads it passed; 0 for never.
    max_characters: of one text; a longer one is an error and not truncated.

  Raises:
    ConfigError: at construction, naming the source, if its threshold is none
      that the rule may have, or its retention is no share.
  """

  rule: Rule = dataclasses.field(
    default_factory=lambda: Rule('confidence', tau=0.9)
  )
  temperatures: Sequence[float] = ()
  thresholds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  minimum_retention: Mapping[str, float] = dataclasses.field(
    default_factory=dict
  )
  ensemble_margin: float = 0.0
  max_characters: int = 100_000

  def __post_init__(self):
    for source, share in self.minimum_retention.items():
      if not 0.0 <= share <= 1.0:
        raise ConfigError(
          f'minimum_retention.{source}', share, 'a number in [0, 1]'
        )
    if self.thresholds and self.rule.name not in RULES_WITH_TAU:
      raise ConfigError(
        'thresholds',
        dict(self.thresholds),
        f'none with the rule {self.rule.name!r}: rules with a threshold are '
        f'{", ".join(RULES_WITH_TAU)}',
      )
    for source, tau in self.thresholds.items():
      try:
        dataclasses.replace(self.rule, tau=tau)
      except ValueError as error:
        raise ConfigError(
          f'thresholds.{source}', tau, expected_in(error)
        ) from error


def expected_in(error: ValueError) -> str:
  """What an error of `eat.exits` says that it expected."""
  return str(error).partition(': expected ')[2].rpartition(', got ')[0]
