"""What a person sees at the start and at the end of a run, and of a dry run."""

from typing import Any

import jax
import numpy as np
import rich.console
import rich.table
from clu import parameter_overview

from train_lib.setup import Setup


def print_start(setup: Setup, console: rich.console.Console, step: int) -> None:
  """Prints the parameter table, sizes and FLOPs, and where the run starts."""
  params = setup.abstract.params
  console.print(
    parameter_overview.get_parameter_overview(params, include_stats=False),
    markup=False,
  )
  console.print(_sizes(setup))
  where = f'continues at step {step}' if step else 'starts'
  console.print(
    f'{setup.config.task} {where}: {setup.total_steps} steps on '
    f'{setup.mesh.size} of {jax.device_count()} {jax.default_backend()} devices'
  )


def _sizes(setup: Setup) -> rich.table.Table:
  info, flops = setup.dataset.info, setup.task(setup.stages[0]).flops()
  rows = {
    'parameters': f'{parameter_count(setup):,}',
    'input': f'{info.input_key} [{setup.config.batch_size}, '
    + ', '.join(map(str, info.input_shape))
    + f'] {info.input_dtype}',
    'classes': 'a number, no classes'
    if info.num_classes == 1
    else str(info.num_classes),
    'examples': f'{info.num_examples:,}',
    'forward FLOPs per example': f'{flops:,.0f}',
    # Backward costs two forwards: one for the inputs, one for the weights.
    'train step FLOPs': f'{3 * flops * setup.config.batch_size:.3g}',
    'mesh': str(dict(setup.mesh.shape)),
  }
  if info.length_buckets:
    lengths = ', '.join(map(str, info.length_buckets))
    rows['lengths'] = f'{lengths}; FLOPs are those of the longest'
  return _table(rows)


def compiled_line(setup: Setup, stage: Any, batch: Any, seconds: float) -> str:
  """One line about a train step that was just compiled."""
  name = setup.dataset.info.input_key
  shape = ', '.join(map(str, batch[name].shape))
  return (
    f'compiled the step of {stage.name} for {name} [{shape}] in {seconds:.1f} s'
  )


def parameter_count(setup: Setup) -> int:
  """Number of trained parameters."""
  leaves = jax.tree.leaves(setup.abstract.params)
  return sum(int(np.prod(leaf.shape)) for leaf in leaves)


def print_dry_run(setup: Setup, compiled: Any) -> None:
  """Prints what a run would be: sizes, FLOPs, memory by the compiler."""
  console = rich.console.Console(highlight=False, soft_wrap=True)
  print_start(setup, console, 0)
  memory = compiled.memory_analysis()
  arguments = memory.argument_size_in_bytes / 2**20
  temporary = memory.temp_size_in_bytes / 2**20
  cost = compiled.cost_analysis() or {}
  rows = {
    'memory per device: state and batch': f'{arguments:,.1f} MiB',
    'memory per device: temporary': f'{temporary:,.1f} MiB',
    'step FLOPs per device, compiler': f'{cost.get("flops", 0):.3g}',
  }
  console.print(_table(rows))
  console.print('dry run: everything was built and compiled; nothing written')


def print_end(
  result: dict[str, Any], workdir: str, console: rich.console.Console
) -> None:
  """Prints the final metrics, the time, and where the plot is."""
  rows = {
    name: f'{value:.4f}' if isinstance(value, float) else str(value)
    for name, value in result.items()
  }
  console.print(_table(rows))
  console.print(f'run directory: {workdir} (result.json, metrics.jsonl)')
  console.print(plot(workdir))


def plot(workdir: str) -> str:
  """Draws the run; returns the line to print, also when it cannot be drawn."""
  from eval_lib import run_plot

  try:
    return f'plot: {run_plot.plot_run(workdir)}'
  except (ImportError, ValueError) as error:
    return f'no plot: {error}'


def _table(rows: dict[str, str]) -> rich.table.Table:
  table = rich.table.Table(show_header=False, box=None)
  for name, value in rows.items():
    table.add_row(name, value)
  return table
