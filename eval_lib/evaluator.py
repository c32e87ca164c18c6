"""The evaluator contract, and how a configuration names evaluators.

An evaluator is a class with a table `FIELDS` of its legal configuration
fields, built once per run and run every so many steps. The trainer runs those
of `config.evals` and logs their results as `<entry>/<name>`:

  config.evals = dict(
      test=dict(type='classification', split='test', every_steps=200),
      fewshot=dict(type='fewshot', shots=(1, 5, 10, 25), every_steps=0),
  )

`every_steps=0` means once, at the end of training.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np

from dataset_lib import builder
from dataset_lib.errors import ConfigError
from dataset_lib.fields import (
  ConfigLike,
  Field,
  check_fields,
  integer,
)
from dataset_lib.fields import locate as find

EVALUATORS = {
  'calibration': 'eval_lib.calibration_evaluator:Evaluator',
  'classification': 'eval_lib.classification:Evaluator',
  'fewshot': 'eval_lib.fewshot:Evaluator',
  'frontier': 'eval_lib.frontier_evaluator:Evaluator',
  'glue': 'eval_lib.glue_metrics:Evaluator',
}

MAX_STEPS = 2**31 - 1

# The field for an evaluator that can read another data set than the run's.
DATASET = Field(
  "a data set configuration, or None for the run's own",
  lambda value: value is None or isinstance(value, ConfigLike),
  None,
)


@dataclasses.dataclass(frozen=True)
class EvalContext:
  """What evaluators need of a run.

  Attributes:
    measure: jitted `(variables, device batch) -> {name: Metric}`.
    features: jitted `(variables, device batch) -> float [B, D]`.
    put: `host batch -> device batch`; takes this process's rows.
    seed: of the run.
    batch_size: rows of a global batch.
    dataset: the run's data set configuration.
    workdir: where a run writes its files.
    num_classes: of the model; None is not checked.
    train_split: what the run is trained on; '' is not checked.
    outputs: jitted `(variables, device batch) -> {name: array [B, ...]}`, see
      `Task.outputs`.
    layers: the layer of each head in `outputs`; () for one head without name.
  """

  measure: Callable[[Any, Any], Mapping[str, Any]]
  features: Callable[[Any, Any], Any]
  put: Callable[[Mapping[str, Any]], Any]
  seed: int
  batch_size: int
  dataset: ConfigLike
  workdir: str
  num_classes: int | None = None
  train_split: str = ''
  outputs: Callable[[Any, Any], Mapping[str, Any]] | None = None
  layers: tuple[int, ...] = ()


@runtime_checkable
class Evaluator(Protocol):
  """Measures variables on data that training does not see."""

  # Legal fields besides `type` and `every_steps`, with their defaults.
  FIELDS: ClassVar[Mapping[str, Field]]

  def __init__(self, config: Mapping[str, Any], context: EvalContext):
    """Keeps what `run` needs; `config` is complete (see `build`)."""

  def run(self, variables: Any) -> dict[str, float]:
    """Evaluates `{'params': ..., 'model_state': ...}`."""


def build(
  name: str, config: ConfigLike, context: EvalContext
) -> tuple[Evaluator, int]:
  """Builds one entry of `config.evals`.

  Args:
    name: the entry's name.
    config: its fields, at least `type`.
    context: of the run.

  Returns:
    (the evaluator, every how many steps it runs; 0 for only at the end).

  Raises:
    ConfigError: a field is unknown or illegal, or the data does not fit.
  """
  evaluator, complete = _complete(name, config, context.dataset)
  every_steps = complete.pop('every_steps')
  try:
    return evaluator(complete, context), every_steps
  except ConfigError as error:
    own = dict(config.items()).get('dataset') is not None
    if not own or error.field.partition('.')[0] != 'dataset':
      raise
    key = f'evals.{name}.{error.field}'
    raise ConfigError(key, error.given, error.expected) from error


def validate(config: ConfigLike) -> None:
  """Checks `config.evals` without reading data or touching a device.

  Args:
    config: the whole run's configuration: its `evals` and `dataset` are read.

  Raises:
    ConfigError: with a message such as
      `evals.fewshot.shots: expected ..., got ...`.
  """
  fields = dict(config.items())
  for name, entry in fields.get('evals', {}).items():
    _complete(name, entry, fields.get('dataset', {}))


def _complete(
  name: str, config: Any, dataset: ConfigLike
) -> tuple[Any, dict[str, Any]]:
  """Returns (the class, its fields with defaults); checks both."""
  prefix = f'evals.{name}'
  if not isinstance(config, ConfigLike):
    raise ConfigError(prefix, config, "a dict such as dict(type='...')")
  given = dict(config.items())
  evaluator = locate(given.pop('type', None), f'{prefix}.type')
  fields = {'every_steps': integer(0, MAX_STEPS, 0)} | dict(evaluator.FIELDS)
  complete = check_fields(given, fields, prefix)
  if 'dataset' in fields:
    own = complete['dataset'] is not None
    complete['dataset'] = complete['dataset'] if own else dataset
    splits = {k: v for k, v in complete.items() if k.endswith('split')}
    _check_dataset(complete['dataset'], splits, prefix, own)
    if own:
      _check_input_size(complete['dataset'], dataset, prefix)
  return evaluator, complete


def _check_dataset(
  config: ConfigLike, splits: Mapping[str, str], prefix: str, own: bool
) -> None:
  """Checks an evaluator's data set and splits; names them by their place."""
  for field, split in splits.items():
    try:
      builder.validate(config, split)
    except ConfigError as error:
      key = error.field
      if key == 'split':
        key = f'{prefix}.{field}'
      elif own:
        key = f'{prefix}.{key}'
      raise ConfigError(key, error.given, error.expected) from error


def _check_input_size(
  config: ConfigLike, dataset: ConfigLike, prefix: str
) -> None:
  """The model fixes the size of the inputs, for every data set."""
  given, runs = builder.validate(config), builder.validate(dataset)
  if ('image_size' in given) != ('image_size' in runs):
    expected = f'a data set with inputs like those of {runs["name"]}'
    raise ConfigError(f'{prefix}.dataset.name', given['name'], expected)
  for name in ('image_size', 'length'):
    if name in runs and name in given and given[name] != runs[name]:
      raise ConfigError(
        f'{prefix}.dataset.{name}',
        given[name],
        f"{runs[name]} as in dataset.{name}, the size of the model's input",
      )


def locate(kind: Any, key: str) -> Any:
  """Finds an evaluator class by type name or as `'module:Class'`.

  Args:
    kind: a name in `EVALUATORS` or where the class lives.
    key: the configuration key, for the error.

  Raises:
    ConfigError: if there is no such evaluator.
  """
  known = f'one of {", ".join(EVALUATORS)}'
  place = EVALUATORS.get(kind, kind) if isinstance(kind, str) else kind
  try:
    evaluator = find(place, key)
  except ConfigError as error:
    raise ConfigError(key, kind, f'{known} or {error.expected}') from error
  if not hasattr(evaluator, 'FIELDS'):
    raise ConfigError(key, kind, f'{known} or a class with a table FIELDS')
  return evaluator


def build_dataset(
  config: ConfigLike, split: str, context: EvalContext
) -> builder.Dataset:
  """One split with evaluation preprocessing: this process's rows, in order."""
  return builder.build(
    config,
    split=split,
    train=False,
    seed=context.seed,
    batch_size=context.batch_size,
    host_index=jax.process_index(),
    host_count=jax.process_count(),
  )


def on_devices(
  dataset: Any, context: EvalContext
) -> Iterator[Mapping[str, Any]]:
  """The batches of one pass, on the devices."""
  for batch in dataset.batches():
    yield context.put(batch)


def gather(tree: Any) -> Any:
  """Fetches arrays that are spread over devices, and over processes if many."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  from jax.experimental import multihost_utils

  return jax.tree.map(
    lambda leaf: np.asarray(
      multihost_utils.process_allgather(leaf, tiled=True)
    ),
    tree,
  )
