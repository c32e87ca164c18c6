"""Builds a run from its configuration, before the first step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import ml_collections

from dataset_lib import builder
from dataset_lib.fields import ConfigLike
from eval_lib import evaluator
from train_lib import sharding
from train_lib.optimizers import (
  build_optimizer,
  build_schedule,
  check_trainable,
)
from train_lib.stages import Stage, build_stages
from train_lib.task import Task, build_task, model_errors
from train_lib.train_step import (
  TrainState,
  TrainSteps,
  init_state,
  make_train_step,
)


@dataclasses.dataclass(frozen=True)
class Setup:
  """The parts of a run. Use it under `jax.set_mesh(mesh)`.

  Attributes:
    config: the resolved configuration, immutable.
    dataset: the training data.
    stages: laid end to end over the steps of the run.
    tasks: by stage, the task with the model of that stage.
    mesh: devices by (data, fsdp, tensor).
    abstract: shapes, dtypes and shardings of the state.
    init: returns a fresh state with these shardings.
    frozen: arrays that the loss reads and never trains.
    steps: train steps, compiled at their first use.
    evaluators: by stage and name.
  """

  config: Any
  dataset: builder.Dataset
  stages: tuple[Stage, ...]
  tasks: Mapping[str, Task]
  mesh: jax.sharding.Mesh
  abstract: TrainState
  init: Callable[[], TrainState]
  frozen: Any
  steps: TrainSteps
  evaluators: Mapping[str, Mapping[str, evaluator.Evaluator]]

  @property
  def task(self) -> Task:
    """The task of the first stage."""
    return self.tasks[self.stages[0].name]

  @property
  def total_steps(self) -> int:
    """Number of steps of the whole run."""
    return self.stages[-1].stop

  def put(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Places this process's rows of a batch on the devices."""
    return sharding.put_batch(batch, self.mesh)


def build_setup(config: Any, workdir: str = '') -> Setup:
  """Builds data, stages, tasks, optimizer, mesh and evaluators.

  Call it without a mesh set: unboxing under a mesh would apply sharding
  constraints.

  Args:
    config: a resolved and validated configuration.
    workdir: directory of the files that evaluators write.

  Raises:
    ConfigError: if a field is illegal for the data or the devices here.
  """
  config = ml_collections.FrozenConfigDict(config)
  dataset = build_dataset(config)
  stages = build_stages(config.stages, dataset.steps_per_epoch)
  tasks = {
    stage.name: build_task(config, dataset.info, stage.model)
    for stage in stages
  }
  first = tasks[stages[0].name]
  schedule = build_schedule(config.optimizer, stages[-1].stop)
  optimizer = build_optimizer(config.optimizer, schedule)

  def initial():
    return init_state(first, optimizer, config.seed, config.ema_decay)

  def make_step(stage):
    options = config.num_micro, config.ema_decay, stage.trainable
    return make_train_step(tasks[stage.name], optimizer, schedule, *options)

  # Before devices are started. Some fields can only be checked with an input:
  # patches that do not divide the image, heads that do not divide the width.
  with model_errors(config.model):
    boxed = jax.eval_shape(initial)
  check_trainable(stages, boxed.params)
  mesh = sharding.make_mesh(config.mesh)
  sharding.check_batch_size(config, mesh)
  abstract = sharding.abstract(boxed, mesh)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  with jax.set_mesh(mesh):
    frozen = jax.device_put(first.init_frozen(), sharding.replicated(mesh))
    evaluators = {
      name: build_evaluators(config.evals, task, mesh, config, workdir)
      for name, task in tasks.items()
    }
  return Setup(
    config, dataset, stages, tasks, mesh, abstract,
    jax.jit(lambda: sharding.unbox(initial()), out_shardings=shardings),
    frozen, TrainSteps(make_step, abstract, frozen), evaluators,
  )  # fmt: skip


def build_dataset(config: Any) -> builder.Dataset:
  """Builds the training data: this process's rows of every global batch."""
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


def build_evaluators(
  entries: ConfigLike,
  task: Task,
  mesh: jax.sharding.Mesh,
  config: Any,
  workdir: str,
) -> dict[str, evaluator.Evaluator]:
  """Builds evaluators of a task, in training and for a checkpoint alone.

  Args:
    entries: of `config.evals`, by name.
    task: its evaluation is jitted.
    mesh: devices that batches are split over.
    config: of the run.
    workdir: directory of the files that evaluators write.
  """

  def jitted(method):
    compiled = jax.jit(
      lambda variables, batch: method(
        variables['params'], variables['model_state'], batch
      ),
      # Replicated, so that every process can read the whole result.
      out_shardings=sharding.replicated(mesh),
    )

    def call(variables, batch):
      with nn.logical_axis_rules(sharding.RULES):
        return compiled(variables, batch)

    return call

  context = evaluator.EvalContext(
    measure=jitted(task.evaluate),
    features=jitted(task.features),
    outputs=jitted(task.outputs),
    put=functools.partial(sharding.put_batch, mesh=mesh),
    seed=config.seed,
    batch_size=config.batch_size,
    dataset=config.dataset,
    workdir=workdir,
    num_classes=task.info.num_classes,
    train_split=config.train_split,
    layers=task.head_layers,
  )
  return {
    name: evaluator.build(name, entry.to_dict(), context)
    for name, entry in entries.items()
  }
