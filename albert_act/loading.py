"""From the directory of a run of ALBERT to what the engine takes.

from albert_act.loading import load
from serve_lib.engine import Engine

with Engine(*load('/tmp/albert_sst2')) as engine:
  answers = engine.predict(['a gripping, funny film', 'tedious'])
"""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from albert_act.model import AlbertClassifier
from albert_act.policy import AlbertPolicy
from albert_act.serving import AlbertChain
from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from dataset_lib.fields import check_fields, integer
from dataset_lib.glue_tasks import num_texts
from serve_lib.chain import Loaded
from serve_lib.monitor import Monitor
from train_lib import loading
from train_lib.classification import as_config_error
from train_lib.run_directory import TOKENIZER
from train_lib.task import Task

OPTIONS = {
  'iterations': integer(1, 1000, default=12),
  'max_characters': integer(1, 2**31 - 1, default=100_000),
}


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

  Args:
    workdir: directory of the run.
    step: a step, 'best', or None for the newest good one.
    lengths: length buckets in tokens, the longest of which is where texts are
      cut off; None for those of the training data.
    options: see `OPTIONS`; `iterations` is how many there are between two
      looks at which rows are done.
    thresholds: none; which token halts is part of the model.
    minimum_retention: none, as every token is kept.
    on_drift: never called: no row leaves that has not been computed.

  Raises:
    ConfigError: the directory is not that of a run of an ALBERT that halts, or
      an argument is illegal.
    CheckpointError: there is no such good checkpoint.
  """
  del on_drift
  directory = os.fspath(workdir)
  given = check_fields(options or {}, OPTIONS, 'serve')
  for name, value in (
    ('thresholds', thresholds), ('minimum_retention', minimum_retention)
  ):  # fmt: skip
    if value:
      raise ConfigError(name, dict(value), 'none for an ALBERT that halts')
  config = loading.load_own_config(directory, 'workdir')
  task = loading.load_task(directory, config, step)
  _check_kind(task)
  buckets = loading.served_lengths(task.info, lengths)
  words = tokenizer.load(pathlib.Path(directory) / TOKENIZER)

  def chain_of(params: Mapping[str, Any]) -> AlbertChain:
    return AlbertChain(
      task.model, {'params': params}, words.pad_id, given['iterations']
    )

  try:  # without parameters yet, as a refusal need not wait for them
    chain_of({})
  except ValueError as error:
    raise as_config_error(error, 'model', task.config['model']) from error
  loaded = loading.load_params_on_one_device(directory, task, step)
  chain = chain_of(loaded.variables['params'])
  policy = AlbertPolicy(
    chain,
    words,
    task.info.class_names,
    buckets[-1],
    Monitor(),
    given['max_characters'],
    num_texts(task.config['dataset']),
  )
  return Loaded(chain, policy, buckets)


def _check_kind(task: Task) -> None:
  if not isinstance(task.model, AlbertClassifier):
    raise ConfigError(
      'model.name',
      task.config['model']['name'],
      "'albert_act.model:AlbertClassifier' or a subclass",
    )
