"""Trains a model from a configuration file.

  python -m launch.train --config=configs/adatape/parity.py --workdir=/tmp/run

Any field can be overridden, and a file may take an argument after a colon:

  python -m launch.train --config=configs/adatape/parity.py:n=32,model=ut \\
      --workdir=/tmp/run --config.optimizer.lr=3e-4 --config.seed=1

The same command continues an interrupted run from its last checkpoint. The
workdir then holds config.json, versions.json, metrics.jsonl, checkpoints,
TensorBoard files, run.png and, at the end, result.json.
"""

import functools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from dataset_lib.errors import ConfigError
from launch import command_line, config_flags
from launch.command_line import UsageError

STARTED = time.time()

MULTI_PROCESS = """\
several processes (--distributed is enough on a TPU pod or under SLURM):
  python -m launch.train ... --distributed --coordinator=host:port \\
      --num_processes=2 --process_id=0     # and 1 on the other
"""


def parser() -> command_line.Parser:
  """The command line, apart from the --config.key=value overrides."""
  result = command_line.Parser(
    prog='python -m launch.train',
    description=__doc__,
    epilog=MULTI_PROCESS + '\n' + command_line.EXIT_CODES,
  )
  add = result.add_argument
  add('--config', required=True, metavar='FILE.py[:argument]',
      help='the experiment, e.g. configs/adatape/digits.py')  # fmt: skip
  add('--config.KEY', dest='unused', metavar='VALUE',
      help='overrides a field, e.g. --config.optimizer.lr=3e-4')  # fmt: skip
  add('--workdir', metavar='DIRECTORY',
      help='where the run is written; not needed for --dry_run')  # fmt: skip
  add('--dry_run', action='store_true',
      help='build and compile everything, print parameters, FLOPs, memory '
      'and input shapes, write nothing and stop')  # fmt: skip
  add('--distributed', action='store_true',
      help='join the other processes of the run first')  # fmt: skip
  add('--coordinator', metavar='HOST:PORT')
  add('--num_processes', type=command_line.positive, metavar='COUNT')
  add('--process_id', type=command_line.count, metavar='NUMBER')
  return result


def parse(argv: Sequence[str]):
  """Returns (arguments, validated config); touches no device."""
  rest, overrides = config_flags.split(argv)
  arguments = command_line.parse_arguments(parser(), rest)
  config = config_flags.load_config(arguments.config, overrides)
  if set(_peers(arguments)) != {None} and not arguments.distributed:
    raise UsageError(
      '--coordinator, --num_processes, --process_id: expected only with '
      '--distributed'
    )
  if not arguments.dry_run:
    if not arguments.workdir:
      raise UsageError(
        '--workdir: expected a directory for the run (or use --dry_run)'
      )
    command_line.check_workdir(arguments.workdir)
  return arguments, config


def _peers(arguments):
  return arguments.coordinator, arguments.num_processes, arguments.process_id


def _join(arguments) -> None:
  """Joins the other processes; JAX finds what is not given, as on a cluster."""
  import jax

  # A process that died ends the others in 30 s and not 300.
  timeouts: Any = dict(
    heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20
  )
  try:
    jax.distributed.initialize(*_peers(arguments), **timeouts)
  except ValueError as error:
    raise ConfigError(
      '--coordinator',
      arguments.coordinator,
      'the address of process 0, --num_processes and --process_id below it, '
      f'or a cluster on which JAX finds them ({error})',
    ) from error


def run(arguments, config) -> int:
  """Trains, or builds and compiles."""
  from train_lib import trainer
  from train_lib.preemption import Preempted

  if arguments.distributed:
    _join(arguments)
  workdir = os.path.abspath(arguments.workdir or '')
  try:
    trainer.train(config, workdir, STARTED, arguments.dry_run)
  except Preempted as stop:
    print(stop, file=sys.stderr)
    return command_line.PREEMPTED
  return command_line.OK


main = functools.partial(command_line.main, parse, run)

if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
