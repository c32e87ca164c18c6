"""The schema of a run: fields, defaults and legal ranges, validated once."""

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import ml_collections
from annotated_types import Interval, MinLen, Predicate

from core import fields, registry
from core.errors import ConfigError
from dataset_lib import builder
from eval_lib import evaluator
from model_lib.blocks import Options
from train_lib import classification
from train_lib.phases import Pattern, Phase, Steps, is_pattern
from train_lib.task import Task, with_model


def _is_rename(text: str) -> bool:
  old, arrow, _ = text.partition('->')
  return bool(old and arrow) and is_pattern(old)


def _is_scale(text: str) -> bool:
  match = re.fullmatch(r'(.+)->(\d+(\.\d*)?|\.\d+)', text)
  return match is not None and is_pattern(match[1])


def _is_source(path: str) -> bool:
  is_file = path.endswith(('.npz', '.safetensors')) and os.path.isfile(path)
  return not path or is_file or os.path.isdir(path)


AxisSize = Annotated[
  int,
  Predicate(lambda size: size == -1 or 1 <= size <= 2**20),
  'a size >= 1, or -1 for the rest',
]


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices along each axis."""

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
  """Method and learning rate; see `train_lib.optimizers`."""

  name: Literal['adamw', 'adam', 'adam_atan2', 'sgd', 'lamb', 'adafactor'] = (
    'adamw'
  )
  lr: Annotated[float, Interval(ge=1e-12, le=1e3)] = 1e-3
  schedule: Literal['cosine', 'linear', 'rsqrt', 'constant'] = 'cosine'
  # A value below 1 is a share of all steps.
  warmup_steps: Annotated[float, Interval(ge=0.0, le=float(2**31 - 1))] = 100.0
  # 'cosine' and 'linear' end at `end_lr`, the others ignore it.
  end_lr: Annotated[float, Interval(ge=0.0, le=1e3)] = 0.0
  # Decoupled; applies to the parameters of `Task.DECAY`.
  weight_decay: Annotated[float, Interval(ge=0.0, le=10.0)] = 0.0
  # Largest global norm of the gradients; 0 disables clipping.
  clip_norm: Annotated[float, Interval(ge=0.0, le=1e6)] = 1.0
  b1: Annotated[float, Interval(ge=0.0, le=0.999999)] = 0.9
  b2: Annotated[float, Interval(ge=0.0, le=0.999999)] = 0.999
  # 'adam_atan2' needs no `eps`.
  eps: Annotated[float, Interval(ge=1e-20, le=1.0)] = 1e-8
  # Of parameters: the first pattern that a path matches multiplies its rate.
  # 'layers->0.75': each block of a ViT has 0.75 of the rate of the one above.
  scales: Annotated[
    tuple[Annotated[str, Predicate(_is_scale)], ...],
    "a tuple of 'pattern->factor', such as '^exit_->10'",
  ] = ()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """When to save, how many to keep, and which metric selects the best."""

  every_steps: Steps = 1000
  keep: Annotated[int, Interval(ge=1, le=1000)] = 2
  # Consecutive saves that may fail; one more stops the run.
  max_failures: Annotated[int, Interval(ge=0, le=1000)] = 2
  best_metric: Annotated[str, "a metric such as 'test/accuracy', or ''"] = ''
  best_mode: Literal['max', 'min'] = 'max'


@dataclasses.dataclass(frozen=True)
class WarmStart:
  """Parameters from elsewhere; see `train_lib.loading`."""

  workdir: Annotated[
    str,
    Predicate(_is_source),
    'the directory of another run or a published model, an existing .npz or '
    ".safetensors file, or ''",
  ] = ''
  renames: Annotated[
    tuple[Annotated[str, Predicate(_is_rename)], ...],
    "a tuple of 'old->new', old a regular expression",
  ] = ()
  skip: Annotated[tuple[Pattern, ...], 'a tuple of regular expressions'] = ()


@dataclasses.dataclass(frozen=True)
class Profile:
  """A trace of some steps for TensorBoard; 0 steps for none."""

  start_step: Steps = 10
  steps: Annotated[int, Interval(ge=0, le=10_000)] = 0


@dataclasses.dataclass(frozen=True)
class Run:
  """All fields of a configuration; phases run in their order.

  `dtype` is that of the computation; parameters are float32. `batch_size` is
  global, split into `num_micro` micro-batches. `ema_decay` 0 disables the EMA,
  which is debiased. One more than `max_nonfinite_steps` consecutive non-finite
  steps, or `watchdog_seconds` without progress, stop the run.
  `log_every` 0 logs about 50 times. `allow_other_rows` resumes on other rows,
  more or fewer, with the same schedule.
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
  watchdog_seconds: Annotated[int, Interval(ge=1, le=10**6)] = 600
  log_every: Steps = 0
  tensorboard: bool = True
  train_split: Annotated[
    str, MinLen(1), "the name of a split, e.g. 'train'"
  ] = 'train'
  allow_other_rows: bool = False
  mesh: Mesh = Mesh()
  blocks: Options = dataclasses.field(default_factory=Options)
  model: dict = dataclasses.field(default_factory=dict)
  loss: dict = dataclasses.field(default_factory=dict)
  dataset: dict = dataclasses.field(default_factory=dict)
  loader: Loader = Loader()
  optimizer: Optimizer = Optimizer()
  phases: tuple[Phase, ...] = ()
  evals: dict = dataclasses.field(default_factory=dict)
  checkpoint: Checkpoint = Checkpoint()
  warm_start: WarmStart = WarmStart()
  profile: Profile = Profile()


def validate(
  config: Any, overrides: Sequence[str] = ()
) -> ml_collections.ConfigDict:
  """Returns a configuration with every field of the run, its data and model.

  Overrides are texts such as 'optimizer.lr=1e-3'. Touches no device; a task may
  read checkpoints or data for sizes of the model. Raises ConfigError for the
  first illegal field.
  """
  run = fields.check(Run, fields.override(Run, config, overrides), '')
  if run['batch_size'] % run['num_micro']:
    expected = f'a divisor of {run["batch_size"]} rows'
    raise ConfigError('num_micro', run['num_micro'], expected)
  if [*run['mesh'].values()].count(-1) > 1:
    raise ConfigError('mesh', run['mesh'], 'at most one size of -1')
  run['dataset'] = builder.validate(classification.with_image_size(run))
  builder.check_split(run['dataset'], run['train_split'])
  run['evals'] = evaluator.validate(run)
  metric = run['checkpoint']['best_metric']
  if metric and metric.partition('/')[0] not in run['evals']:
    expected = f"'<evaluation>/<metric>' of one of {_listed(run['evals'])}"
    raise ConfigError('checkpoint.best_metric', metric, expected)
  expected = "'package.module:Name' of a subclass of train_lib.task.Task"
  task = registry.locate(run['task'], 'task', Task, expected)
  task.validate_config(run)
  for name, entry in run['evals'].items():
    kind = evaluator.locate(entry['type'], f'evals.{name}.type')
    if kind.NEEDS_OUTPUTS and task.outputs is Task.outputs:
      expected = f'one that reads no `outputs`: {run["task"]} defines none'
      raise ConfigError(f'evals.{name}.type', entry['type'], expected)
  run['phases'] = tuple(Phase(**phase) for phase in run['phases'])
  if not run['phases']:
    raise ConfigError('phases', (), 'at least one phase')
  for index, phase in enumerate(run['phases']):
    _check_phase(f'phases.{index}', phase, run, task)
  return ml_collections.ConfigDict(run).lock()


def check_weights(run: ml_collections.ConfigDict) -> None:
  """Raises ConfigError where the last phase ends at another weight of the loss.

  Its knob replaces the weight in training, and evaluation reads the weight.
  """
  for name, schedule in run.phases[-1].knobs.items():
    # As it is written: a schedule's last value is rounded.
    end = schedule[-1] if isinstance(schedule, tuple) else schedule
    if run['loss'].get(name, end) != end:
      expected = f'{end}, at which its knob of the last phase ends; change both'
      raise ConfigError(f'loss.{name}', run['loss'][name], expected)


def _check_phase(
  place: str, phase: Phase, run: dict[str, Any], task: type[Task]
) -> None:
  if not phase.steps and not phase.epochs:
    raise ConfigError(f'{place}.steps', 0, 'steps >= 1, or epochs > 0')
  if phase.steps and phase.epochs:
    expected = f'0 beside steps={phase.steps}; set one of them'
    raise ConfigError(f'{place}.epochs', phase.epochs, expected)
  for knob in phase.knobs:
    if knob not in task.KNOBS:
      expected = f'a knob of {run["task"]}: {_listed(task.KNOBS)}'
      raise ConfigError(f'{place}.knobs', knob, expected)
  if phase.model:
    with fields.errors_under(place):
      task.validate_config(with_model(run, phase.model))


def _listed(names: Iterable[str]) -> str:
  return ', '.join(sorted(names)) or 'there is none'
