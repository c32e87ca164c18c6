"""Options of serving an EAT, and the calibration of the run.

The policy is `serve_lib.policies.ExitPolicy`. The evaluator 'calibration'
writes `calibration.json`: temperatures, an optional guarantee, and the
reference of the drift check.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Gt, Interval

from dataset_lib import fields, text_files
from dataset_lib.errors import ConfigError, InvalidDataError
from eval_lib.calibration import FILE, fingerprint
from serve_lib.exits import RULES_WITH_TAU, Rule
from serve_lib.items import TextOptions
from serve_lib.monitor import DriftCheck
from serve_lib.policies import DEFAULT_TAU, ExitOptions, Share

GUARANTEED = 'guaranteed'


@dataclasses.dataclass(frozen=True)
class Options(ExitOptions, TextOptions):
  """Options of serving an EAT; `serve_lib.exits.Rule` describes these."""

  rule: Literal[
    'confidence', 'entropy', 'margin', 'patience', 'combined', 'never'
  ] = 'confidence'
  # 'guaranteed' is the threshold that calibration certified; None is 0.9 with
  # rule=confidence.
  tau: (
    Annotated[float, Interval(ge=0.0, le=100.0)] | Literal['guaranteed'] | None
  ) = None
  patience: Annotated[int, Interval(ge=1, le=1000)] = 2
  tolerance: Annotated[float, Interval(ge=0.0, le=1e6)] = 0.1
  veto_margin: Share = 0.0


class CalibrationFile:
  """A calibration; every error is a ConfigError with the command to repair it.

  `values` are those of the file `path`, or {} if there is none.
  """

  def __init__(self, directory: str, step: int | None = None):
    """Reads the file of a run, '' for none, and of a step, for messages."""
    self._directory, self._step = directory, step
    self.path = pathlib.Path(directory) / FILE
    self.values: Mapping[str, Any] = {}
    if not directory:
      return
    try:
      with contextlib.suppress(FileNotFoundError):
        self.values = text_files.read_object(self.path)
    except InvalidDataError as error:
      raise self._error('', str(error), 'the JSON of a calibration') from error

  def check_parameters(self, variables: Mapping[str, Any]) -> None:
    """Checks the fingerprint of the parameters, if the file has one."""
    known = self.values.get('parameters')
    if known is not None and known != (served := fingerprint(variables)):
      raise self._error(
        '',
        f'that of the parameters {known}',
        'the calibration of the checkpoint that is served, whose parameters '
        f'are {served}',
      )

  def temperatures(self, heads: int) -> tuple[float, ...]:
    """Returns the temperature of each head, or () if there are none."""
    given = self.values.get('temperatures', ())
    legal = tuple[Annotated[float, Gt(0.0)], ...]
    given = fields.check_value(f'{self.path}: temperatures', given, legal)
    if given and len(given) != heads:
      raise self._error(': temperatures', given, f'{heads}, one for each head')
    return given

  def drift_check(
    self, on_drift: Callable[[bool, dict[str, Any]], None] | None = None
  ) -> DriftCheck | None:
    """Returns a check against the calibration split; None without statistics.

    They are those of `eval_lib.calibration.drift_statistics`.
    """
    drift = self.values.get('drift')
    if drift is None:
      return None
    try:
      confidences = np.array(drift['confidences'], np.float64)
      threshold = float(drift['threshold'])
      return DriftCheck(confidences, threshold, on_drift=on_drift)
    except (KeyError, TypeError, ValueError) as error:
      given = f'{type(error).__name__}: {error}'
      expected = 'confidences and a threshold'
      raise self._error(': drift', given, expected) from error

  def repair(self) -> str:
    """Returns the command that writes the file, with its guarantee if any."""
    command = (
      f'run python -m launch.evaluate --workdir={self._directory} '
      '--evals=calibration'
    )
    if self._step is not None:
      command += f' --step={self._step}'
    guarantee = self.values.get('guarantee') or {}
    for name in ('epsilon', 'delta'):
      if name in guarantee:
        command += f' --config.evals.calibration.{name}={guarantee[name]}'
    return command

  def _error(self, part: str, given: Any, expected: str) -> ConfigError:
    expected = f'{expected}; {self.repair()}'
    return ConfigError(f'{self.path}{part}', given, expected)


def read_options(
  given: Mapping[str, Any], guarantee: Mapping[str, Any] | None, classes: int
) -> tuple[Options, Rule]:
  """Checks the options; returns them and the exit rule they describe.

  `guarantee` is that of the run's calibration; `classes` is 0 for a regression.
  """
  options = Options(**fields.check(Options, given, 'serve'))
  name, tau = options.rule, options.tau
  if not classes:
    why = 'for a regression, whose heads give a number: rows leave by tolerance'
    _refuse(options, 'veto_margin ensemble_margin thresholds', f'nothing {why}')
  if tau == GUARANTEED:
    if guarantee is None or name != 'confidence':
      raise ConfigError(
        'serve.tau',
        GUARANTEED,
        'rule=confidence and a calibration.json with a guarantee: run python '
        '-m launch.evaluate --workdir=... --evals=calibration '
        '--config.evals.calibration.epsilon=0.02',
      )
    # The guarantee holds for the plain confidence rule only: with a veto a row
    # would leave at a later head than was certified.
    expected = f'nothing beside tau={GUARANTEED}, certified without it'
    others = 'ensemble_margin veto_margin thresholds minimum_retention'
    _refuse(options, others, expected)
    tau = guarantee['threshold']
    if tau is None:  # no threshold could be certified
      return options, Rule('never')
  elif name not in RULES_WITH_TAU:
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
  is_number, expected = fields.accepts(float, tau), ''
  if rule != 'entropy':
    if not (is_number and 0 <= tau <= 1) and tau != math.inf:
      expected = 'a probability in [0, 1]'
  elif not (is_number and tau >= 0) and tau != -math.inf:
    expected = 'nats >= 0'
  elif classes and tau >= math.log(classes):
    expected = f'{_legal_taus(rule, classes)}: every row would leave'
  if expected:
    raise ConfigError(field, tau, expected)


def _legal_taus(rule: str, classes: int) -> str:
  """Describes the thresholds that make sense for a rule."""
  if rule == 'entropy':
    most = f'{math.log(classes):.4f}'
    return f'nats in [0, {most}), the entropy of {classes} equal classes'
  if rule == 'margin':
    return 'a difference of two probabilities, in [0, 1]'
  least = f'{1 / classes:.4g}'
  return f'a probability in [0, 1], of the surest of {classes} >= {least}'
