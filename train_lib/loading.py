"""A finished or running run, read back from its directory."""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections

from dataset_lib import builder
from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.source import DatasetInfo
from serve_lib.chain import Loaded, ServedRun
from train_lib import sharding, strict_json
from train_lib.checkpoint import (
  RestoredParams,
  checkpoint_extra,
  restore_params,
)
from train_lib.checkpoint_io import steps_in
from train_lib.run_directory import CHECKPOINTS, DATASET_INFO, TOKENIZER
from train_lib.setup import build_task
from train_lib.task import Task


def load_config(
  workdir: str | os.PathLike[str], key: str = '--workdir'
) -> ml_collections.ConfigDict:
  """The resolved configuration that a run left in its directory.

  Args:
    workdir: directory of the run.
    key: the flag or field that names the directory, for the error.

  Raises:
    ConfigError: if there is none.
    InvalidDataError: it is damaged.
  """
  path = pathlib.Path(workdir) / 'config.json'
  if not path.is_file():
    raise ConfigError(
      key, str(workdir), 'the directory of a run, with a config.json'
    )
  try:
    config = _with_tuples(strict_json.loads(path.read_text()))
    return ml_collections.ConfigDict(dict(**config))
  except (ValueError, TypeError) as error:
    raise InvalidDataError(f'{path} is damaged ({error})') from error


def load_own_config(
  workdir: str | os.PathLike[str], key: str = '--workdir'
) -> ml_collections.ConfigDict:
  """The configuration of a run that needs nothing but its own directory.

  What a finished run started from may be gone, or on another machine: its
  teacher, its warm start, the directory of its tokenizer. See `load_config`.
  """
  config = load_config(workdir, key)
  config.warm_start.workdir = ''
  if 'teacher' in config.loss:
    config.loss.teacher = ''
  own = pathlib.Path(workdir) / TOKENIZER
  if 'tokenizer' in config.dataset and own.is_file():
    config.dataset.tokenizer = str(own)
  return config


def _with_tuples(value: Any) -> Any:
  # JSON has no tuples, and a ConfigDict takes a field's type from its value.
  if isinstance(value, dict):
    return {key: _with_tuples(item) for key, item in value.items()}
  if isinstance(value, list):
    return tuple(_with_tuples(item) for item in value)
  return value


def load_task(
  workdir: str | os.PathLike[str],
  config: ml_collections.ConfigDict,
  step: int | str | None = None,
) -> Task:
  """The run's task as it was at a checkpoint; see `load_params` for `step`.

  What the data set is (input shape, classes) the run has written down; only
  for a run that has not is it read from the data itself.
  """
  info = load_info(workdir)
  if info is None:
    info = builder.build_source(config.dataset, config.train_split).info
  stage = config.stages[checkpoint_extra(workdir, step)['stage']]
  return build_task(config, info, dict(stage.get('model', {})))


def load_info(workdir: str | os.PathLike[str]) -> DatasetInfo | None:
  """What the training data of a run was; None if the run did not write it.

  Raises:
    InvalidDataError: the file is damaged.
  """
  path = pathlib.Path(workdir) / DATASET_INFO
  if not path.is_file():
    return None
  try:
    return DatasetInfo(**_with_tuples(strict_json.loads(path.read_text())))
  except (ValueError, TypeError) as error:
    raise InvalidDataError(
      f'{path} is damaged ({error}); remove it, and the data set itself is '
      'read instead'
    ) from error


def checkpoint_steps(workdir: str | os.PathLike[str]) -> list[int]:
  """The steps that have a complete checkpoint, in order."""
  return steps_in(pathlib.Path(workdir) / CHECKPOINTS)


def load_params(
  workdir: str | os.PathLike[str],
  task: Task,
  mesh: jax.sharding.Mesh,
  step: int | str | None = None,
) -> RestoredParams:
  """Parameters of a checkpoint (their average if the run kept one).

  Args:
    workdir: directory of the run.
    task: the run's task.
    mesh: devices to put the parameters on.
    step: a step, 'best', or None for the newest good one.

  Raises:
    CheckpointError: if there is no such good checkpoint.
  """
  boxed, _ = jax.eval_shape(task.init, jax.random.key(0))
  abstract = sharding.abstract(boxed, mesh)
  return restore_params(workdir, step, abstract_params=abstract)


def load_params_on_one_device(
  workdir: str | os.PathLike[str], task: Task, step: int | str | None = None
) -> RestoredParams:
  """Parameters for one device, the first, and no mesh; see `load_params`."""
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    loaded = load_params(workdir, task, mesh, step)
  variables = jax.device_put(loaded.variables, jax.devices()[0])
  return loaded._replace(**variables)


def serve(
  workdir: str | os.PathLike[str],
  *,
  step: int | str | None = None,
  lengths: Sequence[int] | None = None,
  options: Mapping[str, Any] | None = None,
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
) -> Loaded:
  """Reads a run for serving: `with Engine(*serve('/tmp/run')) as engine:`.

  Args:
    workdir: directory of the run.
    step: a step, 'best', or None for the newest good one.
    lengths: length buckets: tokens of texts, cut off at the longest, or tape
      tokens of AdaTape; None for those of the training data or the model.
    options: of the model's family, as {'tau': 0.8}; see `eat.policy.Options`
      and `albert_act.serving.Options`.
    on_drift: called when drift begins or ends; see
      `serve_lib.drift.DriftCheck`.

  Raises:
    ConfigError: the directory has no run, or one that is not served, or an
      argument is illegal or does not fit the run.
    CheckpointError: there is no such good checkpoint.
  """
  directory = os.fspath(workdir)
  config = load_own_config(directory, 'workdir')
  task = load_task(directory, config, step)
  loaded = load_params_on_one_device(directory, task, step)
  run = ServedRun(
    directory,
    loaded.step,
    None if lengths is None else tuple(lengths),
    on_drift,
  )
  policy: Any
  chain, policy = task.serve(loaded.variables, options or {}, run)
  return Loaded(chain, policy, policy.lengths)
