"""Trains a model from a configuration file.

  python -m launch.train --config=configs/adatape/parity.py --workdir=/tmp/run

Any field of the configuration can be overridden, and a file may take an
argument after a colon:

  python -m launch.train --config=configs/adatape/parity.py:n=32,model=ut \\
      --workdir=/tmp/run --config.optimizer.lr=3e-4 --config.seed=1

The same command continues an interrupted run from its last checkpoint. The
workdir then holds config.json, versions.json, metrics.jsonl, checkpoints,
TensorBoard files, run.png and, at the end, result.json.
"""

import os
import sys
import time
from collections.abc import Sequence

from launch import command_line, config_flags

STARTED = time.time()

MULTI_PROCESS = """\
several processes (a TPU pod finds its own peers: --distributed is enough):
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
  add('--coordinator', metavar='HOST:PORT', default=None)
  add('--num_processes', type=int, default=None)
  add('--process_id', type=int, default=None)
  return result


def parse(argv: Sequence[str]):
  """Returns (arguments, validated config); touches no device.

  Raises:
    command_line.UsageError: or `ConfigError`, for anything wrong.
  """
  rest, overrides = config_flags.split(argv)
  arguments = command_line.parse_arguments(parser(), rest)
  config = config_flags.load_config(arguments.config, overrides)
  _check_peers(arguments)
  if not arguments.dry_run:
    if not arguments.workdir:
      raise command_line.UsageError(
        '--workdir: expected a directory for the run (or use --dry_run)'
      )
    command_line.check_workdir(arguments.workdir)
  return arguments, config


def _check_peers(arguments) -> None:
  """Raises UsageError unless the flags about processes fit together."""
  count, place = arguments.num_processes, arguments.process_id
  peers = (arguments.coordinator, count, place)
  given = [peer is not None for peer in peers]
  if any(given) and not (arguments.distributed and arguments.coordinator):
    raise command_line.UsageError(
      '--coordinator, --num_processes, --process_id: expected together, with '
      '--distributed'
    )
  if count is not None and count < 1:
    raise command_line.UsageError(
      f'--num_processes: expected an integer of at least 1, got {count}'
    )
  if place is not None and count is not None and not 0 <= place < count:
    raise command_line.UsageError(
      f'--process_id: expected an integer in [0, {count - 1}], got {place}'
    )


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return command_line.main(parse, run, argv)


def join(arguments) -> None:
  """Joins the other processes; a dead one ends us all in 30 s and not 300."""
  import jax

  jax.distributed.initialize(
    arguments.coordinator,
    arguments.num_processes,
    arguments.process_id,
    heartbeat_timeout_seconds=20,
    shutdown_timeout_seconds=20,
  )


def run(arguments, config) -> int:
  """Trains, or builds and compiles."""
  from train_lib import trainer
  from train_lib.preemption import Preempted

  if arguments.distributed:
    join(arguments)
  workdir = os.path.abspath(arguments.workdir or '')
  try:
    trainer.train(config, workdir, STARTED, arguments.dry_run)
  except Preempted as stop:
    print(stop, file=sys.stderr)
    return command_line.PREEMPTED
  return command_line.OK


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
