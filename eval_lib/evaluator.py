"""Evaluators: dataclasses whose fields are their configuration.

One is built for each entry of `config.evals`; its results are `<entry>/<name>`:

  config.evals = dict(test=dict(type='classification', every_steps=200))
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from annotated_types import Interval, MinLen
from jax.experimental import multihost_utils

from core import fields, files, registry
from core.errors import ConfigError
from core.fields import ConfigLike
from dataset_lib import builder, contract
from dataset_lib.source import DatasetInfo, Source
from eval_lib import metrics, predictions

EVALUATORS = {
  'calibration': 'eval_lib.calibration:Evaluator',
  'certificate': 'eval_lib.certificate:Evaluator',
  'classification': 'eval_lib.evaluator:Classification',
  'confusion': 'eval_lib.confusion:Evaluator',
  'fewshot': 'eval_lib.fewshot:Evaluator',
  'frontier': 'eval_lib.frontier:Evaluator',
  'glue': 'eval_lib.glue:Evaluator',
  'submission': 'eval_lib.submission:Evaluator',
  'submitted': 'eval_lib.submission:Submitted',
}

NO_CLASSES = 'False: the task has no class_accuracy'
Split = Annotated[str, MinLen(1), 'the name of a split']


@dataclasses.dataclass(frozen=True)
class EvalContext:
  """The parts of a run that evaluators need.

  The first three are jitted methods of the Task, of variables and a batch.
  """

  measure: Callable[[Any, Any], Mapping[str, Any]]  # metrics by name
  features: Callable[[Any, Any], Any]  # float `[B, D]`
  outputs: Callable[[Any, Any], Mapping[str, Any]]  # arrays `[B, ...]` by name
  put: Callable[[Mapping[str, Any]], Any]  # this process's rows on the devices
  seed: int
  batch_size: int  # rows of a global batch
  dataset: ConfigLike
  workdir: str  # '' to write no files
  info: DatasetInfo | None = None  # of the run; None skips the check
  train_split: str = ''  # '' skips the check
  layers: tuple[int, ...] = ()  # of the heads; () for one unnamed head
  # Changes of model fields that save more, and `outputs` with each.
  cheaper: tuple[tuple[Mapping[str, Any], Callable[..., Any]], ...] = ()
  other_rows: bool = False  # the run's own data may have other splits


@dataclasses.dataclass(kw_only=True)
class Evaluator:
  """Measures variables on data that training does not see.

  Subclasses are dataclasses that add their fields; those whose names end in
  'split' name splits of the data set, which `splits` has, opened, by field.
  `every_steps=0`: only at the end; below 1 a share of the run.
  """

  NEEDS_OUTPUTS: ClassVar[bool] = False  # that a task defines `outputs`
  METRICS: ClassVar[tuple[str, ...] | None] = None  # names that are fixed
  IS_FIRST: ClassVar[bool] = False  # others read the file that it writes
  ANY_CLASSES: ClassVar[bool] = False  # instead of the run's
  context: EvalContext
  dataset: Annotated[
    ConfigLike | None, "a data set configuration, or None for the run's own"
  ] = None
  every_steps: Annotated[float, Interval(ge=0, le=2**31 - 1)] = 0.0
  # Rows that `run` has left out, as they have no label.
  unlabelled: int = dataclasses.field(default=0, init=False)
  note: str = dataclasses.field(default='', init=False)  # of `run`, for people

  def __post_init__(self):
    self.splits = {
      name: self.open(split)
      for name, split in vars(self).items()
      if name.endswith('split') and split
    }

  @property
  def data(self) -> dict[str, Any]:
    """The configuration of the data set that is read."""
    data = self.dataset or self.context.dataset
    return dict(data) if isinstance(data, Mapping) else data.to_dict()

  def run(self, variables: Any) -> dict[str, float]:
    """Evaluates `{'params': ..., 'model_state': ...}`."""
    raise NotImplementedError

  def notes(self) -> list[str]:
    """Returns what people should know of the last `run`."""
    rows = [
      f'{len(data.source)} rows of {self.place(field)}'
      for field, data in self.splits.items()
    ]
    return [f'has read {", ".join(rows)}', *filter(None, [self.note])]

  def measure(self, variables: Any) -> dict[str, float]:
    """Returns `run`, and 'unlabelled': rows that it left out, if there are."""
    self.unlabelled, self.note = 0, ''
    results = self.run(variables)
    if self.unlabelled:
      results = results | {'unlabelled': float(self.unlabelled)}
    return results

  def metric_names(self, measured: Collection[str]) -> Collection[str] | None:
    """Returns the names of `run`, None if unknown; `measured`: of the Task."""
    return self.METRICS

  def file(self, name: str) -> pathlib.Path | None:
    """Returns a file in the workdir, None if this process writes none."""
    if not self.context.workdir or jax.process_index():
      return None
    path = pathlib.Path(self.context.workdir) / name
    files.check_no_link(path)
    return path

  @property
  def other(self) -> str:
    """The name of the file, or of the data set, if it is not the run's own."""
    place = builder.source_class(self.data['name']).PLACE
    name = pathlib.Path(self.data[place]).name if place else self.data['name']
    return name if self.dataset else ''

  def place(self, field: str = 'split') -> str:
    """Returns the split of a field, of other data with their name."""
    split = getattr(self, field)
    names = [name for name in (split, self.other) if name not in ('', 'all')]
    return ' of '.join(names)

  def open(self, split: str) -> builder.Dataset:
    """Opens a split for evaluation: this process's rows, in order.

    Raises ConfigError for inputs or, unless `ANY_CLASSES`, classes that the run
    does not have; classes in another order get the labels of the run.
    """
    opened = builder.build(
      self.data, split=split, train=False, seed=self.context.seed,
      batch_size=self.context.batch_size, host_index=jax.process_index(),
      host_count=jax.process_count(), is_checked=True,
    )  # fmt: skip
    if (run := self.context.info) is not None:
      contract.check_inputs(run, opened.info)
      if self.dataset is None and not self.context.other_rows:
        contract.check_splits(run, opened.info)
      if not self.ANY_CLASSES:
        opened.label_as(run)
    return opened

  def collect(
    self, field: str, variables: Any, outputs: Any, **options: Any
  ) -> dict[str, np.ndarray]:
    """Returns `predictions.collect` of a field's split; counts `unlabelled`."""
    data, put = self.splits[field], self.context.put
    rows = predictions.collect(data, variables, outputs, put, **options)
    self.unlabelled += len(data.source) - len(rows['label'])
    return rows

  def check_apart(self, field: str, others: Source, expected: str) -> None:
    """Raises ConfigError of a split's field if it has rows of `others`.

    Rows are known by their places; '{}' in `expected` is the number of shared.
    """
    few, many = sorted((self.splits[field].source, others), key=len)
    places = few.places()
    if shared := len(places.intersection(map(many.where, range(len(many))))):
      raise ConfigError(field, getattr(self, field), expected.format(shared))


@dataclasses.dataclass(kw_only=True)
class Classification(Evaluator):
  """Merges `context.measure` over a split.

  Padding and rows without a label have mask 0, so the result does not depend on
  the batch size or the number of devices, up to the order of float32 sums
  within a batch; batches merge in float64.
  """

  split: Split = 'test'
  # Also `accuracy_<class>` of each class, and their mean, `class_accuracy`.
  per_class: bool = False

  def __post_init__(self):
    super().__post_init__()
    kind = self.splits['split'].info.label_kind
    if self.per_class and kind not in ('', 'class'):
      raise ConfigError('per_class', True, NO_CLASSES)

  def run(self, variables: Any) -> dict[str, float]:
    """Returns metrics by the names that the task gives them."""
    collected, left_out = metrics.Collected(), np.zeros((), int)

    def measure(batch: builder.Batch) -> Any:
      left_out[...] += ((batch['index'] >= 0) & (batch['mask'] == 0)).sum()
      return self.context.measure(variables, self.context.put(batch))

    batches = self.splits['split'].batches()
    for state in predictions.one_late(map(measure, batches)):
      collected.add(jax.device_get(state))
    merged = collected.take()
    self.unlabelled = int(multihost_utils.process_allgather(left_out).sum())
    of_classes = merged.pop(metrics.CLASS_ACCURACY, None)
    values = metrics.compute(merged)
    if self.per_class and of_classes is not None:
      values[metrics.CLASS_ACCURACY] = of_classes.compute()
      values |= zip(self._class_names(), of_classes.means(), strict=True)
    return values

  def metric_names(self, measured: Collection[str]) -> Collection[str]:
    """See `Evaluator`."""
    if not self.per_class:
      return {*measured} - {metrics.CLASS_ACCURACY}
    if metrics.CLASS_ACCURACY not in measured:
      raise ConfigError('per_class', True, NO_CLASSES)
    return {*measured, *self._class_names()}

  def _class_names(self) -> list[str]:
    info = self.splits['split'].info
    names = info.class_names or range(info.num_classes)
    return [f'accuracy_{name}' for name in names]


def build(name: str, config: ConfigLike, context: EvalContext) -> Evaluator:
  """Builds an entry that `validate` accepts; raises if the data do not fit."""
  field, settings = f'evals.{name}', dict(config.items())
  kind = locate(settings.pop('type'), f'{field}.type')
  with fields.errors_under(field):
    return kind(context=context, **settings)


def validate(config: ConfigLike) -> dict[str, Any]:
  """Returns the `evals` of a run whose `dataset` is complete; reads no data."""
  settings = dict(config.items())
  return {
    name: _complete(f'evals.{name}', entry, settings.get('dataset', {}))
    for name, entry in settings.get('evals', {}).items()
  }


def _complete(prefix: str, entry: Any, run_dataset: Any) -> dict[str, Any]:
  if not isinstance(entry, ConfigLike):
    raise ConfigError(prefix, entry, "a dict such as dict(type='...')")
  settings = dict(entry.items())
  name = settings.pop('type', None)
  kind = locate(name, f'{prefix}.type')
  complete = fields.check(kind, settings, prefix, without=('context',))
  if complete['dataset'] is not None:
    with fields.errors_under(prefix):
      prepared = builder.prepared_alike(complete['dataset'], run_dataset)
      complete['dataset'] = run_dataset = builder.validate(prepared)
  for field, split in complete.items():
    if field.endswith('split') and split is not None:
      builder.check_split(run_dataset, split, f'{prefix}.{field}')
  return {'type': str(name), **complete}


def locate(kind: Any, field: str) -> type[Evaluator]:
  """Finds an evaluator class by its name in `EVALUATORS` or 'module:Class'."""
  names = f'one of {", ".join(EVALUATORS)}'
  expected = f"{names} or 'package.module:Name' of a subclass of {Evaluator}"
  name = EVALUATORS.get(str(kind), kind)
  evaluator: type[Evaluator] = registry.locate(name, field, Evaluator, expected)
  return evaluator
