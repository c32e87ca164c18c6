"""Options of serving an EAT; the policy is `serve_lib.policies.ExitPolicy`.

The evaluator 'calibration' writes `calibration.json`: temperatures and the
reference of the drift check; 'certificate' writes `certificate.json`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval

from core import fields
from core.errors import ConfigError
from eval_lib.certificate import GUARANTEED, Certified
from serve_lib.exits import RULES_WITH_TAU, Rule
from serve_lib.items import TextOptions
from serve_lib.policies import DEFAULT_TAU, ExitOptions, Share


@dataclasses.dataclass(frozen=True)
class Options(ExitOptions, TextOptions):
  """Options of serving an EAT; `serve_lib.exits.Rule` describes these."""

  rule: Literal[
    'confidence', 'entropy', 'margin', 'patience', 'combined', 'never'
  ] = 'confidence'
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
) -> tuple[Options, Rule]:
  """Checks the options; returns them and the exit rule they describe.

  `certified` are the certificates of the run by source; `classes` is 0 for a
  regression.
  """
  options = Options(**fields.check(Options, given, 'serve'))
  name, tau = options.rule, options.tau
  if not classes:
    why = 'for a regression, whose heads give a number: rows leave by tolerance'
    _refuse(options, 'veto_margin ensemble_margin thresholds', f'nothing {why}')
  if tau == GUARANTEED:
    if not certified or name != 'confidence':
      command = 'python -m launch.evaluate --workdir=... --evals=certificate'
      expected = f'rule=confidence and a certificate.json: run {command}'
      raise ConfigError('serve.tau', tau, expected)
    # The certificate holds for the plain confidence rule only: with a veto a
    # row would leave at a later head than was certified.
    others = 'ensemble_margin veto_margin thresholds minimum_retention'
    _refuse(options, others, f'none with tau={tau}, certified without it')
    taus = {source: one.tau for source, one in certified.items()}
    # Rows of a source without a certificate run to full depth.
    rule = Rule('confidence', taus.pop('', math.inf))
    if min([rule.tau, *taus.values()]) == math.inf:
      rule = Rule('never')
    return dataclasses.replace(options, thresholds=taus), rule
  if name not in RULES_WITH_TAU:
    legal = f'rules with a threshold are {", ".join(RULES_WITH_TAU)}'
    _refuse(options, 'thresholds', f'none with the rule {name!r}: {legal}')
    tau = None
  elif tau is None:
    # Rows of a regression exit by `tolerance`, whatever the rule.
    if name != 'confidence' and classes:
      expected = f'{_legal_taus(name, classes)}: rule={name} has no default'
      raise ConfigError('serve.tau', 'nothing', f'{expected}, add tau=...')
    tau = DEFAULT_TAU
  if tau is not None:
    _check_tau('serve.tau', tau, name, classes)
  for source, one in options.thresholds.items():
    _check_tau(f'serve.thresholds.{source}', one, name, classes)
  return options, Rule(
    name, tau, options.patience, options.tolerance, options.veto_margin
  )


def _refuse(options: Options, names: str, expected: str) -> None:
  """Raises ConfigError if one of the options is given."""
  for name in names.split():
    if value := getattr(options, name):
      raise ConfigError(f'serve.{name}', value, expected)


def _check_tau(field: str, tau: Any, rule: str, classes: int) -> None:
  """Raises ConfigError for a threshold that the rule cannot have."""
  off, most = math.inf, 1.0
  if rule == 'entropy':
    off = -math.inf
    most = math.nextafter(math.log(classes), 0) if classes else math.inf
  if tau != off and not (fields.accepts(float, tau) and 0 <= tau <= most):
    raise ConfigError(field, tau, _legal_taus(rule, classes))


def _legal_taus(rule: str, classes: int) -> str:
  """Describes the thresholds that make sense for a rule."""
  if rule == 'margin':
    return 'a difference of two probabilities, in [0, 1]'
  if not classes:
    return 'nats >= 0' if rule == 'entropy' else 'a probability in [0, 1]'
  if rule == 'entropy':
    most = f'{math.log(classes):.4f}), the entropy of {classes} equal classes'
    return f'nats in [0, {most}, at which every row would leave'
  least = f'{1 / classes:.4g}'
  return f'a probability in [0, 1], of the surest of {classes} >= {least}'
