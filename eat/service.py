"""From a trained task to what the engine takes: a chain and a policy.

Temperatures, the guaranteed threshold and what drift is measured against come
from the run's `calibration.json`, which the evaluator 'calibration' writes;
the tokenizer from the run's `tokenizer.json`. `eat.loading` brings the task
and its parameters from the run's directory.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from dataset_lib.fields import Field, check_fields, integer, real
from dataset_lib.glue_tasks import num_texts
from eat import cautions
from eat.calibration_file import (
  check_parameters,
  drift_check,
  read_calibration,
)
from eat.exits import RULES, RULES_WITH_TAU, Rule
from eat.model import EatClassifier
from eat.policy import EatPolicy
from eat.serving import EatChain
from eat.settings import Settings, check_entropies, expected_in, legal_taus
from model_lib.bert import BertClassifier
from serve_lib.monitor import Monitor
from train_lib.run_directory import TOKENIZER

GUARANTEED = 'guaranteed'
DEFAULT_TAU = 0.9  # of rule=confidence; other rules measure something else


def _tau() -> Field:
  unit = real(0.0, 100.0)
  return Field(
    f"a number in [0, 100], or '{GUARANTEED}' for the threshold that was "
    'certified by calibration',
    lambda value: value in (None, GUARANTEED) or unit.accepts(value),
    None,  # `DEFAULT_TAU` where the rule has one
  )


OPTIONS = {
  'rule': Field(f'one of {", ".join(RULES)}', RULES.__contains__, 'confidence'),
  'tau': _tau(),
  'patience': integer(1, 1000, 2),
  'tolerance': real(0.0, 1e6, 0.1),
  'veto_margin': real(0.0, 1.0, 0.0),
  'ensemble_margin': real(0.0, 1.0, 0.0),
  'max_characters': integer(1, 2**31 - 1, 100_000),
}


def build(
  task: Any,
  variables: Mapping[str, Any],
  directory: str,
  options: Mapping[str, Any],
  thresholds: Mapping[str, float],
  minimum_retention: Mapping[str, float],
  monitor_window: int = 4096,
  step: int | None = None,
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
  max_length: int | None = None,
) -> tuple[EatChain, EatPolicy]:
  """Chain and policy of a run.

  `policy.warnings` says what could not be checked, and what does not do what
  was probably meant.

  Args:
    task: the run's `eat.task:FineTune`.
    variables: its parameters.
    directory: the run's directory.
    options: see `OPTIONS`.
    thresholds: of the rule, by source.
    minimum_retention: by source.
    monitor_window: rows behind the monitor's percentiles.
    step: of the checkpoint, for messages.
    on_drift: see `serve_lib.drift.DriftCheck`.
    max_length: tokens of the longest bucket, at which texts are cut off; None
      for the longest row of the training data.

  Raises:
    ConfigError: an option is illegal, or needs a calibration that is not
      there, or the calibration is that of another checkpoint.
  """
  settings = settings_of(
    directory,
    options,
    thresholds,
    minimum_retention,
    len(task.info.class_names),
  )
  calibration = read_calibration(directory)
  check_parameters(calibration, variables, directory, step)
  words = tokenizer.load(pathlib.Path(directory) / TOKENIZER)
  chain = EatChain(
    as_adaptive(task.model),
    jax.device_put(dict(variables)),
    words.pad_id,
    with_full=any(minimum_retention.values()),  # no row asks for it otherwise
  )
  longest = task.info.input_shape[0]
  policy = EatPolicy(
    chain,
    words,
    task.info.class_names,
    max_length or longest,
    settings,
    Monitor(monitor_window, drift_check(calibration, directory, on_drift)),
    num_texts(task.config['dataset']),
  )
  policy.warnings = cautions.cautions(
    calibration, policy, chain, directory, step, longest,
    guaranteed=options.get('tau') == GUARANTEED,
  )  # fmt: skip
  return chain, policy


def settings_of(
  directory: str,
  options: Mapping[str, Any],
  thresholds: Mapping[str, float],
  minimum_retention: Mapping[str, float],
  num_classes: int | None = None,
) -> Settings:
  """How rows are let out; needs neither parameters nor a device.

  Args:
    directory: of the run.
    options: see `OPTIONS`.
    thresholds: of the rule, by source.
    minimum_retention: by source.
    num_classes: of the labels, 0 for a regression; None if not known yet.

  Raises:
    ConfigError: as `build`.
  """
  given = check_fields(options, OPTIONS, 'serve')
  calibration = read_calibration(directory)
  if given['tau'] == GUARANTEED:
    _check_covered(given, thresholds, minimum_retention)
  settings = Settings(
    rule=rule_of(given, calibration, num_classes),
    temperatures=tuple(calibration.get('temperatures', ())),
    thresholds=thresholds,
    minimum_retention=minimum_retention,
    ensemble_margin=float(given['ensemble_margin']),
    max_characters=given['max_characters'],
  )
  check_entropies(settings, num_classes)
  if num_classes == 0:
    _check_no_margins(given)
  return settings


def as_adaptive(model: Any) -> EatClassifier:
  """A dense BERT as an `EatClassifier` without pruning, window and exits.

  It has the same parameters, and one stage.
  """
  if isinstance(model, EatClassifier):
    return model
  if not isinstance(model, BertClassifier):
    raise ConfigError(
      'model.name',
      type(model).__name__,
      'eat.model:EatClassifier or model_lib.bert:BertClassifier',
    )
  fields = {
    name: getattr(model, name)
    for name in BertClassifier.__dataclass_fields__
    if name in EatClassifier.__dataclass_fields__
    and name not in ('parent', 'name')
  }
  return EatClassifier(
    **fields, prune_layers=(), prune_ratios=(), window=0, exit_layers=()
  )


def rule_of(
  given: Mapping[str, Any],
  calibration: Mapping[str, Any],
  num_classes: int | None = None,
) -> Rule:
  """The exit rule that the options describe.

  Args:
    given: all of `OPTIONS`.
    calibration: see `read_calibration`.
    num_classes: see `settings_of`.

  Raises:
    ConfigError: as `build`; also if the rule needs a threshold that is not
      given.
  """
  tau = given['tau']
  if tau == GUARANTEED:
    guarantee = calibration.get('guarantee')
    if guarantee is None or given['rule'] != 'confidence':
      raise ConfigError(
        'serve.tau',
        tau,
        'rule=confidence and a calibration.json with a guarantee: run python '
        '-m launch.evaluate --workdir=... --evals=calibration '
        '--config.evals.calibration.epsilon=0.02',
      )
    tau = guarantee['threshold']
    if tau is None:  # nothing could be certified: nobody leaves early
      return Rule('never')
  if tau is None:
    tau = _default_tau(given['rule'], num_classes)
  try:
    return Rule(
      given['rule'],
      tau=float(tau) if given['rule'] in RULES_WITH_TAU else None,
      patience=given['patience'],
      tolerance=float(given['tolerance']),
      veto_margin=float(given['veto_margin']),
    )
  except ValueError as error:
    field = str(error).partition(': expected ')[0]
    raise ConfigError(
      f'serve.{field}', given.get(field), expected_in(error)
    ) from error


def _default_tau(rule: str, num_classes: int | None) -> float:
  """Raises ConfigError if the rule has a threshold and no default of it."""
  # A regression leaves by its tolerance, whatever the rule.
  needs_one = rule in RULES_WITH_TAU and rule != 'confidence'
  if needs_one and num_classes != 0:
    raise ConfigError(
      'serve.tau',
      'nothing',
      f'{legal_taus(rule, num_classes)}: rule={rule} has no default, add '
      'tau=...',
    )
  return DEFAULT_TAU


def _check_no_margins(given: Mapping[str, Any]) -> None:
  for name in ('veto_margin', 'ensemble_margin'):
    if given[name]:
      raise ConfigError(
        f'serve.{name}', given[name], '0 for a regression: its heads give a '
        'number, which has no margin'
      )  # fmt: skip


def _check_covered(given, thresholds, minimum_retention) -> None:
  """The guarantee is of the plain rule on the model as it was evaluated."""
  for name, value in (
    ('ensemble_margin', given['ensemble_margin']),
    # A row that it holds back leaves at a later head than was certified.
    ('veto_margin', given['veto_margin']),
    ('thresholds', thresholds),
    ('minimum_retention', minimum_retention),
  ):
    if value:
      raise ConfigError(
        f'serve.{name}', value, f'nothing beside tau={GUARANTEED}, which was '
        'certified without it',
      )  # fmt: skip
