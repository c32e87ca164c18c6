"""Errors of one line, exit codes, flags and their types of all command lines.

Nothing here imports jax, so that a wrong command line is answered at once.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

OK = 0
USAGE = 2  # the command line or the configuration is wrong
NOT_FINITE = 3  # the loss became NaN or infinite
DATA = 4  # a data set is missing or damaged
LOCKED = 5  # another run is using the workdir
CHECKPOINT = 6  # a checkpoint could not be written or read
PREEMPTED = 75  # asked to stop; saved, start again to go on
INTERRUPTED = 130  # Ctrl-C, as a shell reports it
OUTPUT_CLOSED = 141  # stdout was closed; SIGPIPE, as a shell reports it

EXIT_CODES = """\
exit codes:
  0   finished
  2   the command line or the configuration is wrong; nothing was written
  3   the loss was not finite; the last checkpoint is good
  4   a data set is missing or damaged
  5   another run is using the workdir
  6   a checkpoint could not be written or read
  75  asked to stop (SIGTERM); the step is saved, the same command goes on
  130 interrupted (Ctrl-C)
  141 stdout was closed, as by `| head`; nothing is wrong
"""


class UsageError(ValueError):
  """The command line is wrong; the message says what is expected."""


class Parser(argparse.ArgumentParser):
  """An argparse parser whose errors are `UsageError`s of one line."""

  def __init__(
    self, prog: str, description: str | None, epilog: str = EXIT_CODES
  ):
    super().__init__(
      prog=prog,
      description=description,
      epilog=epilog,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
    )

  def error(self, message: str) -> NoReturn:
    """Raises instead of printing the usage and exiting."""
    raise UsageError(f'{message}; see --help')


def fail(message: object, code: int = USAGE) -> NoReturn:
  """Prints one line on stderr and exits with the code."""
  text = ' '.join(str(message).split())
  print(f'error: {text}', file=sys.stderr)
  raise SystemExit(code)


def failures() -> dict[type[Exception], int]:
  """Returns the exit code of each expected error of a command.

  Imported late: a wrong command line is answered without them.
  """
  from dataset_lib import errors
  from train_lib.checkpoint_io import CheckpointError, CheckpointMismatchError
  from train_lib.run_directory import ConfigChangedError, RunLockedError
  from train_lib.train_step import NonFiniteError

  return {
    errors.ConfigError: USAGE,
    ConfigChangedError: USAGE,
    CheckpointMismatchError: CHECKPOINT,
    errors.MissingDataError: DATA,
    errors.InvalidDataError: DATA,
    errors.TooManyBadRecordsError: DATA,
    NonFiniteError: NOT_FINITE,
    RunLockedError: LOCKED,
    CheckpointError: CHECKPOINT,
  }


def run(command: Callable[[], int]) -> int:
  """Runs a command; a known failure becomes one line and its exit code."""
  known = failures()
  try:
    return command()
  except tuple(known) as error:
    fail(error, next(c for kind, c in known.items() if isinstance(error, kind)))
  except KeyboardInterrupt:
    fail('interrupted', INTERRUPTED)


def main(
  parse: Callable[[Sequence[str]], tuple[Any, ...]],
  command: Callable[..., int],
  argv: Sequence[str],
) -> int:
  """Runs `command(*parse(argv))`; returns its exit code.

  Whatever is wrong with the command line or the configuration becomes one line
  and exit code 2, before the command has begun.
  """
  from dataset_lib.errors import ConfigError

  try:
    parsed = parse(argv)
  except (UsageError, ConfigError) as error:
    fail(error)
  return run(lambda: command(*parsed))


def parse_arguments(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
  """`parser.parse_args`, with the nearest name for a mistyped flag.

  Raises:
    UsageError: one line about what is wrong.
  """
  arguments, unknown = parser.parse_known_args(list(argv))
  if not unknown:
    return arguments
  flags = list(_flags(parser, arguments))
  name = unknown[0].partition('=')[0]
  near = difflib.get_close_matches(name, flags, 1)
  hint = f'did you mean {near[0]}? ' if near else ''
  raise UsageError(f'{name}: no such flag; {hint}see --help')


def _flags(
  parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> Iterator[str]:
  """Yields the flags of a parser, and of the subcommand that was given."""
  for action in parser._actions:
    yield from action.option_strings
    if isinstance(action, argparse._SubParsersAction):
      given = getattr(arguments, action.dest, None)
      yield from _flags(action.choices[given], arguments) if given else ()


# Types of flags: each reads a text or raises ValueError. argparse prints their
# names when they refuse a text.


def positive(text: str) -> int:
  """An integer above 0."""
  if not text.isdecimal() or int(text) < 1:
    # The type argparse turns into a message that names the flag.
    raise ValueError(text)
  return int(text)


def count(text: str) -> int:
  """An integer, 0 or more."""
  return 0 if text == '0' else positive(text)


def sizes(text: str) -> tuple[int, ...]:
  """`1,16` as ascending integers above 0."""
  return tuple(sorted({positive(size) for size in text.split(',')}))


def sizes_or_none(text: str) -> tuple[int, ...]:
  """As `sizes`, or () for `none`."""
  return () if text == 'none' else sizes(text)


def percents(text: str) -> tuple[int, ...]:
  """`0,80` as ascending integers from 0 to 100."""
  rates = sorted({count(rate) for rate in text.split(',')})
  if rates[-1] > 100:
    raise ValueError(text)
  return tuple(rates)


def seconds(text: str) -> float:
  """A finite number above 0."""
  value = float(text)
  if not 0.0 < value < 1e9:
    raise ValueError(text)
  return value


def checkpoint(text: str) -> int | str | None:
  """A step's number, 'best', or None for `latest`."""
  if text == 'latest':
    return None
  return 'best' if text == 'best' else count(text)


def checkpoints(text: str) -> int | str | None:
  """As `checkpoint`, or 'all'."""
  return 'all' if text == 'all' else checkpoint(text)


positive.__name__ = 'positive integer'
count.__name__ = 'integer of 0 or more'
sizes.__name__ = 'list of positive integers such as 1,16'
sizes_or_none.__name__ = "list of positive integers such as 1,16, or 'none'"
percents.__name__ = 'list of integers from 0 to 100 such as 0,80'
checkpoint.__name__ = "step: 'latest', 'best' or a number"
checkpoints.__name__ = "step: 'latest', 'best', 'all' or a number"
seconds.__name__ = 'positive number of seconds'


def add_run_flags(parser: Parser) -> None:
  """Adds --workdir and --step of a command that reads a run."""
  add = parser.add_argument
  add('--workdir', required=True, metavar='DIRECTORY',
      help='directory of the run')  # fmt: skip
  add('--step', type=checkpoint, default='latest', metavar='STEP',
      help='latest (default), best, or a number')  # fmt: skip


def check_texts(workdir: str, why: str = '') -> None:
  """Raises `UsageError` unless a run is one on texts, with its tokenizer.

  Args:
    workdir: of the run.
    why: what a run on token ids cannot do, ends the message.
  """
  from train_lib.run_directory import TOKENIZER

  if not os.path.isfile(os.path.join(workdir, TOKENIZER)):
    raise UsageError(
      f'--workdir: expected a run with its {TOKENIZER}, there is none in '
      f'{workdir!r}{why and "; " + why}'
    )


def check_workdir(workdir: str) -> None:
  """Raises `UsageError` unless the directory is there or can be made."""
  if '..' in workdir.split(os.sep):
    raise UsageError(
      f"--workdir: expected a path without '..', got {workdir!r}"
    )
  check_place('--workdir', workdir)


def check_new_directory(flag: str, directory: str) -> None:
  """Raises `UsageError` unless a directory can be made, or is there, empty."""
  check_place(flag, directory)
  if os.path.isdir(directory) and os.listdir(directory):
    raise UsageError(
      f'{flag}: expected a new or empty directory, got {directory!r} with '
      f'{sorted(os.listdir(directory))[0]!r} in it; name another'
    )


def check_place(flag: str, directory: str) -> None:
  """Raises `UsageError` unless the directory of a flag is or can be there."""
  path = os.path.abspath(directory)
  if os.path.exists(path) and not os.path.isdir(path):
    raise UsageError(f'{flag}: expected a directory, {path!r} is a file')
  while not os.path.exists(path):
    path = os.path.dirname(path)
  if not os.path.isdir(path) or not os.access(path, os.W_OK):
    raise UsageError(
      f'{flag}: expected a place to write, {path!r} is not writable'
    )
