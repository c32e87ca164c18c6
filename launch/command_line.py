"""Errors of one line, exit codes, flags and their types of all command lines.

Nothing here imports jax, so that a wrong command line is answered at once.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn

from annotated_types import Ge, Interval, MinLen

from dataset_lib import errors, fields

OK, USAGE, NOT_FINITE, DATA, LOCKED, CHECKPOINT = 0, 2, 3, 4, 5, 6
PREEMPTED, INTERRUPTED, OUTPUT_CLOSED = 75, 130, 141

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


def parse_arguments(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
  """Returns `parser.parse_args`; names the flag nearest to an unknown one."""
  arguments, unknown = parser.parse_known_args(list(argv))
  if not unknown:
    return arguments
  name = unknown[0].partition('=')[0]
  near = difflib.get_close_matches(name, list(_flags(parser, arguments)), 1)
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


def main(
  parse: Callable[[Sequence[str]], tuple[Any, ...]],
  command: Callable[..., int],
  argv: Sequence[str],
) -> int:
  """Runs `command(*parse(argv))`; an error of `parse` becomes exit code 2."""
  try:
    parsed = parse(argv)
  except (UsageError, errors.ConfigError) as error:
    fail(error)
  return run(lambda: command(*parsed))


def run(command: Callable[[], int]) -> int:
  """Runs a command; an expected error becomes one line and its exit code."""
  from train_lib.checkpoint_io import CheckpointError, CheckpointMismatchError
  from train_lib.run_directory import ConfigChangedError, RunLockedError
  from train_lib.train_step import NonFiniteError

  codes: dict[type[Exception], int] = {
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
  try:
    return command()
  except tuple(codes) as error:
    fail(error, next(c for kind, c in codes.items() if isinstance(error, kind)))
  except KeyboardInterrupt:
    fail('interrupted', INTERRUPTED)


def fail(message: object, code: int = USAGE) -> NoReturn:
  """Prints one line on stderr and exits with the code."""
  print('error:', ' '.join(str(message).split()), file=sys.stderr)
  raise SystemExit(code)


def _type(
  words: str, hint: Any, names: Mapping[str, Any] | None = None
) -> Callable[[str], Any]:
  """Returns the type of a flag: an annotation's, or one of some names.

  Tuples are ascending.
  """

  def read(text: str) -> Any:
    if names and text in names:
      return names[text]
    value = fields.check_value('', fields.Unread(text), hint)
    return tuple(sorted(set(value))) if isinstance(value, tuple) else value

  # argparse prints it when the type refuses a text.
  read.__name__ = words
  return read


_Positive, _Count = Annotated[int, Ge(1)], Annotated[int, Ge(0)]
_Sizes = Annotated[tuple[_Positive, ...], MinLen(1)]
_Percent = Annotated[int, Interval(ge=0, le=100)]
_STEPS = {'latest': None, 'best': 'best'}

positive = _type('positive integer', _Positive)
count = _type('integer of 0 or more', _Count)
seconds = _type(
  'positive number of seconds', Annotated[float, Interval(gt=0, lt=1e9)]
)
sizes = _type('list of positive integers such as 1,16', _Sizes)
percents = _type(
  'list of integers from 0 to 100 such as 0,80',
  Annotated[tuple[_Percent, ...], MinLen(1)],
)
checkpoint = _type("step: 'latest', 'best' or a number", _Count, _STEPS)
checkpoints = _type(
  "step: 'latest', 'best', 'all' or a number", _Count, _STEPS | {'all': 'all'}
)


def add_run_flags(parser: Parser) -> None:
  """Adds --workdir and --step of a command that reads a run."""
  add = parser.add_argument
  add('--workdir', required=True, metavar='DIRECTORY',
      help='directory of the run')  # fmt: skip
  add('--step', type=checkpoint, default='latest', metavar='STEP',
      help='latest (default), best, or a number')  # fmt: skip


def check_texts(workdir: str, why: str = '') -> None:
  """Raises `UsageError`, which ends with `why`, if a run has no tokenizer."""
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
