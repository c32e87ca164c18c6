"""The training loop: steps, metrics, evaluation, checkpoints, in that order.

`train` builds, locks the directory, restores, steps and finishes. A `Task`
computes the objective, `train_step.py` makes the step, `setup.py` builds the
parts.
"""

import collections
import contextlib
import dataclasses
import time
from typing import Any

import jax

from dataset_lib.errors import ConfigError
from eval_lib.metrics import compute
from train_lib import console
from train_lib.checkpoint import Checkpointer
from train_lib.checkpoint_io import CheckpointError
from train_lib.preemption import Preempted, PreemptionGuard
from train_lib.run_directory import (
  CHECKPOINTS,
  DATASET_INFO,
  RunDirectory,
  has_checkpoints,
)
from train_lib.setup import Setup, build_setup
from train_lib.stages import Stage
from train_lib.train_step import NonFiniteError, first_culprit
from train_lib.warm_start import start_from

# Metrics are read this many steps late: reading them at once would make the
# host wait for the device in every step.
LAG = 2


def train(
  config: Any,
  workdir: str,
  started: float | None = None,
  dry_run: bool = False,
) -> dict[str, Any]:
  """Trains to the last step, from the newest good checkpoint if there is one.

  Args:
    config: a resolved and validated configuration.
    workdir: the run's directory; it is created, and locked while it runs.
    started: `time.time()` of the process start, for `seconds_to_first_step`.
    dry_run: build and compile everything and print it; write nothing.

  Returns:
    The content of `result.json`.

  Raises:
    NonFiniteError: the loss was not finite; names the step.
    Preempted: asked to stop; the current step is saved.
  """
  started = started or time.time()
  with contextlib.ExitStack() as stack:
    # Nothing is written before everything is built.
    setup = build_setup(config, workdir)
    stack.enter_context(jax.set_mesh(setup.mesh))
    if dry_run or not has_checkpoints(workdir):
      fresh = start_from(setup.init(), setup.config.warm_start)
    else:
      fresh = None
    if dry_run:
      console.print_dry_run(setup)
      return {}
    is_main = jax.process_index() == 0
    run = RunDirectory(workdir, setup.config.to_dict(), primary=is_main)
    stack.enter_context(run)
    run.write(DATASET_INFO, dataclasses.asdict(setup.dataset.info))
    if is_main:
      setup.task.save_assets(run.workdir)
    guard = stack.enter_context(PreemptionGuard())
    loop = stack.enter_context(
      contextlib.closing(_Loop(setup, run, guard, started, fresh))
    )
    return loop.run_to_end()


class _Loop:
  """The state of a running loop; see `train`."""

  def __init__(
    self,
    setup: Setup,
    run: RunDirectory,
    guard: PreemptionGuard,
    started: float,
    fresh: Any,
  ):
    self.setup, self.config = setup, setup.config
    self.run, self.guard, self.started = run, guard, started
    self.fresh = fresh  # None if the run has checkpoints
    # Steps whose metrics are unread: (step, stage, metrics, batch).
    self.pending: collections.deque[Any] = collections.deque()
    self.results: dict[str, float] = {}
    self.first_step_seconds: float | None = None
    self.seconds_before = 0.0  # of earlier processes of this run
    self.parts = contextlib.ExitStack()  # closed in reverse order

  def run_to_end(self) -> dict[str, Any]:
    """Restores, steps through all stages, evaluates, writes the result."""
    kept = self.config.checkpoint
    self.checkpointer = self.parts.enter_context(
      Checkpointer(
        self.run.path(CHECKPOINTS), kept.keep, kept.best_metric, kept.best_mode
      )
    )
    state, self.fresh = self.fresh, None
    restored = self.checkpointer.restore(self.setup.abstract)
    if restored is not None:
      state = restored.state
      self.results = dict(restored.extra['results'])
      self.seconds_before = restored.extra['seconds']
    start = step = int(state.step)
    self.run.metrics.truncate_after(start)
    batches: Any = self.setup.dataset.batches(start_step=start)
    self.batches = self.parts.enter_context(contextlib.closing(batches))
    self.console = self.parts.enter_context(
      contextlib.closing(console.Console(self.setup, self.run, start))
    )
    for stage in self.setup.stages:
      while step < stage.stop:
        state, step = self._one_step(stage, state, step)
    return self._finish(state, start)

  def _one_step(self, stage: Stage, state, step: int):
    """Runs one step and everything due after it, in this order."""
    batch = self._next_batch()
    train_step, seconds = self.setup.steps.get(stage, batch)
    if seconds:
      info = self.setup.dataset.info
      shape = ', '.join(map(str, batch[info.input_key].shape))
      self.console.print(
        f'compiled the step of {stage.name} for {info.input_key} [{shape}] in '
        f'{seconds:.1f} s'
      )
    self.console.trace(step)
    knobs = stage.knob_values(step)
    state, metrics = train_step(state, self.setup.frozen, batch, knobs)
    step += 1
    self.pending.append((step, stage, metrics, batch))
    last = step == self.setup.total_steps
    evaluators = {
      name: evaluator
      for name, evaluator in self.setup.evaluators[stage.name].items()
      if last or _due(step, evaluator.every_steps)
    }
    stop = self.guard.should_stop(step)
    best = self.config.checkpoint.best_metric.split('/')[0]
    every = self.config.checkpoint.every_steps
    save = last or stop or _due(step, every) or best in evaluators
    # 1. Nothing is evaluated or saved before all steps so far are known to
    #    be finite.
    self._settle(0 if save or evaluators else LAG, state)
    # 2. Evaluation before saving: the checkpoint carries its metrics.
    measured = self._evaluate(evaluators, state, step)
    self.console.flush()
    # 3. Saving before stopping.
    if save:
      self._save(state, step, stage, measured, must=last or stop)
    if stop and not last:
      raise Preempted(step)
    self.console.advance(step)
    try:
      # A failed save is reported in the step after it failed.
      self.checkpointer.check()
    except CheckpointError as error:
      self.console.warn(error)
    return state, step

  def _next_batch(self) -> dict[str, Any]:
    begin = time.monotonic()
    batch = self.setup.put(next(self.batches))
    # Reading is free while the last step is still running.
    if not self.pending or self.pending[-1][2]['loss'].total.is_ready():
      self.console.waited(time.monotonic() - begin)
    return batch

  def _settle(self, leave: int, state) -> None:
    """Reads metrics of past steps until `leave` of them are unread."""
    while len(self.pending) > leave:
      step, stage, metrics, batch = self.pending.popleft()
      skipped = int(metrics['nonfinite'].compute())
      if self.first_step_seconds is None:
        self.first_step_seconds = time.time() - self.started
      if skipped > self.config.max_nonfinite_steps:
        task, frozen = self.setup.tasks[stage.name], self.setup.frozen
        knobs = stage.knob_values(step - 1)
        culprit = first_culprit(task, state, frozen, batch, knobs, step)
        raise NonFiniteError(step, skipped, culprit)
      last = step == self.setup.total_steps
      if last or skipped or _due(step, self.config.log_every):
        self.console.log_step(step, compute(metrics))

  def _evaluate(self, evaluators, state, step: int) -> dict[str, float]:
    measured = {
      f'{name}/{key}': value
      for name, evaluator in evaluators.items()
      for key, value in evaluator.run(state.variables).items()
    }
    best = self.config.checkpoint.best_metric
    if best.partition('/')[0] in evaluators and best not in measured:
      expected = f'one of {", ".join(sorted(measured))}'
      raise ConfigError('checkpoint.best_metric', best, expected)
    self.results |= measured
    self.console.log_evaluation(step, measured)
    return measured

  def _save(self, state, step: int, stage: Stage, metrics, must: bool) -> None:
    """Saves; a failure is fatal only if this save `must` succeed.

    A full disk may have space again when the next checkpoint is due.
    """
    extra = {
      'stage': stage.name,
      'results': self.results,
      'seconds': self._seconds(),
    }
    try:
      self.checkpointer.save(step, state, extra, metrics)
      if must:
        self.checkpointer.wait()
    except CheckpointError as error:
      if must:
        raise
      self.console.warn(error)

  def _seconds(self) -> float:
    return self.seconds_before + time.time() - self.started

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
      'share_waiting_for_data': self.console.waited_in_all / elapsed,
    }
    if self.setup.dataset.bad_records:
      result['bad_records'] = self.setup.dataset.bad_records
    self.run.write('result.json', result)
    self.console.finish(result)
    return result

  def close(self) -> None:
    """Writes remaining metrics and ends threads."""
    self.parts.close()


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0
