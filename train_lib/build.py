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
from train_lib import optimizers, sharding, train_step
from train_lib.stages import Stage, build_stages
from train_lib.task import Task, build_task, model_errors
from train_lib.train_step import TrainState, TrainSteps


@dataclasses.dataclass(frozen=True)
class Setup:
  """The parts of a run. Use it under `jax.set_mesh(mesh)`."""

  config: Any  # the resolved configuration, immutable
  dataset: builder.Dataset
  stages: tuple[Stage, ...]
  tasks: Mapping[str, Task]  # by stage, with the model of that stage
  mesh: jax.sharding.Mesh
  abstract: TrainState  # shapes, dtypes and shardings
  init: Callable[[], TrainState]  # returns a fresh state
  frozen: Any  # arrays that the loss reads and never trains
  steps: TrainSteps
  evaluators: Mapping[str, Mapping[str, evaluator.Evaluator]]  # by stage, name

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
  """Builds the parts of a run; call it without a mesh set.

  Args:
    config: a resolved and validated configuration.
    workdir: directory of the files that evaluators write.

  Raises:
    ConfigError: if a field is illegal for the data or the devices here.
  """
  config = ml_collections.FrozenConfigDict(config)
  dataset = build_dataset(config)
  stages = build_stages(config.stages, dataset.steps_per_epoch)
  info = dataset.info
  tasks = {one.name: build_task(config, info, one.model) for one in stages}
  first = tasks[stages[0].name]
  schedule = optimizers.build_schedule(config.optimizer, stages[-1].stop)
  optimizer = optimizers.build_optimizer(config.optimizer, schedule)

  decay = config.ema_decay

  def initial():
    return train_step.init_state(first, optimizer, config.seed, decay)

  def make_step(stage):
    parts = tasks[stage.name], optimizer, schedule
    options = config.num_micro, decay, stage.trainable
    return train_step.make_train_step(*parts, *options)

  # Before devices are started. Some fields can only be checked with an input:
  # patches that do not divide the image, heads that do not divide the width.
  with model_errors(config.model):
    boxed = jax.eval_shape(initial)
  optimizers.check_trainable(stages, boxed.params)
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
  """Builds entries of `config.evals`, in training and for a checkpoint alone.

  The evaluation of the task is jitted; evaluators write to the workdir.
  """

  def jitted(method):
    def call(variables, batch):
      with nn.logical_axis_rules(sharding.RULES):
        return method(variables['params'], variables['model_state'], batch)

    # Replicated, so that every process can read the whole result.
    return jax.jit(call, out_shardings=sharding.replicated(mesh))

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
  build = evaluator.build
  return {k: build(k, entry.to_dict(), context) for k, entry in entries.items()}
