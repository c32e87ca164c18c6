"""Builds a run from its configuration, before the first step."""

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import optax

from core.errors import ConfigError
from core.fields import unknown
from dataset_lib import builder
from dataset_lib.source import DatasetInfo
from eval_lib import evaluator
from model_lib import blocks
from train_lib import optimizers, phases, run_directory, sharding
from train_lib.task import Task, build_task, model_errors
from train_lib.train_step import TrainState, init_state, make_train_step


class Plan:
  """The parts of a run that need no data; its `devices` may be compiled for.

  Raises `ConfigError` for a field that does not fit the data or the devices.
  """

  # A context around the compilation of a step.
  compiling: Any = staticmethod(lambda *_: contextlib.nullcontext())

  def __init__(
    self,
    config: Any,
    info: DatasetInfo,
    steps_per_epoch: int,
    devices: Sequence[Any] | None = None,
  ):
    self.config = config = ml_collections.FrozenConfigDict(config)
    self.phases = phases.plan(config.phases, steps_per_epoch)
    self.total_steps = total = self.phases[-1].stop
    self.log_every = config.log_every or min(max(total // 50, 1), 100)
    # The task of each phase, with the model of that phase.
    self.tasks = [build_task(config, info, one.model) for one in self.phases]
    for task in self.tasks:
      task.check_training()
    self.task = self.tasks[0]
    self.rates = optimizers.rates(config.optimizer)
    self.optimizer, _ = self._optimizer({})
    # It catches fields that fail only on an input, and needs no device.
    with model_errors(config.model):
      boxed = jax.eval_shape(self._initial)
    scales = config.optimizer.scales
    optimizers.check_patterns(self.phases, scales, boxed.params)
    self.mesh = sharding.make_mesh(config.mesh, devices)
    sharding.check_batch_size(config, self.mesh, self.task.rows_together)
    # Shapes, dtypes and shardings of a state.
    self.abstract: TrainState = sharding.abstract(boxed, self.mesh)
    self._steps: dict[Any, Any] = {}  # compiled
    self.not_split = sharding.not_split(boxed.params, self.mesh)

  def batch_shapes(self, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a global batch's arrays from (shape, dtype) of a row."""
    where, size = sharding.by_rows(self.mesh), self.config.batch_size
    return {
      name: jax.ShapeDtypeStruct((size, *shape), dtype, sharding=where)
      for name, (shape, dtype) in rows.items()
    }

  @functools.cached_property
  def frozen(self) -> Any:
    """Constants of the loss, such as a teacher; of a plan their shapes."""
    return jax.eval_shape(self.task.init_frozen)

  def step(self, phase: phases.Planned, batch: Any) -> tuple[Any, float]:
    """Returns the compiled train step, and seconds: 0 if it was compiled.

    Phases with equal static parts and batches of equal shapes share a step.
    """
    begin = time.monotonic()
    shapes = sorted((k, x.shape, str(x.dtype)) for k, x in batch.items())
    key = (phase.trainable, str(phase.model), *phase.knobs, *shapes)
    if key in self._steps:
      return self._steps[key], 0.0
    shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
    outputs = shardings, sharding.replicated(self.mesh)
    step = self._train_step(phase)
    step = jax.jit(step, donate_argnums=0, out_shardings=outputs)
    knobs = dict.fromkeys(phase.knobs, jax.ShapeDtypeStruct((), jnp.float32))
    chosen = blocks.Options(**self.config.blocks)
    inputs = self.frozen, batch, knobs, self.rates
    with self.compiling(phase, batch):
      with nn.logical_axis_rules(sharding.RULES), blocks.options(chosen):
        lowered = step.lower(self.abstract, *inputs)
      self._steps[key] = lowered.compile()
    return self._steps[key], time.monotonic() - begin

  def _train_step(self, phase: phases.Planned) -> Callable[..., Any]:
    """Returns the train step of a phase; `rates` are an argument."""
    config, task = self.config, self.tasks[phase.index]

    def train_step(state, frozen, batch, knobs, rates):
      optimizer, rate = self._optimizer(rates)
      step = make_train_step(
        task, optimizer, rate, config.num_micro, config.ema_decay,
        phase.trainable,
      )  # fmt: skip
      return step(state, frozen, batch, knobs)

    return train_step

  def _optimizer(self, rates: Mapping[str, Any]) -> tuple[Any, optax.Schedule]:
    """Returns optimizer and schedule; `rates` replace fields of the config."""
    config = {**self.config.optimizer, **rates}
    rate = optimizers.build_schedule(config, self.total_steps)
    task = self.task
    given = config, rate, task.DECAY, task.scales
    return optimizers.build_optimizer(*given), rate

  def _initial(self) -> TrainState:
    config, parts = self.config, (self.task, self.optimizer)
    return init_state(*parts, config.seed, config.ema_decay, config.batch_size)


class Setup(Plan):
  """A plan with its data, teacher and evaluators; make it outside of a mesh."""

  # Called before each batch of an evaluation.
  between_batches: Callable[[], None] = staticmethod(lambda: None)

  def __init__(self, config: Any, workdir: str = ''):
    self.dataset = build_dataset(config)
    info, steps = self.dataset.info, self.dataset.steps_per_epoch
    if saved := run_directory.trained_on(workdir):
      # The schedule of a run is kept where its data have grown.
      steps = saved.steps_per_epoch or steps
    self.info = dataclasses.replace(info, steps_per_epoch=steps)
    super().__init__(config, self.info, steps)
    config = self.config
    with jax.set_mesh(self.mesh):
      frozen = self.task.init_frozen()
      self.frozen = jax.device_put(frozen, sharding.replicated(self.mesh))
      self.evaluators = [  # of each phase, by the names of entries
        build_evaluators(
          config.evals, task, self.mesh, config, workdir, self._put_evaluated
        )
        for task in self.tasks
      ]
      if metric := config.checkpoint.best_metric:
        self._check_metric(metric)
    self.put = functools.partial(sharding.put_batch, mesh=self.mesh)

  def _check_metric(self, metric: str) -> None:
    """Raises ConfigError for a metric that an evaluation will not have."""
    batch = self.batch_shapes(self.dataset.row_shapes())
    entry, _, name = metric.partition('/')
    params, state = self.abstract.params, self.abstract.model_state
    for task, evaluators in zip(self.tasks, self.evaluators, strict=True):
      measured = jax.eval_shape(task.evaluate, params, state, batch)
      metric_names = evaluators[entry].metric_names([*measured])
      if metric_names is not None and name not in metric_names:
        expected = unknown(name, metric_names, 'metric')
        raise ConfigError('checkpoint.best_metric', metric, expected)

  def init(self) -> TrainState:
    """Returns a fresh state on the devices."""
    where = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
    fresh = jax.jit(
      lambda: sharding.unbox(self._initial()), out_shardings=where
    )
    return fresh()

  def _put_evaluated(self, batch: Any) -> Any:
    self.between_batches()
    return self.put(batch)


def build_dataset(config: Any) -> builder.Dataset:
  """Builds the training data: this process's rows of every global batch."""
  threads = config.loader.num_threads
  # `jax.process_index()` initializes the backend; the model is checked first.
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
    is_checked=True,
  )


def build_evaluators(
  entries: Any,
  task: Task,
  mesh: jax.sharding.Mesh,
  config: Any,
  workdir: str,
  put: Any = None,
) -> dict[str, evaluator.Evaluator]:
  """Builds the evaluators; whose files others read come first."""

  def jitted(method):
    def call(variables, batch):
      with nn.logical_axis_rules(sharding.RULES):
        return method(variables['params'], variables['model_state'], batch)

    # Replicated, so that every process can read the whole result.
    return jax.jit(call, out_shardings=sharding.replicated(mesh))

  def outputs_with(changes):
    changed = copy.copy(task)
    changed.model = task.model.clone(**changes)
    return jitted(changed.outputs)

  context = evaluator.EvalContext(
    measure=jitted(task.evaluate),
    features=jitted(task.features),
    outputs=jitted(task.outputs),
    put=put or functools.partial(sharding.put_batch, mesh=mesh),
    seed=config.seed,
    batch_size=config.batch_size,
    dataset=config.dataset,
    workdir=workdir,
    info=task.info,
    train_split=config.train_split,
    layers=task.head_layers,
    other_rows=config.allow_other_rows,
    cheaper=tuple((fields, outputs_with(fields)) for fields in task.cheaper()),
  )
  build = evaluator.build
  built = {k: build(k, e.to_dict(), context) for k, e in entries.items()}
  return dict(sorted(built.items(), key=lambda item: not item[1].IS_FIRST))
