"""Options of serving an EAT; the policy is `serve_lib.policies.ExitPolicy`.

The evaluator 'calibration' writes `calibration.json`: temperatures and the
reference of the drift check; 'certificate' writes `certificate.json`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval

from core import fields, registry
from core.errors import ConfigError
from eval_lib.certificate import GUARANTEED, Certified
from halting import older
from halting.row_rules import (
  Confidence,
  Never,
  RowRule,
  ThresholdRule,
  Tolerance,
)
from serve_lib.items import TextOptions
from serve_lib.policies import ExitOptions, Share

# Options that are fields of many rules.
_BESIDE = 'tau', 'patience', 'tolerance', 'veto_margin'


@dataclasses.dataclass(frozen=True)
class Options(ExitOptions, TextOptions):
  """Options of serving an EAT.

  `tau`, `patience` and `veto_margin` are fields of the rule if it has them, and
  `rule.NAME` is any field of it; `tolerance` and `patience` are those of a
  regression, whatever the rule.
  """

  # A class of `halting.row_rules` in lower case, or 'package.module:Class'.
  rule: str = 'confidence'
  # 'guaranteed' is that of the certificate of the run; None is 0.9 with
  # rule=confidence.
  tau: (
    Annotated[float, Interval(ge=0.0, le=100.0)] | Literal['guaranteed'] | None
  ) = None
  patience: Annotated[int, Interval(ge=1, le=1000)] = 2
  tolerance: Annotated[float, Interval(ge=0.0, le=1e6)] = 0.1
  veto_margin: Share = 0.0


def read_options(
  given: Mapping[str, Any], certified: Mapping[str, Certified], classes: int
) -> tuple[Options, RowRule]:
  """Checks the options; returns them and the exit rule they describe.

  `certified` are the certificates of the run by source; `classes` is 0 for a
  regression.
  """
  own = {k[5:]: v for k, v in given.items() if k.startswith('rule.')}
  given = {k: v for k, v in given.items() if not k.startswith('rule.')}
  given |= {name: own.pop(name) for name in _BESIDE if name in own}
  options = Options(**fields.check(Options, given, 'serve'))
  kind = _class_of(options.rule)
  if not classes:
    why = 'for a regression, whose heads give a number: rows leave by tolerance'
    _refuse(options, 'veto_margin ensemble_margin thresholds', f'nothing {why}')
  if options.tau == GUARANTEED:
    return _guaranteed(options, kind, certified)
  if issubclass(kind, ThresholdRule):
    tau: Any = options.tau
    if tau is None:  # rows of a regression exit by `tolerance`
      tau = getattr(kind if classes else Confidence, 'tau', None)
    if tau is None:
      words = kind.legal(classes)[1]
      expected = f'{words}: rule={options.rule} has no default, add tau=...'
      raise ConfigError('serve.tau', 'nothing', expected)
    _check_tau('serve.tau', tau, kind, classes)
    options = dataclasses.replace(options, tau=tau)
    for source, one in options.thresholds.items():
      _check_tau(f'serve.thresholds.{source}', one, kind, classes)
  else:
    why = f'none with the rule {options.rule!r}, which has no threshold tau'
    _refuse(options, 'thresholds', why)
  if not classes and kind is not Never:
    kind = Tolerance
  legal = fields.hints(kind)
  beside = {n: getattr(options, n) for n in _BESIDE if n in legal}
  name = registry.name_of(kind)
  return options, registry.named(
    {'name': name, **beside, **own}, 'serve.rule', RowRule
  )


def _class_of(name: str) -> type[RowRule]:
  """Returns the class that `Options.rule` names."""
  expected = f"one of {', '.join(older.EXITS)}, or 'package.module:Class'"
  full = older.EXITS.get(name, name)
  return registry.locate(full, 'serve.rule', RowRule, expected)


def _guaranteed(
  options: Options, kind: type[RowRule], certified: Mapping[str, Certified]
) -> tuple[Options, RowRule]:
  """Returns the options and the rule of certificates."""
  if not certified or kind is not Confidence:
    command = 'python -m launch.evaluate --workdir=... --evals=certificate'
    expected = f'rule=confidence and a certificate.json: run {command}'
    raise ConfigError('serve.tau', options.tau, expected)
  # The certificate holds for the plain confidence rule only: with a veto a
  # row would leave at a later head than was certified.
  others = 'ensemble_margin veto_margin thresholds minimum_retention'
  why = f'none with tau={options.tau}, certified without it'
  _refuse(options, others, why)
  taus = {source: one.tau for source, one in certified.items()}
  # Rows of a source without a certificate run to full depth.
  tau = taus.pop('', math.inf)
  never = min([tau, *taus.values()]) == math.inf
  rule = Never() if never else Confidence(tau)
  return dataclasses.replace(options, thresholds=taus), rule


def _refuse(options: Options, names: str, expected: str) -> None:
  """Raises ConfigError if one of the options is given."""
  for name in names.split():
    if value := getattr(options, name):
      raise ConfigError(f'serve.{name}', value, expected)


def _check_tau(
  field: str, tau: Any, kind: type[ThresholdRule], classes: int
) -> None:
  """Raises ConfigError for a threshold that the rule cannot have."""
  most, words = kind.legal(classes)
  is_legal = fields.accepts(float, tau) and 0 <= tau <= most
  if tau != kind.NEVER and not is_legal:
    raise ConfigError(field, tau, words)
