"""Fields of a run with their defaults and legal ranges.

A configuration file sets what its experiment is about; everything else has its
default here. Fields of data sets, models, losses and evaluators are declared
where they are used. Nothing here imports jax.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval, MinLen, Predicate

from dataset_lib import fields

MAX_STEPS = 2**31 - 1

Steps = Annotated[int, Interval(ge=0, le=MAX_STEPS)]
Directory = Annotated[str, "a run directory, or ''"]
AxisSize = Annotated[
  int,
  Predicate(lambda size: size == -1 or 1 <= size <= 2**20),
  'a size >= 1, or -1 for the rest',
]


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices along each axis; one axis may be -1 and takes the rest."""

  data: AxisSize = -1
  fsdp: AxisSize = 1
  tensor: AxisSize = 1


@dataclasses.dataclass(frozen=True)
class Loader:
  """Reading threads (-1: one for each core) and batches read ahead."""

  num_threads: Annotated[int, Interval(ge=-1, le=1024)] = -1
  prefetch: Annotated[int, Interval(ge=1, le=1024)] = 4


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """Method and learning rate; see `train_lib.optimizers`.

  Attributes:
    name: of the method.
    lr: highest learning rate.
    schedule: of the learning rate after the warm-up.
    warmup_steps: linear warm-up, a share of all steps if below 1.
    end_lr: learning rate at the end of 'cosine' and 'linear'.
    weight_decay: decoupled; of matrices only.
    clip_norm: largest norm of the gradient, 0 for no limit.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
  """

  name: Literal['adamw', 'adam', 'sgd', 'lamb', 'adafactor'] = 'adamw'
  lr: Annotated[float, Interval(ge=1e-12, le=1e3)] = 1e-3
  schedule: Literal['cosine', 'linear', 'rsqrt', 'constant'] = 'cosine'
  warmup_steps: Annotated[float, Interval(ge=0.0, le=float(MAX_STEPS))] = 100.0
  end_lr: Annotated[float, Interval(ge=0.0, le=1e3)] = 0.0
  weight_decay: Annotated[float, Interval(ge=0.0, le=10.0)] = 0.0
  clip_norm: Annotated[float, Interval(ge=0.0, le=1e6)] = 1.0
  b1: Annotated[float, Interval(ge=0.0, le=0.999999)] = 0.9
  b2: Annotated[float, Interval(ge=0.0, le=0.999999)] = 0.999
  eps: Annotated[float, Interval(ge=1e-20, le=1.0)] = 1e-8


@dataclasses.dataclass(frozen=True)
class Stage:
  """A part of the run; see `train_lib.stages`.

  Attributes:
    steps: length in steps; or else
    epochs: length in passes over the training data.
    trainable: regular expression of the names of the parameters that train.
    knobs: schedules of loss weights and the like.
    model: fields of the model that differ in this stage.
  """

  steps: Steps = 0
  epochs: Annotated[float, Interval(ge=0.0, le=1e6)] = 0.0
  trainable: Annotated[
    str, MinLen(1), 'a regular expression of parameter paths'
  ] = '.*'
  knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
  model: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """When to save, how many to keep, and which metric is the best one's."""

  every_steps: Steps = 1000
  keep: Annotated[int, Interval(ge=1, le=1000)] = 2
  best_metric: Annotated[str, "a metric such as 'test/accuracy', or ''"] = ''
  best_mode: Literal['max', 'min'] = 'max'


@dataclasses.dataclass(frozen=True)
class WarmStart:
  """Parameters from another run; see `train_lib.warm_start`."""

  workdir: Directory = ''
  renames: tuple[str, ...] = ()
  skip: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Profile:
  """A trace of some steps for TensorBoard; 0 steps for none."""

  start_step: Steps = 10
  steps: Annotated[int, Interval(ge=0, le=10_000)] = 0


@dataclasses.dataclass(frozen=True)
class Run:
  """All fields of a configuration.

  Attributes:
    seed: of parameters, order and noise.
    task: objective, 'package.module:Class'.
    dtype: of the computation; parameters are always float32.
    batch_size: rows of the global batch.
    num_micro: micro-batches a step (gradient accumulation).
    ema_decay: of the average of the parameters, 0 for no average.
    max_nonfinite_steps: skipped in a row before the run stops.
    log_every: steps between two rows of metrics.
    tensorboard: write TensorBoard files.
    train_split: split of the data set to train on.
    mesh: sizes of the device mesh.
    model: fields of the model, its class in `name`.
    loss: fields of the loss; see the task.
    dataset: fields of the data set, its kind in `name`.
    loader: how the data set is read.
    optimizer: method and learning rate.
    stages: by name, run in the order of the names.
    evals: evaluators by name.
    checkpoint: when to save.
    warm_start: initial parameters.
    profile: steps to trace.
  """

  seed: Annotated[int, Interval(ge=0, le=2**31 - 1)] = 0
  task: Annotated[str, MinLen(1), "'package.module:Class' of a Task"] = (
    'train_lib.classification:Classification'
  )
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  batch_size: Annotated[int, Interval(ge=1, le=2**24)] = 128
  num_micro: Annotated[int, Interval(ge=1, le=2**16)] = 1
  ema_decay: Annotated[float, Interval(ge=0.0, le=0.999999)] = 0.0
  max_nonfinite_steps: Annotated[int, Interval(ge=0, le=10_000)] = 0
  log_every: Annotated[int, Interval(ge=1, le=MAX_STEPS)] = 50
  tensorboard: bool = True
  train_split: Annotated[
    str, MinLen(1), "the name of a split, e.g. 'train'"
  ] = 'train'
  mesh: Mesh = dataclasses.field(default_factory=Mesh)
  model: dict[str, Any] = dataclasses.field(default_factory=dict)
  loss: dict[str, Any] = dataclasses.field(default_factory=dict)
  dataset: dict[str, Any] = dataclasses.field(default_factory=dict)
  loader: Loader = dataclasses.field(default_factory=Loader)
  optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
  stages: dict[str, Stage] = dataclasses.field(default_factory=dict)
  evals: dict[str, Any] = dataclasses.field(default_factory=dict)
  checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
  warm_start: WarmStart = dataclasses.field(default_factory=WarmStart)
  profile: Profile = dataclasses.field(default_factory=Profile)


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a run, completed with their defaults.

  Raises:
    ConfigError: a field is unknown or has an illegal value. Groups have the
      path 'optimizer.lr', fields of no group 'config.seed'.
  """
  groups = {
    name: fields.check_value(name, config[name], hint)
    for name, hint in typing.get_type_hints(Run).items()
    if name in config and (name == 'stages' or dataclasses.is_dataclass(hint))
  }
  flat = {k: v for k, v in config.items() if k not in groups}
  return fields.check(Run, flat, 'config') | groups
