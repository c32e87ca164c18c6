"""The one loop: steps, metrics, evaluation, checkpoints, in that order.

`train` is the whole life of a run: lock the directory, build, restore, step,
finish. What an objective computes is in its `Task`, how a step is made in
`train_step.py`, how things are built in `setup.py`.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dataset_lib.errors import ConfigError
from eval_lib import evaluator
from eval_lib.metrics import compute
from train_lib import report, sharding
from train_lib.checkpoint import Checkpointer
from train_lib.checkpoint_io import CheckpointError
from train_lib.nonfinite import NonFiniteError, first_culprit
from train_lib.preemption import Preempted, PreemptionGuard
from train_lib.run_directory import (
  CHECKPOINTS,
  RunDirectory,
  has_checkpoints,
)
from train_lib.setup import Setup, build_setup
from train_lib.stages import Stage
from train_lib.warm_start import warm_start
from train_lib.writers import Progress, TensorBoardWriter, headline

# Metrics are read this many steps late: reading them at once would make the
# host wait for the device in every step.
LAG = 2


def train(
  config: Any, workdir: str, started: float | None = None
) -> dict[str, Any]:
  """Trains to the end, from the newest good checkpoint if there is one.

  Args:
    config: a resolved and validated configuration.
    workdir: the run's directory; it is created, and locked while we run.
    started: `time.time()` of the process start, for `seconds_to_first_step`.

  Returns:
    What stands in `result.json`.

  Raises:
    NonFiniteError: the loss was not finite; names the step.
    Preempted: asked to stop; the current step is saved.
  """
  started = started or time.time()
  with contextlib.ExitStack() as stack:
    # Nothing is written before everything could be built.
    setup = build_setup(config)
    stack.enter_context(jax.set_mesh(setup.mesh))
    evaluators = build_evaluators(setup, workdir)
    fresh = None if has_checkpoints(workdir) else fresh_state(setup)
    is_main = jax.process_index() == 0
    run = RunDirectory(workdir, config.to_dict(), primary=is_main)
    stack.enter_context(run)
    run.write('dataset_info.json', dataclasses.asdict(setup.dataset.info))
    if is_main:
      setup.task(setup.stages[0]).save_assets(run.workdir)
    guard = stack.enter_context(PreemptionGuard())
    loop = stack.enter_context(
      contextlib.closing(_Loop(setup, evaluators, run, guard, started))
    )
    return loop.run_to_end(fresh)


def dry_run(config: Any) -> None:
  """Builds and compiles everything, prints what it is, writes nothing."""
  setup = build_setup(config)
  with jax.set_mesh(setup.mesh):
    batches: Any = setup.dataset.batches()
    with contextlib.closing(batches):
      batch = sharding.put_batch(next(batches), setup.mesh)
    batch = setup.longest(batch)
    build_evaluators(setup, workdir='')
    fresh_state(setup)
    frozen = setup.init_frozen()
    for stage in setup.stages:
      compiled = setup.train_step(stage, frozen, batch)
    report.print_dry_run(setup, compiled)


def build_evaluators(setup: Setup, workdir: str) -> dict[str, dict[str, Any]]:
  """By stage, the entries of `config.evals` with every how many steps."""
  built: dict[str, dict[str, Any]] = {}
  for stage in setup.stages:
    context = setup.eval_context(stage, workdir)
    built[stage.name] = {
      name: evaluator.build(name, entry, context)
      for name, entry in setup.config.evals.items()
    }
  return built


def fresh_state(setup: Setup) -> Any:
  """The state at step 0: initialised, then warm-started if configured.

  Raises:
    ConfigError: if the other run does not fit.
  """
  state: Any = setup.init_state()
  source = setup.config.warm_start
  if not source.workdir:
    return state
  try:
    params = warm_start(
      state.params, source.workdir, source.renames, source.skip
    )
  except (ValueError, CheckpointError) as error:
    expected = f'a checkpoint that fits the model: {error}'
    raise ConfigError('warm_start.workdir', source.workdir, expected) from error
  # A copy: the state is donated, and no buffer may be donated twice.
  average = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
  return state.replace(params=params, ema_params=average)


class _Loop:
  """The state of a running loop; see `train`."""

  def __init__(
    self,
    setup: Setup,
    evaluators: dict[str, dict[str, Any]],
    run: RunDirectory,
    guard: PreemptionGuard,
    started: float,
  ):
    self.setup, self.config = setup, setup.config
    self.run, self.guard, self.started = run, guard, started
    self.is_main = jax.process_index() == 0
    self.checkpointer = Checkpointer(
      run.path(CHECKPOINTS),
      keep=self.config.checkpoint.keep,
      best_metric=self.config.checkpoint.best_metric,
      best_mode=self.config.checkpoint.best_mode,
    )
    self.evaluators = evaluators
    self.tracing = False
    self.pending: collections.deque[Any] = collections.deque()
    self.results: dict[str, float] = {}
    self.rows: dict[int, dict[str, float]] = {}
    self.first_step_seconds: float | None = None
    self.waited = self.waited_in_all = 0.0
    self.seconds_before = 0.0  # of earlier processes of this run
    self.batches: Any = None
    self.progress: Any = None
    self.tensorboard: TensorBoardWriter | None = None

  def run_to_end(self, fresh: Any) -> dict[str, Any]:
    """Restores, steps through all stages, evaluates, writes the result."""
    state = self._restore(fresh)
    frozen = self.setup.init_frozen()
    start = step = int(state.step)
    self.run.metrics.truncate_after(start)
    self.batches = self.setup.dataset.batches(start_step=start)
    total = self.setup.total_steps
    self.progress = Progress(total, start, self.config.batch_size)
    self.tensorboard = self._tensorboard()
    if self.is_main:
      report.print_start(self.setup, self.progress.console, start)
    self.logged_at = time.monotonic()
    for stage in self.setup.stages:
      while step < stage.stop:
        state, step = self._one_step(stage, state, frozen, step)
    return self._finish(state, start)

  def _one_step(self, stage: Stage, state, frozen, step: int):
    """One step and what is due after it. Do not change the order below."""
    batch = self._next_batch()
    train_step = self._compiled_step(stage, frozen, batch)
    self._profile(step)
    knobs = stage.knob_values(step)
    state, metrics = train_step(state, frozen, batch, knobs)
    step += 1
    self.pending.append((step, stage, metrics, batch))
    last = step == self.setup.total_steps
    evaluate = [
      name
      for name, (_, every) in self.evaluators[stage.name].items()
      if last or self._due(step, every)
    ]
    stop = self.guard.should_stop(step)
    best = self.config.checkpoint.best_metric.split('/')[0]
    every = self.config.checkpoint.every_steps
    save = last or stop or self._due(step, every) or best in evaluate
    # 1. Nothing is evaluated or saved before all steps so far are known to
    #    be finite.
    self._settle(0 if save or evaluate else LAG, state, frozen)
    # 2. Evaluation before saving: the checkpoint carries its metrics.
    measured = self._evaluate(stage, evaluate, state, step)
    self._write_rows()
    # 3. Saving before stopping.
    if save:
      self._save(state, step, stage, measured, must=last or stop)
    if stop and not last:
      raise Preempted(step)
    self.progress.advance(step)
    self._check_save()
    return state, step

  def _compiled_step(self, stage: Stage, frozen, batch) -> Any:
    """The compiled step for this batch; says so when it had to be compiled."""
    known, begin = len(self.setup.compiled), time.monotonic()
    train_step = self.setup.train_step(stage, frozen, batch)
    if self.is_main and len(self.setup.compiled) > known:
      seconds = time.monotonic() - begin
      line = report.compiled_line(self.setup, stage, batch, seconds)
      self.progress.console.print(line)
    return train_step

  def _check_save(self) -> None:
    """Reports a failed asynchronous save in the step after it failed."""
    try:
      self.checkpointer.check()
    except CheckpointError as error:
      self.progress.console.print(f'[red]warning: {error}')

  def _due(self, step: int, every: int) -> bool:
    return every > 0 and step % every == 0

  def _next_batch(self) -> dict[str, Any]:
    begin = time.monotonic()
    batch = sharding.put_batch(next(self.batches), self.setup.mesh)
    # Only what kept the device idle counts: while the last step is still
    # running, reading is free.
    if not self.pending or self.pending[-1][2]['loss'].total.is_ready():
      self.waited += time.monotonic() - begin
    return batch

  def _settle(self, leave: int, state, frozen) -> None:
    """Reads metrics of past steps until `leave` of them are unread."""
    while len(self.pending) > leave:
      step, stage, metrics, batch = self.pending.popleft()
      skipped = int(metrics['nonfinite'].compute())
      if self.first_step_seconds is None:
        self.first_step_seconds = time.time() - self.started
      if skipped > self.config.max_nonfinite_steps:
        task, knobs = self.setup.task(stage), stage.knob_values(step - 1)
        culprit = first_culprit(task, state, frozen, batch, knobs, step)
        raise NonFiniteError(step, skipped, culprit)
      last = step == self.setup.total_steps
      if last or skipped or self._due(step, self.config.log_every):
        self._log(step, metrics)

  def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
    values = compute(metrics)
    self._write(step, {f'train/{k}': v for k, v in values.items()})
    waiting = self.waited / max(time.monotonic() - self.logged_at, 1e-9)
    speed = self.progress.speed(step)
    self.waited_in_all += self.waited
    self.logged_at, self.waited = time.monotonic(), 0.0
    if self.is_main:
      self.progress.line(step, headline(values, speed, waiting))
      if self.tensorboard:
        self.tensorboard.write_scalars(
          step,
          {f'time/{k}': v for k, v in speed.items()}
          | {'time/waiting_for_data': waiting},
        )

  def _write_rows(self) -> None:
    """One object a step in metrics.jsonl, one point a value in TensorBoard."""
    for step, scalars in self.rows.items():
      self.run.metrics.write(step, scalars)
      if self.tensorboard:
        self.tensorboard.write_scalars(step, scalars)
    self.rows.clear()

  def _write(self, step: int, scalars: dict[str, float]) -> None:
    if self.is_main:
      self.rows.setdefault(step, {}).update(scalars)

  def _evaluate(
    self, stage: Stage, names: list[str], state, step: int
  ) -> dict[str, float]:
    variables = {
      'params': state.eval_params,
      'model_state': state.model_state,
    }
    measured: dict[str, float] = {}
    for name in names:
      values = self.evaluators[stage.name][name][0].run(variables)
      measured |= {f'{name}/{key}': value for key, value in values.items()}
    self._check_best_metric(names, measured)
    self.results |= measured
    if measured:
      self._write(step, measured)
      if self.is_main:
        self.progress.line(step, measured)
    return measured

  def _check_best_metric(self, names: list[str], measured: Any) -> None:
    best = self.config.checkpoint.best_metric
    if best.partition('/')[0] in names and best not in measured:
      expected = f'one of {", ".join(sorted(measured))}'
      raise ConfigError('checkpoint.best_metric', best, expected)

  def _save(self, state, step: int, stage: Stage, metrics, must: bool) -> None:
    """Saves; a failure is loud, and fatal only if this save `must` succeed.

    A full disk may have space again when the next checkpoint is due.
    """
    try:
      extra = {
        'stage': stage.name,
        'results': self.results,
        'seconds': self._seconds(),
      }
      self.checkpointer.save(step, state, extra, metrics)
      if must:
        self.checkpointer.wait()
    except CheckpointError as error:
      if must:
        raise
      self.progress.console.print(f'[red]warning: {error}')

  def _seconds(self) -> float:
    return self.seconds_before + time.time() - self.started

  def _restore(self, fresh: Any) -> Any:
    restored = self.checkpointer.restore(self.setup.abstract)
    if restored is None:
      return fresh
    self.results = dict(restored.extra['results'])
    self.seconds_before = restored.extra['seconds']
    return restored.state

  def _tensorboard(self) -> TensorBoardWriter | None:
    if not (self.is_main and self.config.tensorboard):
      return None
    return TensorBoardWriter(str(self.run.path('tensorboard')))

  def _profile(self, step: int) -> None:
    """Traces `profile.steps` steps from `profile.start_step` on."""
    start, steps = self.config.profile.start_step, self.config.profile.steps
    if steps and step == start:
      jax.profiler.start_trace(str(self.run.path('profile')))
      self.tracing = True
    if self.tracing and step == start + steps:
      self._stop_trace()

  def _stop_trace(self) -> None:
    jax.profiler.stop_trace()
    self.tracing = False

  def _finish(self, state, start: int) -> dict[str, Any]:
    """Writes the result; `seconds` counts all processes of the run."""
    result: dict[str, Any] = dict(self.results)
    # 'test' if there is one, else the first evaluation with an accuracy.
    for name in sorted(self.results, key=lambda name: name != 'test/accuracy'):
      if name.endswith('/accuracy'):
        result.setdefault('accuracy', self.results[name])
    steps = int(state.step) - start
    elapsed = time.time() - self.started
    result |= {
      'steps': int(state.step),
      'steps_this_process': steps,
      'seconds': self._seconds() if steps else self.seconds_before,
      'seconds_to_first_step': self.first_step_seconds,
      'share_waiting_for_data': self.waited_in_all / elapsed,
    }
    if self.setup.dataset.bad_records:
      result['bad_records'] = self.setup.dataset.bad_records
    self.progress.close()
    if self.is_main:
      self.run.write('result.json', result)
      report.print_end(result, str(self.run.workdir), self.progress.console)
    return result

  def close(self) -> None:
    """Writes what is known and releases threads and files."""
    self._write_rows()
    if self.tracing:
      self._stop_trace()
    for part in (self.batches, self.progress, self.tensorboard):
      if part is not None:
        part.close()
    self.checkpointer.close()
