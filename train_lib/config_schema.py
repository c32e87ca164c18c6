"""Validates a configuration: read once, checked once, complete.

Legal ranges are declared where fields are: of a run in `train_lib.run_config`,
of data sets, evaluators, models and losses on their classes.
"""

import inspect
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections

from dataset_lib import builder, fields
from dataset_lib.errors import ConfigError
from eval_lib import evaluator
from train_lib import run_config
from train_lib.stages import check_stage
from train_lib.task import Task, with_model


def validate(config: Any) -> ml_collections.ConfigDict:
  """Returns the configuration with every field of the run, its data and model.

  Reads the configurations of checkpoints that are named, but no data, and
  touches no device.

  Args:
    config: a ConfigDict or mapping, which stays as it is.

  Raises:
    ConfigError: with the first illegal field, the legal and the given value.
  """
  given = config.to_dict() if hasattr(config, 'to_dict') else dict(config)
  run = run_config.complete(given)
  if run['batch_size'] % run['num_micro']:
    raise ConfigError(
      'num_micro', run['num_micro'], f'a divisor of {run["batch_size"]} rows'
    )
  if [*run['mesh'].values()].count(-1) > 1:
    raise ConfigError('mesh', run['mesh'], 'at most one size of -1')
  run['dataset'] = builder.validate(run['dataset'], run['train_split'])
  evaluator.validate(run)
  _check_best_metric(run)
  task = fields.locate(run['task'], 'task')
  if not _is_task(task):
    raise ConfigError('task', run['task'], 'a subclass of train_lib.task.Task')
  task.complete(run)
  _check_stages(run, task)
  _check_warm_start(run['warm_start'])
  return ml_collections.ConfigDict(run).lock()


def _is_task(task: Any) -> bool:
  is_class = inspect.isclass(task) and issubclass(task, Task)
  return is_class and not inspect.isabstract(task)


def _check_stages(run: Mapping[str, Any], task: type[Task]) -> None:
  if not run['stages']:
    raise ConfigError('stages', {}, 'at least one stage')
  for name, stage in run['stages'].items():
    place = f'stages.{name}'
    check_stage(place, stage)
    if stage['steps'] and stage['epochs']:
      expected = f'0 beside steps={stage["steps"]}; set one of them'
      raise ConfigError(f'{place}.epochs', stage['epochs'], expected)
    _check_pattern(f'{place}.trainable', stage['trainable'])
    for knob in stage['knobs']:
      if knob not in task.KNOBS:
        expected = f'a knob of {run["task"]}: {_listed(task.KNOBS)}'
        raise ConfigError(f'{place}.knobs', knob, expected)
    if stage['model']:
      with fields.errors_under(place):
        task.complete(with_model(run, stage['model']))


def _check_warm_start(warm_start: Mapping[str, Any]) -> None:
  workdir = warm_start['workdir']
  if workdir and not os.path.isdir(workdir):
    expected = "the directory of another run, or ''"
    raise ConfigError('warm_start.workdir', workdir, expected)
  for rename in warm_start['renames']:
    old, arrow, _ = rename.partition('->')
    if not arrow:
      raise ConfigError('warm_start.renames', rename, "'old->new'")
    _check_pattern('warm_start.renames', old)
  for pattern in warm_start['skip']:
    _check_pattern('warm_start.skip', pattern)


def _check_best_metric(run: Mapping[str, Any]) -> None:
  metric = run['checkpoint']['best_metric']
  if metric and metric.partition('/')[0] not in run['evals']:
    expected = f"'<evaluation>/<metric>' of one of {_listed(run['evals'])}"
    raise ConfigError('checkpoint.best_metric', metric, expected)


def _listed(names: Iterable[str]) -> str:
  return ', '.join(sorted(names)) or 'there is none'


def _check_pattern(field: str, pattern: str) -> None:
  try:
    re.compile(pattern)
  except re.error as error:
    expected = f'a regular expression: {error}'
    raise ConfigError(field, pattern, expected) from error
