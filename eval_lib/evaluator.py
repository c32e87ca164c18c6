"""The evaluator contract, and the evaluators that a configuration names.

An evaluator is a dataclass whose fields are its configuration, built once per
run and run every `every_steps` steps. The trainer runs those of `config.evals`
and logs their results as `<entry>/<name>`:

  config.evals = dict(
      test=dict(type='classification', split='test', every_steps=200),
      fewshot=dict(type='fewshot', shots=(1, 5, 10, 25)),
  )
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import jax
import numpy as np
from annotated_types import Interval, MinLen

from dataset_lib import builder, fields
from dataset_lib.errors import ConfigError
from dataset_lib.fields import ConfigLike
from eval_lib import metrics

EVALUATORS = {
  'calibration': 'eval_lib.calibration:Evaluator',
  'classification': 'eval_lib.evaluator:Classification',
  'fewshot': 'eval_lib.fewshot:Evaluator',
  'frontier': 'eval_lib.frontier:Evaluator',
  'glue': 'eval_lib.glue:Evaluator',
}

MAX_STEPS = 2**31 - 1

Split = Annotated[str, MinLen(1), 'the name of a split']
DatasetConfig = Annotated[
  Mapping[str, Any] | None,
  "a data set configuration, or None for the run's own",
]


@dataclasses.dataclass(frozen=True)
class EvalContext:
  """The parts of a run that evaluators need.

  Attributes:
    measure: jitted `(variables, device batch) -> {name: Metric}`.
    features: jitted `(variables, device batch) -> float [B, D]`.
    outputs: jitted `(variables, device batch) -> {name: array [B, ...]}`, see
      `Task.outputs`.
    put: `host batch -> device batch`; takes this process's rows.
    seed: of the run.
    batch_size: rows of a global batch.
    dataset: the run's data set configuration.
    workdir: where a run writes its files.
    num_classes: of the model; None is not checked.
    train_split: what the run is trained on; '' is not checked.
    layers: the layer of each head in `outputs`; () for one head without name.
  """

  measure: Callable[[Any, Any], Mapping[str, Any]]
  features: Callable[[Any, Any], Any]
  outputs: Callable[[Any, Any], Mapping[str, Any]]
  put: Callable[[Mapping[str, Any]], Any]
  seed: int
  batch_size: int
  dataset: ConfigLike
  workdir: str
  num_classes: int | None = None
  train_split: str = ''
  layers: tuple[int, ...] = ()


@dataclasses.dataclass(kw_only=True)
class Evaluator:
  """Measures variables on data that training does not see.

  Subclasses are dataclasses that add their fields; those named `...split` are
  splits of `dataset`. `__post_init__` opens the data.

  Attributes:
    context: of the run, not part of the configuration.
    dataset: None in a configuration for that of the run.
    every_steps: training steps between two runs; 0 for one at the end.
  """

  context: EvalContext
  dataset: DatasetConfig = None
  every_steps: Annotated[int, Interval(ge=0, le=MAX_STEPS)] = 0

  def run(self, variables: Any) -> dict[str, float]:
    """Evaluates `{'params': ..., 'model_state': ...}`."""
    raise NotImplementedError

  def open(self, split: str) -> builder.Dataset:
    """Opens a split for evaluation: this process's rows, in order."""
    return builder.build(
      self.dataset or self.context.dataset,
      split=split,
      train=False,
      seed=self.context.seed,
      batch_size=self.context.batch_size,
      host_index=jax.process_index(),
      host_count=jax.process_count(),
    )


@dataclasses.dataclass(kw_only=True)
class Classification(Evaluator):
  """Merges `context.measure` over a split.

  Padding has mask 0 and never counts, so the result does not depend on the
  batch size or the number of devices (up to the order of float32 sums within
  a batch; batches merge in float64).

  Attributes:
    split: to evaluate.
  """

  split: Split = 'test'

  def __post_init__(self):
    self._data = self.open(self.split)
    classes, expected = self._data.info.num_classes, self.context.num_classes
    if expected not in (None, classes):
      raise ConfigError(
        'dataset',
        f'{classes} classes in split {self.split!r}',
        f'the {expected} classes of the model; few-shot evaluation takes any',
      )

  def run(self, variables: Any) -> dict[str, float]:
    """Returns metrics by the names that the task gives them."""
    merged = None
    for state in one_late(
      self.context.measure(variables, self.context.put(batch))
      for batch in self._data.batches()
    ):
      merged = metrics.merge_on_host(merged, state)
    return metrics.compute(merged or {})


def build(name: str, config: ConfigLike, context: EvalContext) -> Evaluator:
  """Builds one entry of `config.evals`.

  Args:
    name: the entry's name.
    config: its fields, at least `type`.
    context: of the run.

  Raises:
    ConfigError: a field is unknown or illegal, or the data does not fit.
  """
  evaluator, complete = _complete(name, config, context.dataset)
  try:
    return evaluator(context=context, **complete)
  except ConfigError as error:
    own = dict(config.items()).get('dataset') is not None
    if not own or error.field.partition('.')[0] != 'dataset':
      raise
    field = f'evals.{name}.{error.field}'
    raise ConfigError(field, error.given, error.expected) from error


def validate(config: ConfigLike) -> None:
  """Checks `config.evals` without reading data or touching a device.

  Args:
    config: the whole run's configuration: its `evals` and `dataset` are read.

  Raises:
    ConfigError: with a message such as
      `evals.fewshot.shots: expected ..., got ...`.
  """
  given = dict(config.items())
  for name, entry in given.get('evals', {}).items():
    _complete(name, entry, given.get('dataset', {}))


def _complete(
  name: str, config: Any, dataset: ConfigLike
) -> tuple[Any, dict[str, Any]]:
  """Returns (the class, its fields with defaults); checks both."""
  prefix = f'evals.{name}'
  if not isinstance(config, ConfigLike):
    raise ConfigError(prefix, config, "a dict such as dict(type='...')")
  given = dict(config.items())
  evaluator = locate(given.pop('type', None), f'{prefix}.type')
  complete = fields.check(evaluator, given, prefix, without=('context',))
  own = complete['dataset'] is not None
  complete['dataset'] = dict((complete['dataset'] or dataset).items())
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
      name = error.field
      if name == 'split':
        name = f'{prefix}.{field}'
      elif own:
        name = f'{prefix}.{name}'
      raise ConfigError(name, error.given, error.expected) from error


def _check_input_size(
  config: ConfigLike, dataset: ConfigLike, prefix: str
) -> None:
  """Checks that inputs have the size that the model was built for."""
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


def locate(kind: Any, field: str) -> type[Evaluator]:
  """Finds an evaluator class by type name or as `'module:Class'`.

  Args:
    kind: a name in `EVALUATORS` or the place of the class.
    field: the configuration field, for the error.

  Raises:
    ConfigError: if there is no such evaluator.
  """
  known = f'one of {", ".join(EVALUATORS)}'
  place = EVALUATORS.get(kind, kind) if isinstance(kind, str) else kind
  try:
    evaluator = fields.locate(place, field)
  except ConfigError as error:
    raise ConfigError(field, kind, f'{known} or {error.expected}') from error
  if not (isinstance(evaluator, type) and issubclass(evaluator, Evaluator)):
    raise ConfigError(field, kind, f'{known} or a subclass of {Evaluator}')
  return evaluator


def one_late(results: Iterator[Any]) -> Iterator[Any]:
  """Yields each item after the next one was started.

  Fetching a result then never leaves the device idle, and the host is never
  more than one batch ahead, which would fill the device's memory.
  """
  previous = None
  for result in results:
    if previous is not None:
      yield previous
    previous = result
  if previous is not None:
    yield previous


def gather(tree: Any) -> Any:
  """Fetches arrays that are spread over devices and processes."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  from jax.experimental import multihost_utils

  return jax.tree.map(
    lambda leaf: np.asarray(
      multihost_utils.process_allgather(leaf, tiled=True)
    ),
    tree,
  )
