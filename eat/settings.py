"""How rows are let out: the rule, and what differs by source."""

import dataclasses
import math
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


def legal_taus(rule: str, num_classes: int | None) -> str:
  """The thresholds that make sense for a rule, in words.

  Args:
    rule: one of `RULES_WITH_TAU`.
    num_classes: of the labels; None if not known.
  """
  classes = f'{num_classes} classes' if num_classes else 'C classes'
  if rule == 'entropy':
    most = f'{math.log(num_classes):.4f}' if num_classes else 'log C'
    return (
      f'nats in [0, {most}), the entropy of {classes} that are equally likely'
    )
  if rule == 'margin':
    return 'a difference of two probabilities, in [0, 1]'
  least = f'{1 / num_classes:.4g}' if num_classes else '1 / C'
  return (
    f'a probability in [0, 1], where {least} is the least that the surest of '
    f'{classes} has'
  )


def check_entropies(settings: Settings, num_classes: int | None) -> None:
  """Refuses thresholds that every row meets, however unsure its head is.

  Args:
    settings: those of a service.
    num_classes: of the labels, 0 for a regression; None if not known.

  Raises:
    ConfigError: the rule is 'entropy', and a threshold is at least the entropy
      of classes that are equally likely.
  """
  if settings.rule.name != 'entropy' or not num_classes:
    return
  taus = {'serve.tau': settings.rule.tau} | {
    f'thresholds.{source}': tau for source, tau in settings.thresholds.items()
  }
  for key, tau in taus.items():
    if tau >= math.log(num_classes):
      raise ConfigError(
        key, tau, f'{legal_taus("entropy", num_classes)}: every row would leave'
      )


def expected_in(error: ValueError) -> str:
  """What an error of `eat.exits` says that it expected."""
  return str(error).partition(': expected ')[2].rpartition(', got ')[0]
