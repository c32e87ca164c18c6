"""From a trained task to what the engine takes: a chain and a policy.

Temperatures and the guaranteed threshold come from the run's
`calibration.json`, which the evaluator 'calibration' writes; the tokenizer
from the run's `tokenizer.json`.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from dataset_lib.fields import Field, check_fields, integer, real
from eat.exits import RULES, Rule
from eat.model import EatClassifier
from eat.policy import EatPolicy, Settings
from eat.serving import EatChain
from model_lib.bert import BertClassifier
from serve_lib.drift import Calibration, DriftCheck
from serve_lib.monitor import Monitor
from train_lib.text_classification import TOKENIZER_FILE

CALIBRATION_FILE = 'calibration.json'
GUARANTEED = 'guaranteed'


def _tau() -> Field:
  unit = real(0.0, 100.0)
  return Field(
    f"a number in [0, 100], or '{GUARANTEED}' for the threshold that was "
    'certified by calibration',
    lambda value: value == GUARANTEED or unit.accepts(value),
    0.9,
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
) -> tuple[EatChain, EatPolicy]:
  """Chain and policy of a run.

  Args:
    task: the run's `eat.task:FineTune`.
    variables: its parameters.
    directory: the run's directory.
    options: see `OPTIONS`.
    thresholds: of the rule, by source.
    minimum_retention: by source.
    monitor_window: rows behind the monitor's percentiles.

  Raises:
    ConfigError: an option is illegal, or needs a calibration that is not
      there.
  """
  given = check_fields(options, OPTIONS, 'serve')
  calibration = read_calibration(directory)
  chain = EatChain(as_adaptive(task.model), jax.device_put(dict(variables)))
  if given['tau'] == GUARANTEED:
    _check_covered(given, thresholds, minimum_retention)
  settings = Settings(
    rule=rule_of(given, calibration),
    temperatures=tuple(calibration.get('temperatures', ())),
    thresholds=thresholds,
    minimum_retention=minimum_retention,
    ensemble_margin=float(given['ensemble_margin']),
    max_characters=given['max_characters'],
  )
  words = tokenizer.load(pathlib.Path(directory) / TOKENIZER_FILE)
  chain.pad_id = words.pad_id
  policy = EatPolicy(
    chain,
    words,
    task.info.class_names,
    task.info.input_shape[0],
    settings,
    Monitor(monitor_window, drift=drift_check(calibration, settings.rule)),
  )
  return chain, policy


def drift_check(
  calibration: Mapping[str, Any], rule: Rule
) -> DriftCheck | None:
  """A check against the calibration split, if that was taken for this rule.

  Depths depend on the rule: those of another threshold would look like drift.
  """
  drift = calibration.get('drift')
  if drift is None or rule.name != 'confidence':
    return None
  if rule.tau != drift['threshold']:
    return None
  return DriftCheck(Calibration.from_dict(drift))


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


def read_calibration(directory: str) -> dict[str, Any]:
  """What the evaluator 'calibration' found out, or nothing.

  Raises:
    ConfigError: the file is damaged.
  """
  path = pathlib.Path(directory) / CALIBRATION_FILE
  if not path.is_file():
    return {}
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ConfigError(str(path), str(error), 'the JSON of a calibration') from (
      error
    )


def rule_of(given: Mapping[str, Any], calibration: Mapping[str, Any]) -> Rule:
  """The exit rule that the options describe.

  Args:
    given: all of `OPTIONS`.
    calibration: see `read_calibration`.

  Raises:
    ConfigError: as `build`.
  """
  tau = given['tau']
  if tau == GUARANTEED:
    guarantee = calibration.get('guarantee')
    if guarantee is None or given['rule'] != 'confidence':
      raise ConfigError(
        'serve.tau',
        tau,
        'rule=confidence and a calibration.json with a guarantee: run '
        'launch.evaluate with evals.calibration.epsilon above 0',
      )
    tau = guarantee['threshold']
    if tau is None:  # nothing could be certified: nobody leaves early
      return Rule('never')
  try:
    return Rule(
      given['rule'],
      tau=float(tau),
      patience=given['patience'],
      tolerance=float(given['tolerance']),
      veto_margin=float(given['veto_margin']),
    )
  except ValueError as error:
    field, _, rest = str(error).partition(': expected ')
    raise ConfigError(
      f'serve.{field}', given.get(field), rest.rpartition(', got ')[0]
    ) from error


def _check_covered(given, thresholds, minimum_retention) -> None:
  """The guarantee is of the plain rule on the model as it was evaluated."""
  for name, value in (
    ('ensemble_margin', given['ensemble_margin']),
    ('thresholds', thresholds),
    ('minimum_retention', minimum_retention),
  ):
    if value:
      raise ConfigError(
        f'serve.{name}', value, f'nothing beside tau={GUARANTEED}, which was '
        'certified without it',
      )  # fmt: skip
