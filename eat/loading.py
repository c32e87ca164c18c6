"""From the directory of a run to what the engine takes.

from eat.loading import load
from serve_lib.engine import Engine

with Engine(*load('/tmp/sst2_eat')) as engine:
  answers = engine.predict(['a gripping, funny film', 'tedious'])
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataset_lib.errors import ConfigError
from dataset_lib.source import DatasetInfo
from eat import service
from serve_lib.chain import Loaded
from train_lib import loading


def load(
  workdir: str | os.PathLike[str],
  *,
  step: int | str | None = None,
  lengths: Sequence[int] | None = None,
  options: Mapping[str, Any] | None = None,
  thresholds: Mapping[str, float] | None = None,
  minimum_retention: Mapping[str, float] | None = None,
  on_drift: Callable[[bool, dict[str, Any]], None] | None = None,
) -> Loaded:
  """A run that is ready to be served: `Engine(*load(workdir))`.

  A wrong argument is answered before the model is read.

  Args:
    workdir: directory of the run.
    step: a step, 'best', or None for the newest good one.
    lengths: length buckets in tokens, the longest of which is where texts are
      cut off; None for those of the training data.
    options: how rows leave, as {'rule': 'margin', 'tau': 0.8}; see
      `eat.service.OPTIONS`.
    thresholds: of the rule, by source.
    minimum_retention: share of the tokens to keep, by source.
    on_drift: called when drift begins or ends; see
      `serve_lib.drift.DriftCheck`.

  Raises:
    ConfigError: the directory is not that of a run of a BERT, or an argument
      is illegal or does not fit the run; see `eat.service.build`.
    CheckpointError: there is no such good checkpoint.
  """
  directory = os.fspath(workdir)
  options, thresholds = options or {}, thresholds or {}
  minimum_retention = minimum_retention or {}
  config = loading.load_own_config(directory, 'workdir')
  info = loading.load_info(directory)
  if info is not None:  # a run of an older version has not written it down
    lengths_of(info, lengths, options)
  service.settings_of(
    directory,
    options,
    thresholds,
    minimum_retention,
    None if info is None else len(info.class_names),
  )
  task = loading.load_task(directory, config, step)
  buckets = lengths_of(task.info, lengths, options)
  service.as_adaptive(task.model)  # refuses another model
  loaded = loading.load_params_on_one_device(directory, task, step)
  chain, policy = service.build(
    task,
    loaded.variables,
    directory,
    options,
    thresholds,
    minimum_retention,
    step=loaded.step,
    on_drift=on_drift,
    max_length=buckets[-1],
  )
  return Loaded(chain, policy, buckets)


def lengths_of(
  info: DatasetInfo,
  lengths: Sequence[int] | None,
  options: Mapping[str, Any],
) -> tuple[int, ...]:
  """The length buckets of a service, see `train_lib.loading.served_lengths`.

  Raises:
    ConfigError: also if the longest cuts off what a guarantee was given for.
  """
  buckets, longest = loading.served_lengths(info, lengths), info.input_shape[0]
  if options.get('tau') == service.GUARANTEED and buckets[-1] < longest:
    raise ConfigError(
      'lengths',
      buckets,
      f'{longest} among them with tau={service.GUARANTEED}, which was '
      'certified for rows that are not cut off before',
    )
  return buckets
