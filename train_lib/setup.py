"""Builds what a run needs from its configuration, before the first step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import optax

from dataset_lib import builder
from dataset_lib.errors import ConfigError
from dataset_lib.fields import locate
from eval_lib.evaluator import EvalContext
from train_lib import sharding
from train_lib.models import model_errors
from train_lib.optimizers import (
  build_optimizer,
  build_schedule,
  trainable_mask,
)
from train_lib.stages import Stage, build_stages, with_model
from train_lib.task import Task
from train_lib.train_step import TrainState, init_state, make_train_step


@dataclasses.dataclass
class Setup:
  """The parts of a run. Build it and use it under `jax.set_mesh(mesh)`.

  Attributes:
    config: the resolved configuration.
    mesh: devices by (data, fsdp, tensor).
    dataset: the training data.
    stages: laid end to end over the run's steps.
    schedule: learning rate by step.
    optimizer: the optax chain.
    abstract: shapes and dtypes of the state, with shardings.
    compiled: train steps by what is static in them.
  """

  config: Any
  mesh: jax.sharding.Mesh
  dataset: builder.Dataset
  stages: tuple[Stage, ...]
  schedule: optax.Schedule
  optimizer: optax.GradientTransformation
  abstract: TrainState
  compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)

  def task(self, stage: Stage) -> Task:
    """The task with the model as it is in a stage."""
    return build_task(self.config, self.dataset.info, stage.model)

  @property
  def total_steps(self) -> int:
    """Steps of the whole run."""
    return self.stages[-1].stop

  def init_state(self) -> TrainState:
    """A fresh state, laid out over the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def init():
      task = self.task(self.stages[0])
      return sharding.unbox(_initial(task, self.optimizer, self.config))

    return jax.jit(init, out_shardings=shardings)()

  def init_frozen(self) -> Any:
    """The task's frozen arrays, replicated."""
    everywhere = jax.sharding.NamedSharding(
      self.mesh, jax.sharding.PartitionSpec()
    )
    return jax.device_put(self.task(self.stages[0]).init_frozen(), everywhere)

  def train_step(self, stage: Stage, frozen: Any, batch: Any) -> Any:
    """The stage's compiled step for batches like this one.

    Compiled ahead of time, once for stages with equal static parts and
    batches of equal shapes, so that nothing compiles unseen in the loop.
    """
    shapes = tuple(
      (name, tuple(leaf.shape), str(leaf.dtype))
      for name, leaf in sorted(batch.items())
    )
    key = (stage.trainable, str(stage.model), tuple(stage.knobs), shapes)
    if key not in self.compiled:
      self.compiled[key] = self._compile(stage, frozen, batch)
    return self.compiled[key]

  def longest(self, batch: Any) -> Any:
    """The shapes of a batch like this one of the greatest length.

    Arrays of the input's shape are padded to a length that differs from batch
    to batch; what has one shape only comes back as it is.
    """
    info = self.dataset.info
    shape = batch[info.input_key].shape[1:]
    if shape == info.input_shape:
      return batch
    return {
      name: jax.ShapeDtypeStruct(
        (leaf.shape[0], *info.input_shape), leaf.dtype, sharding=leaf.sharding
      )
      if leaf.shape[1:] == shape
      else leaf
      for name, leaf in batch.items()
    }

  def _compile(self, stage: Stage, frozen: Any, batch: Any) -> Any:
    config = self.config
    task = self.task(stage)
    step = make_train_step(
      task,
      self.optimizer,
      self.schedule,
      num_micro=config.num_micro,
      ema_decay=config.ema_decay,
      trainable=stage.trainable,
    )
    everywhere = jax.sharding.NamedSharding(
      self.mesh, jax.sharding.PartitionSpec()
    )
    state_sharding = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
    jitted = jax.jit(
      step, donate_argnums=0, out_shardings=(state_sharding, everywhere)
    )
    arguments = (
      self.abstract,
      frozen,
      batch,
      stage.knob_values(stage.start),
    )
    with nn.logical_axis_rules(sharding.RULES):
      return jitted.lower(*arguments).compile()

  def eval_context(self, stage: Stage, workdir: str) -> EvalContext:
    """What evaluators need of this run in a stage."""
    return eval_context(self.task(stage), self.mesh, self.config, workdir)


def build_setup(config: Any) -> Setup:
  """Builds mesh, data, stages, optimizer and task; call with no mesh set.

  Raises:
    ConfigError: if a field is illegal for the data or the devices here.
  """
  dataset = build_dataset(config)
  stages = build_stages(config.stages, dataset.steps_per_epoch)
  schedule = build_schedule(config.optimizer, stages[-1].stop)
  optimizer = build_optimizer(config.optimizer, schedule)
  task = build_task(config, dataset.info, stages[0].model)
  # Without a mesh set: with one, unboxing would apply constraints.
  boxed = _abstract_state(task, optimizer, config)
  for stage in stages:
    mask = trainable_mask(sharding.unbox(boxed).params, stage.trainable)
    if not any(jax.tree.leaves(mask)):
      expected = 'a regular expression that matches a parameter'
      field = f'stages.{stage.name}.trainable'
      raise ConfigError(field, stage.trainable, expected)
  mesh = sharding.make_mesh(config.mesh)
  check_batch_size(config, mesh)
  abstract = jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=where
    ),
    sharding.unbox(boxed),
    sharding.tree_sharding(boxed, mesh),
  )
  return Setup(config, mesh, dataset, stages, schedule, optimizer, abstract)


def _abstract_state(task: Task, optimizer: Any, config: Any) -> TrainState:
  # Some fields can only be checked with an input: patches that do not divide
  # the image, heads that do not divide the width.
  with model_errors(config.model):
    return jax.eval_shape(lambda: _initial(task, optimizer, config))


def _initial(task: Task, optimizer: Any, config: Any) -> TrainState:
  return init_state(task, optimizer, config.seed, config.ema_decay)


def build_dataset(config: Any) -> builder.Dataset:
  """The training data: this process's rows of every global batch."""
  threads = config.loader.num_threads
  # Asking jax would start the devices, before the model is known to fit.
  distributed = jax.distributed.is_initialized()
  return builder.build(
    config.dataset,
    split=config.train_split,
    train=True,
    seed=config.seed,
    batch_size=config.batch_size,
    host_index=jax.process_index() if distributed else 0,
    host_count=jax.process_count() if distributed else 1,
    num_threads=None if threads < 0 else threads,
    prefetch=config.loader.prefetch,
  )


def build_task(
  config: Any, info: Any, model_changes: Mapping[str, Any] | None = None
) -> Task:
  """The configured task; a stage may change model keywords."""
  config = with_model(config, model_changes or {})
  return locate(config['task'], 'task')(config, info)


def check_batch_size(config: Any, mesh: jax.sharding.Mesh) -> None:
  """Raises `ConfigError` unless rows divide over devices and micro-batches."""
  unit = sharding.rows_divisor(mesh) * config.num_micro
  if config.batch_size % unit:
    raise ConfigError(
      'batch_size',
      config.batch_size,
      f'a multiple of {unit}: {sharding.rows_divisor(mesh)} devices along '
      f'data x fsdp times num_micro={config.num_micro}',
    )


def eval_context(
  task: Task, mesh: jax.sharding.Mesh, config: Any, workdir: str
) -> EvalContext:
  """Jits the task's evaluation; used in training and alone on a checkpoint.

  Variables are `{'params': ..., 'model_state': ...}`.
  """

  # Replicated, so that every process can read all of the result.
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def jitted(method):
    compiled = jax.jit(
      lambda variables, batch: method(
        variables['params'], variables['model_state'], batch
      ),
      out_shardings=everywhere,
    )

    def call(variables, batch):
      with nn.logical_axis_rules(sharding.RULES):
        return compiled(variables, batch)

    return call

  return EvalContext(
    measure=jitted(task.evaluate),
    features=jitted(task.features),
    outputs=jitted(task.outputs),
    put=lambda batch: sharding.put_batch(batch, mesh),
    seed=config.seed,
    batch_size=config.batch_size,
    dataset=config.dataset,
    workdir=workdir,
    num_classes=task.info.num_classes,
    train_split=config.train_split,
    layers=task.head_layers,
  )
