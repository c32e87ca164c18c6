"""From a trained task to what the engine takes: a chain and a policy.

Temperatures, the guaranteed threshold and what drift is measured against come
from the run's `calibration.json`, which the evaluator 'calibration' writes;
the tokenizer from the run's `tokenizer.json`.
"""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from dataset_lib.fields import Field, check_fields, integer, real
from dataset_lib.glue_tasks import TASKS
from eat.exits import RULES, RULES_WITH_TAU, Rule
from eat.model import EatClassifier
from eat.policy import EatPolicy
from eat.serving import EatChain
from eat.settings import Settings, expected_in
from eval_lib.calibration import fingerprint
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
  step: int | None = None,
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
) -> tuple[EatChain, EatPolicy]:
  """Chain and policy of a run.

  `policy.warnings` says what could not be checked, and why.

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

  Raises:
    ConfigError: an option is illegal, or needs a calibration that is not
      there, or the calibration is that of another checkpoint.
  """
  settings = settings_of(directory, options, thresholds, minimum_retention)
  calibration = read_calibration(directory)
  check_parameters(calibration, variables, directory, step)
  chain = EatChain(as_adaptive(task.model), jax.device_put(dict(variables)))
  if not any(minimum_retention.values()):
    chain.variants = chain.variants[:1]  # no row asks for another
  words = tokenizer.load(pathlib.Path(directory) / TOKENIZER_FILE)
  chain.pad_id = words.pad_id
  policy = EatPolicy(
    chain,
    words,
    task.info.class_names,
    task.info.input_shape[0],
    settings,
    Monitor(monitor_window, drift_check(calibration, directory, on_drift)),
    num_texts(task.config['dataset']),
  )
  policy.warnings = _warnings(calibration, policy, chain, directory, step)
  return chain, policy


def settings_of(
  directory: str,
  options: Mapping[str, Any],
  thresholds: Mapping[str, float],
  minimum_retention: Mapping[str, float],
) -> Settings:
  """How rows are let out; needs neither parameters nor a device.

  Args:
    directory: of the run.
    options: see `OPTIONS`.
    thresholds: of the rule, by source.
    minimum_retention: by source.

  Raises:
    ConfigError: as `build`.
  """
  given = check_fields(options, OPTIONS, 'serve')
  calibration = read_calibration(directory)
  if given['tau'] == GUARANTEED:
    _check_covered(given, thresholds, minimum_retention)
  return Settings(
    rule=rule_of(given, calibration),
    temperatures=tuple(calibration.get('temperatures', ())),
    thresholds=thresholds,
    minimum_retention=minimum_retention,
    ensemble_margin=float(given['ensemble_margin']),
    max_characters=given['max_characters'],
  )


def drift_check(
  calibration: Mapping[str, Any],
  directory: str,
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
) -> DriftCheck | None:
  """A check against the calibration split, whatever the rule in use.

  Args:
    calibration: see `read_calibration`.
    directory: of the run.
    on_drift: see `serve_lib.drift.DriftCheck`.

  Returns:
    None if the calibration has nothing to compare with.

  Raises:
    ConfigError: the file is damaged.
  """
  drift = calibration.get('drift')
  if drift is None:
    return None
  try:
    return DriftCheck(Calibration.from_dict(drift), on_drift=on_drift)
  except (KeyError, TypeError, ValueError) as error:
    raise ConfigError(
      f'{_path(directory)}: drift', f'{type(error).__name__}: {error}',
      f'confidences and a threshold; {_mend(directory)}',
    ) from error  # fmt: skip


def num_texts(dataset: Mapping[str, Any]) -> int | None:
  """How many texts a row of the run's data has; None if that is not known.

  Args:
    dataset: the run's configuration of its data.
  """
  if dataset.get('name') != 'glue':
    return None
  return len(TASKS[dataset['task']].texts[0])


def check_parameters(
  calibration: Mapping[str, Any],
  variables: Mapping[str, Any],
  directory: str,
  step: int | None = None,
) -> None:
  """Refuses temperatures and certificates of another checkpoint.

  A calibration that does not say what it is of, as old ones, passes.

  Raises:
    ConfigError: with the command that makes the right one.
  """
  known = calibration.get('parameters')
  if known is None:
    return
  served = fingerprint(variables)
  if served != known:
    raise ConfigError(
      str(_path(directory)),
      f'that of the parameters {known}',
      'the calibration of the checkpoint that is served, whose parameters are '
      f'{served}; {_mend(directory, step, calibration)}',
    )


def _path(directory: str) -> pathlib.Path:
  return pathlib.Path(directory) / CALIBRATION_FILE


def _mend(
  directory: str,
  step: int | None = None,
  calibration: Mapping[str, Any] | None = None,
) -> str:
  """The command that writes a calibration, with a guarantee if it had one."""
  command = (
    f'run python -m launch.evaluate --workdir={directory} --evals=calibration'
  )
  if step is not None:
    command += f' --step={step}'
  guarantee = (calibration or {}).get('guarantee') or {}
  for name in ('epsilon', 'delta'):
    if name in guarantee:
      command += f' --config.evals.calibration.{name}={guarantee[name]}'
  return command


def _warnings(
  calibration: Mapping[str, Any],
  policy: EatPolicy,
  chain: EatChain,
  directory: str,
  step: int | None,
) -> tuple[str, ...]:
  result = []
  mend = _mend(directory, step, calibration)
  if calibration and 'parameters' not in calibration:
    result.append(
      f'{_path(directory)} does not say of which checkpoint it is: if not of '
      f'this one, temperatures and thresholds are wrong; {mend}'
    )
  if policy.monitor.drift is None:
    what = 'has no statistics for it' if calibration else 'is not there'
    result.append(
      'no drift check: a regression has no confidences'
      if not policy.class_names
      else f'no drift check: {_path(directory)} {what}; {mend}'
    )
  elif len(chain.variants) > 1:
    sources = ', '.join(sorted(policy.settings.minimum_retention))
    result.append(
      f'no drift check of rows that are served without pruning ({sources}): '
      'the calibration split was measured with it'
    )
  return tuple(result)


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
  path = _path(directory)
  if not path.is_file():
    return {}
  try:
    result = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(result, dict):
      raise ValueError(f'{type(result).__name__} at the top')
  except ValueError as error:
    raise ConfigError(
      str(path), str(error), f'the JSON of a calibration; {_mend(directory)}'
    ) from error
  return result


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
        'rule=confidence and a calibration.json with a guarantee: run python '
        '-m launch.evaluate --workdir=... --evals=calibration '
        '--config.evals.calibration.epsilon=0.02',
      )
    tau = guarantee['threshold']
    if tau is None:  # nothing could be certified: nobody leaves early
      return Rule('never')
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
