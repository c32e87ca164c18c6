"""The output of a run: terminal, `metrics.jsonl`, TensorBoard and trace."""

import collections
import contextlib
import datetime
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import rich.console
import rich.table
import rich.text
from clu import parameter_overview
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from core.files import printable, writing
from train_lib import compiled
from train_lib.build import Setup
from train_lib.phases import Planned
from train_lib.run_directory import RunDirectory

ETA_LOGS = 10  # of the last of which the mean speed is that of the rest
STYLE: Any = dict(highlight=False, soft_wrap=True)


class Console(contextlib.ExitStack):
  """A context that prints a run, writes its metrics and traces its steps.

  All but warnings comes from the primary process. `waited`: seconds that the
  device waited for data; `aside`: seconds that speed and ETA leave out;
  `carried`: `unwritten` rows of the checkpoint.
  """

  def __init__(
    self, setup: Setup, run: RunDirectory, start: int, carried: dict[str, Any]
  ):
    super().__init__()
    self._setup, self._run, self._start = setup, run, start
    self._total, self.waited, self.aside = setup.total_steps, 0.0, 0.0
    self._primary = jax.process_index() == 0
    self._console = rich.console.Console(**STYLE)
    self._rows = collections.defaultdict[int, dict[str, float]](dict)
    for step, row in carried.items():
      self._rows[int(step)] = {k: float(v) for k, v in row.items()}
    # (time, step, waited) at the start of the current interval.
    self._last = (self._clock(), start, 0.0)
    # (time, step) of the last logs, of which steps before the last compilation
    # say nothing.
    self._logs = collections.deque[tuple[float, int]](maxlen=ETA_LOGS)
    self._tensorboard: Any = None
    if self._primary and setup.config.tensorboard:
      from tensorboardX import SummaryWriter

      self._tensorboard = SummaryWriter(str(run.workdir / 'tensorboard'))
      self.enter_context(self._writing())
      self.callback(self._tensorboard.close)
    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    columns = *columns, MofNCompleteColumn()
    hidden = not (self._primary and self._console.is_terminal)
    self._bar = self.enter_context(
      Progress(*columns, console=self._console, disable=hidden)
    )
    self._task = self._bar.add_task('training', True, self._total, start)
    self.callback(self.flush)
    self._trace = self.enter_context(contextlib.ExitStack())
    if self._primary:
      print_start(self._console, setup, start)

  def print(self, line: str) -> None:
    """Prints a line."""
    if self._primary:
      self._console.print(printable(line), markup=False)

  def warn(self, error: Exception) -> None:
    """Prints a warning, in every process."""
    _warn(self._console, printable(error))

  def trace(self, step: int) -> None:
    """Traces `profile.steps` steps from `profile.start_step` on."""
    profile = self._setup.config.profile
    if profile.steps and step == profile.start_step:
      trace = jax.profiler.trace(str(self._run.workdir / 'profile'))
      self._trace.enter_context(trace)
    if step == profile.start_step + profile.steps:
      self._trace.close()

  @contextlib.contextmanager
  def compiling(self, phase: Planned, batch: Any) -> Iterator[None]:
    """Prints what is compiled; a terminal shows how long it takes so far."""
    key, begin = self._setup.info.input_key, time.monotonic()
    rows = f'{key} {list(batch[key].shape)}'
    self.print(f'compiling the step of {phase.label} for {rows}')
    task = self._bar.add_task('compiling', total=None)
    yield
    self._bar.remove_task(task)
    seconds = time.monotonic() - begin
    self.aside += seconds
    self._logs.clear()
    self.print(f'compiled in {seconds:.1f} s')

  def _clock(self) -> float:
    return time.monotonic() - self.aside

  def advance(self, step: int) -> None:
    """Moves the bar; `step` is the number of finished steps."""
    if step == self._start + 1:
      # The speed excludes the compilation of the first step.
      self._last = (self._clock(), step, self.waited)
    self._bar.update(self._task, completed=step)

  def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs metrics of the steps since the last log, their speed and the ETA."""
    last, before, waited = self._last
    now = self._clock()
    self._last = now, step, self.waited
    seconds = max(now - last, 1e-9)
    speed, waiting = (step - before) / seconds, (self.waited - waited) / seconds
    examples = speed * self._setup.config.batch_size
    # Unknown at first: the device is still busy with steps dispatched before.
    left, eta = '-', math.nan
    if len(self._logs) > 1:
      first, start = self._logs[0]
      eta = (self._total - step) / (step - start) * (now - first)
      left = str(datetime.timedelta(0, int(eta)))
    self._logs.append((now, step))
    panels = [name for *_, labels in self._setup.task.PANELS for name in labels]
    names = 'loss', 'accuracy', *panels
    shown = {name: metrics[name] for name in names if name in metrics}
    shown |= {'steps/s': speed, 'examples/s': examples}
    end = f'  waiting for data {100 * waiting:.1f} %  ETA {left}'
    self._line(step, shown, end)
    self._rows[step] |= {f'train/{k}': v for k, v in metrics.items()} | {
      'time/steps_per_second': speed,
      'time/examples_per_second': examples,
      'time/eta_seconds': eta,
      'time/waiting_for_data': waiting,
    }

  def log_evaluation(self, step: int, measured: Mapping[str, float]) -> None:
    """Logs the metrics of evaluators."""
    if measured:
      self._rows[step] |= measured
      self._line(step, _few(measured))

  def _line(self, step: int, shown: Mapping[str, float], end: str = '') -> None:
    line = ''.join(f'  {name} {value:.4g}' for name, value in shown.items())
    self.print(f'step {step:{len(str(self._total))}d}/{self._total}{line}{end}')

  def flush(self) -> None:
    """Writes one object per step to metrics.jsonl, and to TensorBoard."""
    for step, kept in self.unwritten().items():
      self._run.log(step, kept)
      row = self._rows.pop(step)
      if self._tensorboard is None:
        continue
      with self._writing():
        for name, value in row.items():
          if math.isfinite(value):  # the ETA is unknown at first
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

  def _writing(self) -> contextlib.AbstractContextManager[None]:
    return writing(self._run.workdir / 'tensorboard')

  def unwritten(self) -> dict[int, dict[str, float]]:
    """Returns the rows of `metrics.jsonl` that `flush` will write, by step."""
    # A resumed run writes the same lines, so times are not among them.
    return {
      step: {k: v for k, v in row.items() if not k.startswith('time/')}
      for step, row in self._rows.items()
    }

  def finish(self, result: Mapping[str, Any]) -> None:
    """Prints the final metrics, the time and the path of the plot."""
    from eval_lib import run_plots

    self._bar.stop()
    if self._primary:
      workdir = self._run.workdir
      self._console.print(_table(_few(result)))
      self.print(f'run directory: {workdir} (result.json, metrics.jsonl)')
      try:
        panels = self._setup.task.PANELS
        self.print(f'plot: {run_plots.plot_run(workdir, panels)}')
      except (ImportError, OSError, ValueError) as error:
        self.print(f'no plot: {error}')


def _warn(console: rich.console.Console, text: str) -> None:
  console.print(f'warning: {text}', style='red', markup=False)


def _few(metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Leaves out those of many thresholds, which files have."""
  return {name: x for name, x in metrics.items() if '_tau_' not in name}


def _table(rows: Mapping[str, Any]) -> rich.table.Table:
  table = rich.table.Table(show_header=False, box=None)
  for name, value in rows.items():
    text = f'{value:.4f}' if isinstance(value, float) else str(value)
    table.add_row(*(rich.text.Text(printable(t)) for t in (name, text)))
  return table


def print_start(console: rich.console.Console, setup: Setup, step: int) -> None:
  """Prints parameters per module, sizes and FLOPs, on one screen."""
  config, info, flops = setup.config, setup.dataset.info, setup.task.flops()
  counted = '' if setup.task.has_formula else ' (the compiler, loops once)'
  parameters = parameter_counts(setup.abstract.params)
  shape = ', '.join(map(str, (config.batch_size, *info.input_shape)))
  tasks = {name: one.stop - one.start for name, one in info.tasks.items()}
  classes = ', '.join(f'{count} of {name}' for name, count in tasks.items())
  count = info.num_classes if info.num_classes != 1 else 'a number'
  rows = {
    'parameters': f'{sum(parameters.values()):,}',
    **{f'  {name}': f'{count:,}' for name, count in parameters.items()},
    'input': f'{info.input_key} [{shape}] {info.input_dtype}',
    'classes': classes or count,
    'examples': f'{info.num_examples:,}',
    'forward FLOPs per example': f'{flops:,.0f}{counted}',
    # Backward costs about two forward passes: gradients of inputs and weights.
    'train step FLOPs': f'{3 * flops * config.batch_size:.3g}',
    'mesh': dict(setup.mesh.shape),
  }
  if info.length_buckets:
    lengths = ', '.join(map(str, info.length_buckets))
    rows['lengths'] = f'{lengths}; FLOPs are those of the longest'
  console.print(_table(rows))
  if setup.not_split:
    _warn(console, f'not split, as they do not divide: {setup.not_split}')
  where = f'continues at step {step}' if step else 'starts'
  console.print(
    f'{config.task} {where}: {setup.total_steps} steps on {setup.mesh.size} of '
    f'{jax.device_count()} {jax.default_backend()} devices'
  )


def parameter_counts(params: Mapping[str, Any]) -> dict[str, int]:
  """Counts parameters per top-level module; numbered modules share a row."""
  groups = collections.defaultdict(list)
  for name, module in params.items():
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(module))
    groups[re.sub(r'_\d+$', '_*', name)].append(size)
  return {
    f'{name} ({len(sizes)})' if name.endswith('_*') else name: sum(sizes)
    for name, sizes in groups.items()
  }


def print_dry_run(setup: Setup) -> None:
  """Compiles all steps; prints arrays, and the largest memory of the phases."""
  console = rich.console.Console(**STYLE)
  params = setup.abstract.params
  overview = parameter_overview.get_parameter_overview
  console.print(overview(params, include_stats=False), markup=False)
  batch = setup.batch_shapes(setup.dataset.row_shapes())
  print_start(console, setup, 0)
  steps = [compiled.inspect(setup.step(p, batch)[0]) for p in setup.phases]
  state, temporary = (
    max(getattr(step, name) for step in steps) / 2**20
    for name in ('arguments', 'temporary')
  )
  console.print(_table({
    'memory per device: state and batch': f'{state:,.1f} MiB',
    'memory per device: temporary': f'{temporary:,.1f} MiB',
    'step FLOPs per device, compiler': f'{max(s.flops for s in steps):.3g}',
  }))  # fmt: skip
  console.print('dry run: everything was built and compiled; nothing written')
