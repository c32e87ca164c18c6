"""What the command lines share: one-line errors, exit codes, config flags.

Nothing here imports jax, so that a wrong command line is answered at once.
"""

import argparse
import ast
import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import ml_collections

OK = 0
USAGE = 2  # the command line or the configuration is wrong
NOT_FINITE = 3  # the loss became NaN or infinite
DATA = 4  # a data set is missing or damaged
LOCKED = 5  # another run is using the workdir
CHECKPOINT = 6  # a checkpoint could not be written or read
PREEMPTED = 75  # asked to stop; saved, start again to go on
INTERRUPTED = 130  # Ctrl-C, as a shell says it
OUTPUT_CLOSED = 141  # nobody reads stdout any more; SIGPIPE, as a shell says it

# Groups whose other legal fields the data set, model or evaluator knows, which
# checks their names: a field with a default need not stand in the file.
OPEN = ('dataset', 'evals', 'loss', 'model', 'stages')

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
  141 nobody reads the output any more, as behind `| head`; nothing is wrong
"""


class UsageError(ValueError):
  """The command line is wrong; the message says what is expected."""


class Parser(argparse.ArgumentParser):
  """An argparse parser whose errors are `UsageError`s of one line."""

  def __init__(self, prog: str, description: str | None, epilog: str):
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


def load_config(
  flag: str, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
  """Loads `file.py[:argument]` and applies `key=value` overrides.

  Args:
    flag: path of a Python file with `get_config`, and its argument.
    overrides: `'optimizer.lr=1e-3'`, read with the type of the default.

  Raises:
    UsageError: naming the key, the nearest legal name or the expected type.
  """
  path, _, argument = flag.partition(':')
  if not path.endswith('.py') or not os.path.isfile(path):
    raise UsageError(
      f'--config: expected a Python file such as '
      f'configs/adatape/parity.py, got {path!r}{_near_file(path)}'
    )
  get_config = _get_config(path)
  try:
    config = get_config(argument) if argument else get_config()
  except (ValueError, TypeError) as error:
    raise UsageError(f'--config={flag}: {error}') from error
  apply_overrides(config, overrides)
  # Imported late: a wrong command line is answered without waiting for jax.
  from train_lib import config_schema

  config_schema.resolve(config)
  return config


def apply_overrides(
  config: ml_collections.ConfigDict, overrides: Sequence[str]
) -> None:
  """Applies `key=value` overrides in place; see `load_config`."""
  config.lock()
  for override in overrides:
    _override(config, override)


def parse_fields(flag: str, text: str) -> dict[str, object]:
  """Reads `name=folder,root=/data,image_size=64` into a dictionary."""
  fields: dict[str, object] = {}
  for item in text.split(','):
    name, separator, value = item.partition('=')
    if not separator:
      raise UsageError(f'{flag}: expected key=value, got {item!r}')
    fields[name] = int(value) if re.fullmatch(r'-?\d+', value) else value
  return fields


def _get_config(path: str) -> Callable[..., ml_collections.ConfigDict]:
  spec = importlib.util.spec_from_file_location('experiment_config', path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    return module.get_config
  except (SyntaxError, ImportError, AttributeError) as error:
    raise UsageError(
      f'--config: {path} is no configuration, expected a file that defines '
      f'get_config: {error}'
    ) from error


def _near_file(path: str) -> str:
  names = [
    os.path.join(folder, name)
    for folder, _, names in os.walk('configs')
    for name in names
    if name.endswith('.py') and not name.startswith('_')
  ]
  near = difflib.get_close_matches(path, names, 1)
  return f'; did you mean {near[0]!r}?' if near else ''


def _override(config: ml_collections.ConfigDict, override: str) -> None:
  key, separator, text = override.partition('=')
  if not separator:
    raise UsageError(f'--config.{key}: expected --config.{key}=value')
  *parents, name = key.split('.')
  node = config
  for depth, parent in enumerate(parents):
    node = _child(node, parent, '.'.join(parents[:depth]))
    if not isinstance(node, ml_collections.ConfigDict):
      raise UsageError(
        f'--config.{key}: {parent!r} is a value, not a group of fields'
      )
  if name not in node and parents and parents[0] in OPEN:
    with config.unlocked():
      node[name] = _literal(text)
    return
  current = _child(node, name, '.'.join(parents))
  node[name] = read_value(key, text, current)


def _literal(text: str) -> object:
  if text.lower() in ('true', 'false'):
    return text.lower() == 'true'
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _child(node: ml_collections.ConfigDict, name: str, prefix: str):
  if name in node:
    return node[name]
  key = f'{prefix}.{name}' if prefix else name
  near = difflib.get_close_matches(name, list(node), 1, cutoff=0.5)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  raise UsageError(
    f'--config.{key}: no such field; {hint}legal here: {sorted(node)}'
  )


def read_value(key: str, text: str, current: object) -> object:
  """Reads an override with the type of the value it replaces.

  `1e3` is an integer where one is expected, `(1, 2)` and `1,2` are tuples.

  Raises:
    UsageError: if the text does not read as that type.
  """
  kind = type(current)
  try:
    if isinstance(current, bool):
      return {'true': True, '1': True, 'false': False, '0': False}[text.lower()]
    if isinstance(current, int):
      return _integer(text)
    if isinstance(current, float):
      return float(text)
    if isinstance(current, str):
      return text
    if isinstance(current, tuple):
      return _tuple(text, current)
  except (ValueError, KeyError, SyntaxError):
    raise UsageError(
      f'--config.{key}: expected {kind.__name__}, got {text!r}'
    ) from None
  raise UsageError(
    f'--config.{key}: a group of fields cannot be replaced from the command '
    'line; override its fields, or edit the file'
  )


def _integer(text: str) -> int:
  if re.fullmatch(r'[+-]?\d+', text):
    return int(text)
  number = float(text)
  if number != int(number):
    raise ValueError(text)
  return int(number)


def _tuple(text: str, current: tuple) -> tuple:
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    if text.startswith(('(', '[')):
      raise
    # Bare words: --config.dataset.augment=inception_crop,flip
    value = tuple(filter(None, text.split(',')))
  value = tuple(value) if isinstance(value, (tuple, list)) else (value,)
  kinds = {type(item) for item in current}
  if kinds and not all(type(item) in kinds | {int} for item in value):
    raise ValueError(text)
  return value


def split_config_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Separates `--config.key=value` (or `--config.key value`) from the rest.

  The order does not matter: overrides may stand before `--config`.
  """
  rest, overrides = [], []
  items = iter(argv)
  for item in items:
    if not item.startswith('--config.'):
      rest.append(item)
      continue
    body = item.removeprefix('--config.')
    if '=' not in body:
      body = f'{body}={next(items, "")}'
    overrides.append(body)
  return rest, overrides


def failures() -> dict[type[Exception], int]:
  """The known ways a command fails, with their exit codes.

  Imported late: a wrong command line is answered without them.
  """
  from dataset_lib import errors
  from train_lib.checkpoint import CheckpointError, CheckpointMismatchError
  from train_lib.nonfinite import NonFiniteError
  from train_lib.run_directory import ConfigChangedError, RunLockedError

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
  """The flags of a parser, and of the subcommand that was given."""
  for action in parser._actions:
    yield from action.option_strings
    if isinstance(action, argparse._SubParsersAction):
      given = getattr(arguments, action.dest, None)
      yield from _flags(action.choices[given], arguments) if given else ()


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
