"""The output of a run: terminal, `metrics.jsonl`, TensorBoard and trace."""

import collections
import datetime
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import rich.console
import rich.markup
import rich.progress
import rich.table
from clu import parameter_overview

from train_lib.build import Setup
from train_lib.run_directory import RunDirectory

# The metrics of a step that its line in the terminal shows.
HEADLINE = (
  'loss', 'accuracy', 'mlm_accuracy', 'sop_accuracy', 'tape_length_mean',
  'ponder_steps_mean', 'iterations', 'depth', 'steps',
)  # fmt: skip


class Console:
  """Prints a run, writes its metrics and traces its steps.

  In a terminal a progress bar stays at the bottom; in a file or a pipe only
  the lines appear, each with the speed and the ETA. Only the primary process
  prints and writes, but every process prints warnings.

  Args:
    setup: of the run.
    run: its directory.
    start: number of steps finished before.
  """

  def __init__(self, setup: Setup, run: RunDirectory, start: int):
    self._setup, self._run = setup, run
    self._total = setup.total_steps
    self._primary = primary = jax.process_index() == 0
    self._console = _new_console()
    self._rows: dict[int, dict[str, float]] = {}
    self._waited = self.waited_in_all = 0.0
    # (time, step): the starts of the current and the overall speed.
    self._last = self._first = (time.monotonic(), start)
    self._compiled = self._tracing = False
    self._tensorboard: Any = None
    if primary and setup.config.tensorboard:
      import tensorboardX

      directory = str(run.workdir / 'tensorboard')
      self._tensorboard = tensorboardX.SummaryWriter(directory)
    self._bar = rich.progress.Progress(
      '[progress.description]{task.description}',
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeRemainingColumn(),
      console=self._console,
      disable=not (primary and self._console.is_terminal),
    )
    self._task = self._bar.add_task('training', total=self._total)
    self._bar.update(self._task, completed=start)
    self._bar.start()
    if primary:
      print_start(self._console, setup, start)

  def print(self, line: str) -> None:
    """Prints a line."""
    if self._primary:
      self._console.print(line, markup=False)

  def warn(self, error: Exception) -> None:
    """Prints a warning, in every process."""
    self._console.print(f'warning: {error}', style='red', markup=False)

  def waited(self, seconds: float) -> None:
    """Counts time in which the device waited for data."""
    self._waited += seconds
    self.waited_in_all += seconds

  def trace(self, step: int) -> None:
    """Traces `profile.steps` steps from `profile.start_step` on."""
    profile = self._setup.config.profile
    if profile.steps and step == profile.start_step:
      jax.profiler.start_trace(str(self._run.workdir / 'profile'))
      self._tracing = True
    if step == profile.start_step + profile.steps:
      self._stop_trace()

  def _stop_trace(self) -> None:
    if self._tracing:
      jax.profiler.stop_trace()
      self._tracing = False

  def advance(self, step: int) -> None:
    """Moves the bar; `step` is the number of finished steps."""
    if not self._compiled:
      # Speed and ETA leave out the compilation of the first step.
      self._compiled, self._waited = True, 0.0
      self._last = self._first = (time.monotonic(), step)
    self._bar.update(self._task, completed=step)

  def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs the metrics of a train step, its speed and the ETA."""
    self._row(step).update({f'train/{k}': v for k, v in metrics.items()})
    now = time.monotonic()
    seconds = max(now - self._last[0], 1e-9)
    speed = (step - self._last[1]) / seconds
    overall = (step - self._first[1]) / max(now - self._first[0], 1e-9)
    times = {
      'steps_per_second': speed,
      'examples_per_second': speed * self._setup.config.batch_size,
      # Unknown until a step was timed.
      'eta_seconds': (self._total - step) / overall if overall else math.nan,
      'waiting_for_data': self._waited / seconds,
    }
    self._last, self._waited = (now, step), 0.0
    eta = '-'
    if overall:
      eta = str(datetime.timedelta(0, int(times['eta_seconds'])))
    texts = {k: f'{metrics[k]:.4g}' for k in HEADLINE if k in metrics} | {
      'steps/s': f'{speed:.4g}',
      'examples/s': f'{times["examples_per_second"]:.4g}',
      'waiting for data': f'{times["waiting_for_data"]:.1%}',
      'ETA': eta,
    }
    self._line(step, texts)
    self._points(step, {f'time/{k}': v for k, v in times.items()})

  def log_evaluation(self, step: int, measured: Mapping[str, float]) -> None:
    """Logs the metrics of evaluators."""
    if measured:
      self._row(step).update(measured)
      self._line(step, {k: f'{value:.4g}' for k, value in measured.items()})

  def _row(self, step: int) -> dict[str, float]:
    return self._rows.setdefault(step, {})

  def _line(self, step: int, texts: Mapping[str, str]) -> None:
    line = '  '.join(f'{name} {text}' for name, text in texts.items())
    self.print(f'step {step:{len(str(self._total))}d}/{self._total}  {line}')

  def _points(self, step: int, scalars: Mapping[str, float]) -> None:
    if self._tensorboard is not None:
      for name, value in scalars.items():
        self._tensorboard.add_scalar(name, value, step)
      self._tensorboard.flush()

  def flush(self) -> None:
    """Writes one object per step to metrics.jsonl, and to TensorBoard."""
    for step, scalars in self._rows.items():
      self._run.log(step, scalars)
      self._points(step, scalars)
    self._rows.clear()

  def finish(self, result: Mapping[str, Any]) -> None:
    """Prints the final metrics, the time and the path of the plot."""
    self._bar.stop()
    if not self._primary:
      return
    rows = {
      name: f'{value:.4f}' if isinstance(value, float) else str(value)
      for name, value in result.items()
    }
    self._console.print(_table(rows))
    workdir = self._run.workdir
    self.print(f'run directory: {workdir} (result.json, metrics.jsonl)')
    from eval_lib import plots

    try:
      self.print(f'plot: {plots.plot_run(workdir)}')
    except (ImportError, ValueError) as error:
      self.print(f'no plot: {error}')

  def close(self) -> None:
    """Writes all remaining metrics, ends the trace, removes the bar."""
    self._stop_trace()
    self.flush()
    self._bar.stop()
    if self._tensorboard is not None:
      self._tensorboard.close()


def _new_console() -> rich.console.Console:
  return rich.console.Console(highlight=False, soft_wrap=True)


def _table(rows: Mapping[str, str]) -> rich.table.Table:
  table = rich.table.Table(show_header=False, box=None)
  for row in rows.items():
    table.add_row(*row)
  return table


def print_start(console: rich.console.Console, setup: Setup, step: int) -> None:
  """Prints parameters per module, sizes and FLOPs, on one screen."""
  parameters = parameter_counts(setup.abstract.params)
  config, info, flops = setup.config, setup.dataset.info, setup.task.flops()
  shape = ', '.join(map(str, (config.batch_size, *info.input_shape)))
  one = info.num_classes == 1
  rows = {
    'parameters': f'{sum(parameters.values()):,}',
    **{f'  {name}': f'{count:,}' for name, count in parameters.items()},
    'input': f'{info.input_key} [{shape}] {info.input_dtype}',
    'classes': 'a number, no classes' if one else str(info.num_classes),
    'examples': f'{info.num_examples:,}',
    'forward FLOPs per example': f'{flops:,.0f}',
    # The backward pass is two forwards: for the inputs and for the weights.
    'train step FLOPs': f'{3 * flops * config.batch_size:.3g}',
    'mesh': str(dict(setup.mesh.shape)),
  }
  if info.length_buckets:
    lengths = ', '.join(map(str, info.length_buckets))
    rows['lengths'] = f'{lengths}; FLOPs are those of the longest'
  console.print(_table(rows))
  where = f'continues at step {step}' if step else 'starts'
  console.print(
    f'{config.task} {where}: {setup.total_steps} steps on {setup.mesh.size} of '
    f'{jax.device_count()} {jax.default_backend()} devices'
  )


def parameter_counts(params: Mapping[str, Any]) -> dict[str, int]:
  """Counts parameters per top-level module; numbered modules share a row."""
  groups = collections.defaultdict(list)
  for name, module in params.items():
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(module)]
    groups[re.sub(r'_\d+$', '_*', name)].append(sum(sizes))
  return {
    f'{name} ({len(sizes)})' if name.endswith('_*') else name: sum(sizes)
    for name, sizes in groups.items()
  }


def print_dry_run(setup: Setup) -> None:
  """Compiles all steps; prints all arrays, sizes, FLOPs and memory."""
  console = _new_console()
  overview = parameter_overview.get_parameter_overview(
    setup.abstract.params, include_stats=False
  )
  console.print(overview, markup=False)
  batch = _longest_batch(setup)
  print_start(console, setup, 0)
  for stage in setup.stages:
    compiled, _ = setup.steps.get(stage, batch)
  memory = compiled.memory_analysis()
  sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
  state, temporary = (f'{size / 2**20:,.1f} MiB' for size in sizes)
  flops = (compiled.cost_analysis() or {}).get('flops', 0)
  rows = {
    'memory per device: state and batch': state,
    'memory per device: temporary': temporary,
    'step FLOPs per device, compiler': f'{flops:.3g}',
  }
  console.print(_table(rows))
  console.print('dry run: everything was built and compiled; nothing written')


def _longest_batch(setup: Setup) -> dict[str, Any]:
  """Returns the shapes of a batch whose rows have the greatest length."""
  info = setup.dataset.info
  batches: Any = setup.dataset.batches()
  batch = setup.put(next(batches))
  batches.close()
  # Arrays of the input's shape are padded to a length that differs between
  # batches.
  padded = batch[info.input_key].shape[1:]

  def longest(leaf):
    row = info.input_shape if leaf.shape[1:] == padded else leaf.shape[1:]
    shape = (leaf.shape[0], *row)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

  return jax.tree.map(longest, batch)
