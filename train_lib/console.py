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

from train_lib.run_directory import RunDirectory
from train_lib.setup import Setup
from train_lib.stages import Stage

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
    self._primary = jax.process_index() == 0
    self._console = rich.console.Console(
      highlight=False, soft_wrap=True, quiet=not self._primary
    )
    self._rows: dict[int, dict[str, float]] = {}
    self._tensorboard: Any = None
    if self._primary and setup.config.tensorboard:
      import tensorboardX

      self._tensorboard = tensorboardX.SummaryWriter(
        str(run.path('tensorboard'))
      )
    # (time, step): the starts of the current and the overall speed.
    self._last = self._first = (time.monotonic(), start)
    self._compiled = False
    self._waited = 0.0
    self.waited_in_all = 0.0
    self._tracing = False
    self._bar: Any = None
    if self._primary and self._console.is_terminal:
      self._bar = rich.progress.Progress(
        '[progress.description]{task.description}',
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        console=self._console,
      )
      self._bar.add_task('training', total=setup.total_steps, completed=start)
      self._bar.start()
    print_start(self._console, setup, start)

  def compiled(self, stage: Stage, batch: Any, seconds: float) -> None:
    """Prints a line about a train step that was just compiled."""
    name = self._setup.dataset.info.input_key
    shape = ', '.join(map(str, batch[name].shape))
    self._console.print(
      f'compiled the step of {stage.name} for {name} [{shape}] in '
      f'{seconds:.1f} s',
      markup=False,
    )

  def warn(self, error: Exception) -> None:
    """Prints a warning, in every process."""
    quiet, self._console.quiet = self._console.quiet, False
    self._console.print(f'[red]warning: {rich.markup.escape(str(error))}')
    self._console.quiet = quiet

  def trace(self, step: int) -> None:
    """Traces `profile.steps` steps from `profile.start_step` on."""
    start = self._setup.config.profile.start_step
    steps = self._setup.config.profile.steps
    if steps and step == start:
      jax.profiler.start_trace(str(self._run.path('profile')))
      self._tracing = True
    if step == start + steps:
      self._stop_trace()

  def _stop_trace(self) -> None:
    if self._tracing:
      jax.profiler.stop_trace()
      self._tracing = False

  def waited(self, seconds: float) -> None:
    """Counts time in which the device waited for data."""
    self._waited += seconds
    self.waited_in_all += seconds

  def advance(self, step: int) -> None:
    """Moves the bar; `step` is the number of finished steps."""
    if not self._compiled:
      # Speed and ETA leave out the compilation of the first step.
      self._compiled = True
      self._last = self._first = (time.monotonic(), step)
      self._waited = 0.0
    if self._bar is not None:
      self._bar.update(self._bar.task_ids[0], completed=step)

  def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs the metrics of a train step, its speed and the ETA."""
    self._add(step, {f'train/{name}': v for name, v in metrics.items()})
    now, (then, previous) = time.monotonic(), self._last
    started, first = self._first
    rate = (step - previous) / max(now - then, 1e-9)
    overall = (step - first) / max(now - started, 1e-9)
    left = self._setup.total_steps - step
    times = {
      'steps_per_second': rate,
      'examples_per_second': rate * self._setup.config.batch_size,
      'eta_seconds': left / overall if overall else math.nan,
      'waiting_for_data': self._waited / max(now - then, 1e-9),
    }
    self._last, self._waited = (now, step), 0.0
    self._print(
      step,
      {name: metrics[name] for name in HEADLINE if name in metrics},
      times,
    )
    self._points(step, {f'time/{name}': v for name, v in times.items()})

  def log_evaluation(self, step: int, measured: Mapping[str, float]) -> None:
    """Logs the metrics of evaluators."""
    if measured:
      self._add(step, measured)
      self._print(step, measured)

  def flush(self) -> None:
    """Writes one object per step to metrics.jsonl, and to TensorBoard."""
    for step, scalars in self._rows.items():
      self._run.metrics.write(step, scalars)
      self._points(step, scalars)
    self._rows.clear()

  def finish(self, result: Mapping[str, Any]) -> None:
    """Prints the final metrics, the time and the path of the plot."""
    if self._bar is not None:
      self._bar.stop()
    if self._primary:
      rows = {
        name: f'{value:.4f}' if isinstance(value, float) else str(value)
        for name, value in result.items()
      }
      self._console.print(_table(rows))
      workdir = str(self._run.workdir)
      self._console.print(
        f'run directory: {workdir} (result.json, metrics.jsonl)'
      )
      self._console.print(_plot(workdir))

  def close(self) -> None:
    """Writes all remaining metrics, ends the trace, removes the bar."""
    self._stop_trace()
    self.flush()
    if self._bar is not None:
      self._bar.stop()
    if self._tensorboard is not None:
      self._tensorboard.close()

  def _add(self, step: int, scalars: Mapping[str, float]) -> None:
    self._rows.setdefault(step, {}).update(scalars)

  def _points(self, step: int, scalars: Mapping[str, float]) -> None:
    if self._tensorboard is not None:
      for name, value in scalars.items():
        self._tensorboard.add_scalar(name, value, step)
      self._tensorboard.flush()

  def _print(
    self,
    step: int,
    values: Mapping[str, float],
    times: Mapping[str, float] | None = None,
  ) -> None:
    texts = {name: f'{value:.4g}' for name, value in values.items()}
    if times:
      eta = times['eta_seconds']
      texts |= {
        'steps/s': f'{times["steps_per_second"]:.4g}',
        'examples/s': f'{times["examples_per_second"]:.4g}',
        'waiting for data': f'{100 * times["waiting_for_data"]:.1f} %',
        # Unknown until a step was timed.
        'ETA': '-' if math.isnan(eta) else str(datetime.timedelta(0, int(eta))),
      }
    total = self._setup.total_steps
    line = '  '.join(f'{name} {text}' for name, text in texts.items())
    self._console.print(f'step {step:{len(str(total))}d}/{total}  {line}')


def print_start(console: rich.console.Console, setup: Setup, step: int) -> None:
  """Prints parameters per module, sizes and FLOPs, on one screen."""
  parameters = parameter_counts(setup.abstract.params)
  info, flops = setup.dataset.info, setup.task.flops()
  rows = {
    'parameters': f'{sum(parameters.values()):,}',
    **{f'  {name}': f'{count:,}' for name, count in parameters.items()},
    'input': f'{info.input_key} [{setup.config.batch_size}, '
    + ', '.join(map(str, info.input_shape))
    + f'] {info.input_dtype}',
    'classes': 'a number, no classes'
    if info.num_classes == 1
    else str(info.num_classes),
    'examples': f'{info.num_examples:,}',
    'forward FLOPs per example': f'{flops:,.0f}',
    # The backward pass is two forwards: for the inputs and for the weights.
    'train step FLOPs': f'{3 * flops * setup.config.batch_size:.3g}',
    'mesh': str(dict(setup.mesh.shape)),
  }
  if info.length_buckets:
    lengths = ', '.join(map(str, info.length_buckets))
    rows['lengths'] = f'{lengths}; FLOPs are those of the longest'
  console.print(_table(rows))
  where = f'continues at step {step}' if step else 'starts'
  console.print(
    f'{setup.config.task} {where}: {setup.total_steps} steps on '
    f'{setup.mesh.size} of {jax.device_count()} {jax.default_backend()} devices'
  )


def parameter_counts(params: Mapping[str, Any]) -> dict[str, int]:
  """Counts parameters per top-level module; numbered modules share a row."""
  counts: collections.Counter[str] = collections.Counter()
  alike: collections.Counter[str] = collections.Counter()
  for name, module in params.items():
    row = re.sub(r'_\d+$', '_*', name)
    alike[row] += 1
    counts[row] += sum(
      int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(module)
    )
  return {
    f'{row} ({alike[row]})' if row.endswith('_*') else row: count
    for row, count in counts.items()
  }


def print_dry_run(setup: Setup) -> None:
  """Compiles all steps; prints all arrays, sizes, FLOPs and memory."""
  console = rich.console.Console(highlight=False, soft_wrap=True)
  overview = parameter_overview.get_parameter_overview(
    setup.abstract.params, include_stats=False
  )
  console.print(overview, markup=False)
  batch = _longest_batch(setup)
  print_start(console, setup, 0)
  for stage in setup.stages:
    compiled, _ = setup.steps.get(stage, batch)
  memory = compiled.memory_analysis()
  cost = compiled.cost_analysis() or {}
  state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
  rows = {
    'memory per device: state and batch': f'{state / 2**20:,.1f} MiB',
    'memory per device: temporary': f'{temporary / 2**20:,.1f} MiB',
    'step FLOPs per device, compiler': f'{cost.get("flops", 0):.3g}',
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
  shape, longest = batch[info.input_key].shape[1:], info.input_shape
  return {
    name: jax.ShapeDtypeStruct(
      (leaf.shape[0], *longest), leaf.dtype, sharding=leaf.sharding
    )
    if leaf.shape[1:] == shape
    else leaf
    for name, leaf in batch.items()
  }


def _plot(workdir: str) -> str:
  """Draws the run; returns the line to print, also on failure."""
  from eval_lib import run_plot

  try:
    return f'plot: {run_plot.plot_run(workdir)}'
  except (ImportError, ValueError) as error:
    return f'no plot: {error}'


def _table(rows: Mapping[str, str]) -> rich.table.Table:
  table = rich.table.Table(show_header=False, box=None)
  for name, value in rows.items():
    table.add_row(name, value)
  return table
