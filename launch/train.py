"""Trains a model from a configuration file.

  python -m launch.train --config=configs/adatape/parity.py --workdir=/tmp/run

Any field can be overridden, and a file may take an argument after a colon:

  python -m launch.train --config=configs/adatape/parity.py:n=32,model=ut \\
      --workdir=/tmp/run --config.optimizer.lr=3e-4 --config.seed=1

The same command continues an interrupted run from its last checkpoint. The
workdir then holds config.json, versions.json, metrics.jsonl, checkpoints,
TensorBoard files, run.png and, at the end, result.json. Several processes
(--distributed is enough on a TPU pod or under SLURM):

  python -m launch.train ... --distributed --coordinator=host:port \\
      --num_processes=2 --process_id=0     # and 1 on the other
"""

import contextlib
import dataclasses
import logging
import os
import sys
import time
from typing import Any

from core import fields, machine
from core.errors import ConfigError
from core.fields import flag
from launch import command_line
from launch.command_line import Count, Positive, Workdir

STARTED = time.monotonic()
# Bytes: freed memory that is kept fits later requests badly, so that a program
# whose temporaries take 2 GB may come to hold 10.
AMPLE_MEMORY = 16 * 10**9
_ORBAX = os.path.join('orbax', 'checkpoint')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of a training."""

  config: str = flag('the experiment', metavar='FILE.py[:argument]')
  overrides: tuple[str, ...] = command_line.overrides_flag()
  workdir: Workdir = flag('directory of the run', '', 'DIRECTORY')
  dry_run: bool = flag('compile, print sizes and FLOPs, write nothing', False)
  print_config: bool = flag('print every field, its default too; end', False)
  distributed: bool = flag('join the other processes of the run first', False)
  coordinator: str | None = flag('address of process 0', None, 'HOST:PORT')
  num_processes: Positive | None = flag('number of processes', None, 'COUNT')
  process_id: Count | None = flag('index of this process', None, 'NUMBER')


def run(flags: Flags) -> int | None:
  """Trains, or builds and compiles."""
  config = command_line.load_config(flags.config, flags.overrides)
  if flags.print_config:
    from train_lib.config_schema import Run

    for key, value in fields.flat(fields.override(Run, config, ())):
      print(f'{key} = {value!r}')
    return None
  peers = flags.coordinator, flags.num_processes, flags.process_id
  if peers != (None, None, None) and not flags.distributed:
    names = '--coordinator, --num_processes, --process_id'
    raise ConfigError(names, peers, 'none without --distributed')
  if not flags.dry_run:
    if not flags.workdir:
      expected = 'a directory for the run (or use --dry_run)'
      raise ConfigError('--workdir', flags.workdir, expected)
    command_line.check_place('--workdir', flags.workdir)
  from serve_lib import process, program_cache
  from train_lib import trainer

  _silence_repeated_errors()
  if machine.has_only_cpu() and machine.memory() >= AMPLE_MEMORY:
    process.keep_freed_memory()
  if flags.distributed:
    _join(*peers)
  keeping = contextlib.nullcontext if flags.dry_run else program_cache.kept
  try:
    workdir = os.path.abspath(flags.workdir)
    with keeping():
      trainer.train(config, workdir, STARTED, flags.dry_run)
  except trainer.Preempted as stop:
    print(stop, file=sys.stderr)
    return command_line.PREEMPTED
  return None


def _silence_repeated_errors() -> None:
  """Leaves the one line of a failed save that this command prints.

  Orbax prints the trace of the error that it raises, asyncio of writes that
  fail after the first, TensorStore of writes that end after the event loop.
  """
  filters = {
    'absl': lambda record: _ORBAX not in record.pathname,
    'asyncio': lambda record: 'never retrieved' not in record.msg,
  }
  for name, keep in filters.items():
    logging.getLogger(name).addFilter(keep)
  before = sys.unraisablehook

  def show(unraisable: Any) -> None:
    if str(unraisable.exc_value) != 'Event loop is closed':
      before(unraisable)

  sys.unraisablehook = show


def _join(*peers: Any) -> None:
  """Joins the other processes; JAX detects missing values on a cluster."""
  import jax

  # `train_lib.watchdog` finds a dead process after 20 s; JAX, which ends the
  # others with a native stack, must be later also on a busy machine.
  names = 'heartbeat_timeout_seconds', 'shutdown_timeout_seconds'
  timeouts: Any = dict.fromkeys(names, 60)
  try:
    jax.distributed.initialize(*peers, **timeouts)
  except ValueError as error:
    expected = 'the address of process 0, --num_processes and --process_id '
    expected += f'below it, or a cluster on which JAX finds them ({error})'
    raise ConfigError('--coordinator', peers[0], expected) from error


main = command_line.Command('train', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
