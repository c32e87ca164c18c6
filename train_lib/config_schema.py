"""The legal range of every field of a run, checked before any device is used.

Fields of the data set, of the evaluators and of the model are checked where
they are used: `dataset_lib.builder`, `eval_lib.evaluator`, the task.
"""

import os
import re
from collections.abc import Iterable
from typing import Any

from dataset_lib import builder
from dataset_lib.errors import ConfigError
from dataset_lib.fields import (
  Field,
  check_field,
  check_fields,
  integer,
  locate,
  real,
  text,
)
from eval_lib import evaluator
from train_lib import optimizers, sharding
from train_lib.stages import check_stage, with_model
from train_lib.task import Task

MAX_STEPS = 2**31 - 1


def choice(*allowed: str) -> Field:
  """One of the allowed names."""
  return Field(f'one of {", ".join(allowed)}', allowed.__contains__, allowed[0])


def _flag() -> Field:
  return Field('True or False', lambda value: isinstance(value, bool), False)


def _strings() -> Field:
  return Field(
    'a tuple of strings',
    lambda value: (
      isinstance(value, (tuple, list))
      and all(isinstance(item, str) for item in value)
    ),
    (),
  )


def _group() -> Field:
  return Field('a group of fields', lambda value: hasattr(value, 'items'), {})


FIELDS = {
  'seed': integer(0, 2**31 - 1),
  'task': text("'package.module:Class' of a Task"),
  'dtype': choice('float32', 'bfloat16'),
  'batch_size': integer(1, 2**24),
  'num_micro': integer(1, 2**16),
  'ema_decay': real(0.0, 0.999999),
  'max_nonfinite_steps': integer(0, 10_000),
  'log_every': integer(1, MAX_STEPS),
  'tensorboard': _flag(),
  'train_split': text("the name of a split, e.g. 'train'"),
} | dict.fromkeys(
  (
    'mesh', 'model', 'loss', 'dataset', 'loader', 'optimizer', 'stages',
    'evals', 'checkpoint', 'warm_start', 'profile',
  ),
  _group(),
)  # fmt: skip

GROUPS = {
  'mesh': dict.fromkeys(sharding.AXES, integer(-1, 2**20, default=1)),
  'loader': {'num_threads': integer(-1, 1024), 'prefetch': integer(1, 1024)},
  'optimizer': {
    'name': choice(*optimizers.OPTIMIZERS),
    'lr': real(1e-12, 1e3),
    'schedule': choice(*optimizers.SCHEDULES),
    'warmup_steps': real(0.0, float(MAX_STEPS)),
    'end_lr': real(0.0, 1e3),
    'weight_decay': real(0.0, 10.0),
    'clip_norm': real(0.0, 1e6),
    'b1': real(0.0, 0.999999),
    'b2': real(0.0, 0.999999),
    'eps': real(1e-20, 1.0),
  },
  'checkpoint': {
    'every_steps': integer(0, MAX_STEPS),
    'keep': integer(1, 1000),
    'best_mode': choice('max', 'min'),
    'best_metric': text("a metric such as 'test/accuracy', or ''", ''),
  },
  'warm_start': {
    'workdir': text("a run directory, or ''", ''),
    'renames': _strings(),
    'skip': _strings(),
  },
  'profile': {
    'start_step': integer(0, MAX_STEPS),
    'steps': integer(0, 10_000),
  },
}

STAGE = {
  'steps': integer(0, MAX_STEPS, default=0),
  'epochs': real(0.0, 1e6, default=0.0),
  'trainable': text('a regular expression of parameter paths', '.*'),
  'knobs': _group(),
  'model': _group(),
}


def resolve(config: Any) -> None:
  """Lets the task fill in, in place, what follows from files it names.

  A `task` that cannot be found is left to `validate`.

  Raises:
    ConfigError: if such a file cannot be used.
  """
  try:
    task = locate(config.task, 'task')
  except ConfigError:
    return
  if isinstance(task, type) and issubclass(task, Task):
    task.resolve(config)


def validate(config: Any) -> None:
  """Checks a whole configuration; reads no data and touches no device.

  Raises:
    ConfigError: naming the first illegal key, what is legal and what is given.
  """
  check_fields(config, FIELDS, 'config')
  for name, fields in GROUPS.items():
    check_fields(config[name], fields, name)
  if config.batch_size % config.num_micro:
    raise ConfigError(
      'num_micro', config.num_micro, f'a divisor of {config.batch_size} rows'
    )
  _check_mesh(config.mesh)
  builder.validate(config.dataset, config.train_split)
  evaluator.validate(config)
  _check_best_metric(config)
  task = locate(config.task, 'task')
  if not (isinstance(task, type) and issubclass(task, Task)):
    raise ConfigError('task', config.task, 'a subclass of train_lib.task.Task')
  task.validate(config)
  _check_stages(config, task)
  _check_warm_start(config.warm_start)


def _check_mesh(mesh: Any) -> None:
  for axis in sharding.AXES:
    if mesh[axis] == 0:
      raise ConfigError(f'mesh.{axis}', 0, 'a size >= 1, or -1 for the rest')
  if [mesh[axis] for axis in sharding.AXES].count(-1) > 1:
    raise ConfigError('mesh', dict(mesh), 'at most one size of -1')


def _check_stages(config: Any, task: type[Task]) -> None:
  if not config.stages:
    raise ConfigError('stages', {}, 'at least one stage')
  for name, entry in config.stages.items():
    key = f'stages.{name}'
    check_field(key, entry, _group())
    entry = check_fields(entry, STAGE, key)
    check_stage(key, entry)
    check_pattern(f'{key}.trainable', entry['trainable'])
    for knob in entry['knobs']:
      if knob not in task.KNOBS:
        expected = f'a knob of {config.task}: {_listed(task.KNOBS)}'
        raise ConfigError(f'{key}.knobs', knob, expected)
    try:
      task.validate(with_model(config, entry['model']))
    except ConfigError as error:
      where = f'{key}.{error.field}'
      raise ConfigError(where, error.given, error.expected) from error


def _check_warm_start(config: Any) -> None:
  if config.workdir and not os.path.isdir(config.workdir):
    expected = "the directory of another run, or ''"
    raise ConfigError('warm_start.workdir', config.workdir, expected)
  for rename in config.renames:
    old, arrow, _ = rename.partition('->')
    if not arrow:
      raise ConfigError('warm_start.renames', rename, "'old->new'")
    check_pattern('warm_start.renames', old)
  for pattern in config.skip:
    check_pattern('warm_start.skip', pattern)


def _check_best_metric(config: Any) -> None:
  name, best = config.checkpoint.best_metric.split('/')[0], config.evals
  if name and name not in best:
    raise ConfigError(
      'checkpoint.best_metric',
      config.checkpoint.best_metric,
      f"'<evaluation>/<metric>' of one of {_listed(best)}",
    )


def _listed(names: Iterable[str]) -> str:
  return ', '.join(sorted(names)) or 'there is none'


def check_pattern(key: str, pattern: str) -> None:
  """Raises `ConfigError` unless the pattern is a regular expression."""
  try:
    re.compile(pattern)
  except re.error as error:
    raise ConfigError(key, pattern, f'a regular expression: {error}') from error
