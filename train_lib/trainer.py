"""The training loop: steps, metrics, checkpoints, evaluation, in that order."""

import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import threading
import time
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from core.errors import ConfigError, UserError, WriteError
from core.files import writing
from eval_lib.evaluator import Evaluator
from eval_lib.metrics import Collected, compute
from train_lib.build import Setup
from train_lib.checkpoint import Checkpointer
from train_lib.checkpoint_io import CheckpointError
from train_lib.console import Console, print_dry_run
from train_lib.phases import Planned
from train_lib.run_directory import CHECKPOINTS, RunDirectory, steps_in
from train_lib.train_step import NonFiniteError, TrainState, first_culprit
from train_lib.warm_start import start_from
from train_lib.watchdog import Watchdog

# Metrics are read this many steps late, so that the host does not block.
LAG = 2
# Logged as they are in the step, others as their means since the last log.
NOT_AVERAGED = 'learning_rate', 'nonfinite'
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def train(
  config: Any, workdir: str, started: float | None = None, dry_run: bool = False
) -> dict[str, Any]:
  """Trains to the last step, from the newest good checkpoint if there is one.

  Returns the content of `result.json`. `config` is validated, `started` the
  `time.monotonic()` of the process start. A `dry_run` builds, compiles and
  prints, and writes nothing. Raises NonFiniteError after `max_nonfinite_steps`
  non-finite steps, Preempted after a signal and a save; see also `Watchdog`.
  """
  started = started or time.monotonic()
  with contextlib.ExitStack() as stack:
    watchdog = stack.enter_context(Watchdog(config.watchdog_seconds))
    # Nothing is written before everything is built.
    setup = Setup(config, workdir)
    stack.enter_context(jax.set_mesh(setup.mesh))
    state: Any = None
    if dry_run or not steps_in(pathlib.Path(workdir, CHECKPOINTS)):
      state = start_from(setup)
    if dry_run:
      print_dry_run(setup)
      return {}
    loop = _Loop(setup, workdir, started, state, watchdog, stack.enter_context)
    del state  # the first step donates it
    for phase in setup.phases:
      while loop.done < phase.stop:
        loop.step(phase)
    return loop.finish()


class _Loop:
  """A training in progress; `enter` opens contexts that end with it."""

  def __init__(
    self,
    setup: Setup,
    workdir: str,
    started: float,
    state: Any,
    watchdog: Watchdog,
    enter: Any,
  ):
    """Locks the directory; starts from the restored state, else `state`."""
    self.setup, self.config, self.started = setup, setup.config, started
    self.watchdog = watchdog
    # Steps whose metrics are unread: (step, phase, metrics, batch).
    self.pending: collections.deque[Any] = collections.deque()
    self.first_step_seconds: float | None = None
    self.results: dict[str, float] = {}
    self.seconds_before = 0.0  # of earlier processes of this run
    self.is_compiling = False  # the program of an evaluation
    saving, primary = self.config.checkpoint, jax.process_index() == 0
    config = self.config.to_dict()
    self.run = enter(RunDirectory(workdir, config, primary, setup.info))
    if primary:
      with writing(self.run.workdir):
        setup.task.save_assets(self.run.workdir)
    self.guard = enter(PreemptionGuard())
    best = saving.best_metric, saving.best_mode
    folder = self.run.workdir / CHECKPOINTS
    self.checkpointer = enter(Checkpointer(folder, saving.keep, *best))
    extra: dict[str, Any] = {}
    if restored := self.checkpointer.restore(setup.abstract):
      state, extra = restored[0], restored[1].extra
      self.results, self.seconds_before = extra['results'], extra['seconds']
    self.state: TrainState = state
    self.start = self.done = int(state.step)  # number of finished steps
    self.unlogged = Collected(extra.get('unlogged', ()))  # since the last log
    # Rows of the log that a checkpoint carries are not all of their step.
    carried = extra.get('rows', {})
    self.run.truncate_log(min([self.start, *(int(k) - 1 for k in carried)]))
    batches = setup.dataset.batches(start_step=self.start)
    self.batches = enter(contextlib.closing(batches))
    self.console = enter(Console(setup, self.run, self.start, carried))
    setup.between_batches = self._between_batches
    setup.compiling = self.console.compiling
    if extra.get('unmeasured'):
      try:
        ended = (p for p in setup.phases if self.done <= p.stop)
        self._measure(next(ended), True)
      except _Stopped:
        raise Preempted(self.done) from None

  def step(self, phase: Planned) -> None:
    """Runs one step and everything due after it, in this order."""
    now = f'step {self.done + 1}'
    self.watchdog.progress(f'{now}: reading its batch')
    batch = self._next_batch()
    self.watchdog.progress(f'{now}: compiling', exempt=True)
    train_step, _ = self.setup.step(phase, batch)
    self.watchdog.progress(f'{now}: computing')
    self.console.trace(self.done)
    inputs = self.setup.frozen, batch, phase.knob_values(self.done)
    self.state, metrics = train_step(self.state, *inputs, self.setup.rates)
    self.done = step = self.done + 1
    self.pending.append((step, phase, metrics, batch))
    last, saving = step == self.setup.total_steps, self.config.checkpoint
    evaluators = self._due_evaluators(phase)
    stop = self.guard.should_stop()
    measures_best = saving.best_metric.partition('/')[0] in evaluators
    save = last or stop or measures_best or _due(step, saving.every_steps)
    # 1. Read pending metrics, so a non-finite step raises before it is saved.
    is_first = self.first_step_seconds is None
    self._settle(0 if save or evaluators or is_first else LAG)
    begin, is_pause = time.monotonic(), save or evaluators
    saved, measured = False, dict[str, float]()
    try:
      if evaluators and not stop:
        # 2. Saving before an evaluation, which may fail; its metrics are added
        # later, at the latest when the run is resumed.
        saved = self._save(save, False, phase, {}, True)
        measured = self._measure(phase, saved)
      elif not evaluators:
        self.console.flush()
    except _Stopped:
      stop = True
    except Exception as error:
      with contextlib.suppress(CheckpointError):
        # Of several processes only this one may know of the error.
        if not saved and jax.process_count() == 1:
          self._settle(0)
          self._save(True, True, phase, {}, not isinstance(error, WriteError))
        self.checkpointer.wait()
      raise
    # 3. Saving before stopping.
    unmeasured = stop and bool(evaluators)
    save = (save and not evaluators) or ((stop or last) and not saved)
    self._save(save, last or stop, phase, measured, unmeasured)
    if stop and (unmeasured or not last):
      raise Preempted(step)
    if is_pause:
      self.console.aside += time.monotonic() - begin
    self.console.advance(step)

  def _due_evaluators(self, phase: Planned) -> dict[str, Evaluator]:
    total = self.setup.total_steps

    def is_due(every: int | float) -> bool:
      every = every if every >= 1 else every * total  # a share of the run
      return self.done == total or _due(self.done, math.ceil(every))

    every = self.setup.evaluators[phase.index]
    return {k: v for k, v in every.items() if is_due(v.every_steps)}

  def _between_batches(self) -> None:
    # After the first batch of an evaluation its program is compiled.
    now = f'step {self.done}: evaluating'
    self.watchdog.progress(now, exempt=self.is_compiling)
    self.is_compiling = False
    if self.guard.should_stop():
      raise _Stopped

  def _measure(self, phase: Planned, saved: bool) -> dict[str, float]:
    """Evaluates and writes the log; stores the metrics if the step is saved."""
    evaluators, measured = self._due_evaluators(phase), dict[str, float]()
    for name, evaluator in evaluators.items():
      self.is_compiling = True
      metrics = evaluator.measure(self.state.variables)
      measured |= {f'{name}/{key}': value for key, value in metrics.items()}
      if evaluator.note:
        self.console.print(f'{name} {evaluator.note}')
    best = self.config.checkpoint.best_metric
    if best.partition('/')[0] in evaluators and best not in measured:
      expected = f'one of {", ".join(sorted(measured))}'
      raise ConfigError('checkpoint.best_metric', best, expected)
    self.results |= measured
    self.console.log_evaluation(self.done, measured)
    try:
      self.console.flush()
    finally:  # the checkpoint carries rows that cannot be written
      if saved:
        extra = self._extra(phase, False)
        self.checkpointer.amend(self.done, extra, measured)
    return measured

  def _next_batch(self) -> dict[str, Any]:
    begin = time.monotonic()
    batch = self.setup.put(next(self.batches))
    # Count waiting only if the device is idle.
    if not self.pending or self.pending[-1][2]['loss'].total.is_ready():
      self.console.waited += time.monotonic() - begin
    return batch

  def _settle(self, leave: int) -> None:
    """Reads metrics of past steps until `leave` of them are unread."""
    while len(self.pending) > leave:
      step, phase, metrics, batch = self.pending.popleft()
      skipped = int(metrics['nonfinite'].compute())
      if self.first_step_seconds is None:
        self.first_step_seconds = time.monotonic() - self.started
      if skipped > self.config.max_nonfinite_steps:
        inputs = self.setup.frozen, batch, phase.knob_values(step - 1)
        task = self.setup.tasks[phase.index]
        culprit = first_culprit(task, self.state, *inputs, step)
        raise NonFiniteError(step, skipped, culprit)
      if step == phase.start + 1:  # the metrics may be others
        self.unlogged = Collected()
      self.unlogged.add(metrics)
      last = step == self.setup.total_steps
      if last or skipped or _due(step, self.setup.log_every):
        now = {name: metrics[name] for name in NOT_AVERAGED}
        self.console.log_step(step, compute(self.unlogged.take() | now))

  def _extra(self, phase: Planned, unmeasured: bool) -> dict[str, Any]:
    """Returns the values of a checkpoint that are not arrays."""
    return {
      'phase': phase.index,
      'contract': dataclasses.asdict(self.setup.info),
      'model': self.config.model.to_dict(),
      'results': self.results,
      'seconds': self._seconds(),
      'rows': self.console.unwritten(),
      'unlogged': self.unlogged.numbers(),
      'unmeasured': unmeasured,
    }

  def _save(
    self, save: bool, must: bool, phase: Planned, metrics: Any, unmeasured: bool
  ) -> bool:
    """Returns True if it has saved; raises if a save that `must` be fails.

    `checkpoint.max_failures` other saves in a row may fail, as on a full disk.
    """
    self.watchdog.progress(f'step {self.done}: saving')
    try:
      if save:
        extra = self._extra(phase, unmeasured)
        self.checkpointer.save(self.done, self.state, extra, metrics)
      # Without `must` this does not block; it raises if an earlier save failed.
      self.checkpointer.wait(block=must)
    except CheckpointError as error:
      most = self.config.checkpoint.max_failures
      if must or self.checkpointer.failures > most:
        raise
      self.console.warn(error)
      return False
    return save

  def _seconds(self) -> float:
    return self.seconds_before + time.monotonic() - self.started

  def finish(self) -> dict[str, Any]:
    """Writes the result; `seconds` counts all processes of the run."""
    result: dict[str, Any] = dict(self.results)
    # `accuracy` is 'test/accuracy', else that of the first evaluation with one.
    for name in sorted(self.results, key=lambda name: name != 'test/accuracy'):
      if name.endswith('/accuracy'):
        result.setdefault('accuracy', self.results[name])
    steps, elapsed = self.done - self.start, time.monotonic() - self.started
    result |= {
      'steps': self.done,
      'steps_this_process': steps,
      'seconds': self._seconds() if steps else self.seconds_before,
      'seconds_to_first_step': self.first_step_seconds,
      'share_waiting_for_data': self.console.waited / elapsed,
    }
    if bad := self.setup.dataset.bad_records:
      result['bad_records'] = bad
    self.run.write('result.json', result)
    self.console.finish(result)
    return result


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0


class _Stopped(Exception):  # noqa: N818 - an event, not an error
  """A signal ends an evaluation."""


class Preempted(UserError):  # noqa: N818 - an event, not an error
  """The run was stopped by a signal after saving `step`."""

  exit_code = 75  # a restart continues
  in_all_processes = True

  def __init__(self, step: int):
    saved = f'step {step} is saved, the same command resumes from there'
    super().__init__(f'stopped by a signal; {saved}')


class PreemptionGuard(contextlib.ExitStack):
  """A context: the first SIGTERM or SIGINT makes `should_stop` return True.

  With `jax.distributed`, initialised before, its coordination service handles
  SIGTERM and agrees on a step for all processes; SIGINT is forwarded to it.
  """

  def __enter__(self) -> 'PreemptionGuard':
    self._requested, self._asked = False, 0
    self._distributed = jax.distributed.is_initialized()
    # Python lets only the main thread set handlers.
    if threading.current_thread() is threading.main_thread():
      for number in SIGNALS[1:] if self._distributed else SIGNALS:
        before = signal.signal(number, self._handle)
        self.callback(signal.signal, number, before)
    return self

  def should_stop(self) -> bool:
    """Returns True to save and stop; equal in all processes that ask alike."""
    self._asked += 1
    if self._distributed:
      return multihost_utils.reached_preemption_sync_point(self._asked)
    return self._requested

  def _handle(self, number: int, frame: FrameType | None) -> None:
    self._requested = True
    self.close()  # a second signal has its default effect
    if self._distributed:
      os.kill(os.getpid(), signal.SIGTERM)
