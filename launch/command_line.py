"""Flags, configurations, errors of one line and exit codes of commands.

A command declares its flags as a dataclass of `flag`s; `Command` reads and runs
it. Nothing here imports jax, so that a wrong flag is answered at once.
"""

import argparse
import contextlib
import dataclasses
import difflib
import errno
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NoReturn

from annotated_types import Ge, Interval, MinLen, Predicate
from ml_collections import ConfigDict

from core import fields, files, machine, registry
from core.errors import ConfigError, UserError, shortened
from core.fields import flag

OK, USAGE, NOT_FINITE, DATA, LOCKED, CHECKPOINT, MEMORY = 0, 2, 3, 4, 5, 6, 7
UNAVAILABLE, PREEMPTED, INTERRUPTED, OUTPUT_CLOSED = 69, 75, 130, 141

MAX_LINE = 4000  # characters of an error
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}

OVERRIDE = '--config.KEY'
EXAMPLE = 'configs/adatape/parity.py'
# An argument of configuration files, which import no library.
MINILM = 'pretrained=minilm'

EXIT_CODES = """\
exit codes:
  0   finished
  2   the command line or the configuration is wrong; nothing was written
  3   the loss was not finite; the last checkpoint is good
  4   a data set, a text or a tokenizer is missing or damaged
  5   another run is using the workdir
  6   reading a checkpoint or writing a file failed, e.g. on a full disk
  7   a compiled step does not fit into the memory of a device
  8   another process of a training failed or does not answer
  9   a training made no progress for watchdog_seconds
  69  gcloud, kubectl or sbatch is missing or failed
  75  a training was asked to stop (SIGTERM); the same command continues
  130 interrupted (Ctrl-C)
  141 stdout was closed, as by `| head`; not an error
"""

Positive = Annotated[int, Ge(1), 'a positive integer']
Count = Annotated[int, Ge(0), 'an integer of 0 or more']
Sizes = Annotated[
  tuple[Annotated[int, Interval(ge=1, le=65536)], ...],
  MinLen(1),
  'a list of positive integers up to 65536 such as 1,16',
]
Names = Annotated[  # read by `eval_lib.report.names`
  str,
  Predicate(lambda text: not text or all('=' in s for s in text.split(';'))),
  "a list such as 'ut=UT;vit=ViT'",
]
Step = Literal['latest', 'best'] | Count
Workdir = Annotated[  # of checkpoints, which TensorStore writes
  str,
  Predicate(lambda path: '..' not in path.split(os.sep)),
  Predicate(lambda path: not path or is_plain(os.path.abspath(path))),
  "a path in UTF-8 without '..', ':/' and the characters [ * ? and \\",
]


def is_plain(path: str) -> bool:
  """Returns True for a path, with its parents, that is no pattern or URL."""
  is_text = path == path.encode(errors='ignore').decode()
  return is_text and not re.search(r'[\[*?\\]|:/', path)


class UsageError(UserError, ValueError):
  """The command line is wrong; the message says what is expected."""

  def __init__(self, message: object):
    super().__init__(shortened(message))


def overrides_flag() -> Any:
  """Declares `--config.KEY=VALUE`, any number of times, as 'KEY=VALUE's."""
  text = 'overrides a field, e.g. --config.optimizer.lr=3e-4'
  return flag(text, (), 'VALUE', OVERRIDE, many=True)


def training(
  config: str, workdir: object, overrides: Sequence[str]
) -> list[str]:
  """Returns the arguments of `python` that train a run."""
  flags = [f'--config={config}', f'--workdir={workdir}']
  return ['-m', 'launch.train', *flags, *(f'--config.{o}' for o in overrides)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
  """Flags of a command that reads a run."""

  workdir: str = flag('directory of the run', metavar='DIRECTORY')
  step: Step = flag('latest, best, or a number', 'latest')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreadFlags:
  """Flags of a command whose programs may be limited to some cores."""

  threads: Annotated[int, Interval(ge=0, le=4096)] = flag(
    'of programs; 0 (default) for the processors that the process may use: '
    'by affinity and by the quota of its container',
    0,
  )


@dataclasses.dataclass(frozen=True)
class Command:
  """A command line; call it to run the command."""

  name: str
  text: str | None  # help text
  flags: Any  # a dataclass of flags, or one for each subcommand
  run: Callable[[Any], int | None]  # gets one; returns an exit code, None: OK
  package: str = 'launch'

  def __call__(self, argv: Sequence[str] | None = None) -> int:
    """Runs the command; an expected error becomes a line and its exit code."""
    try:
      flags = self.parse(sys.argv[1:] if argv is None else argv)
      limited = isinstance(flags, ThreadFlags)
      machine.use_threads(flags.threads if limited else 0)
      machine.skip_absent_tpu()
      code = self.run(flags) or OK
      sys.stdout.flush()
      return code
    except KeyboardInterrupt:
      fail('interrupted', INTERRUPTED)
    except BrokenPipeError:
      _discard_output()
      raise SystemExit(OUTPUT_CLOSED) from None
    except UserError as error:
      fail(error, error.exit_code)
    except OSError as error:
      if error.filename is None:
        _discard_output()
      name = error.filename or 'output'
      code = CHECKPOINT if error.errno in _UNWRITABLE else DATA
      fail(f'{name!s:.200}: {error.strerror}', code)

  def parse(self, argv: Sequence[str]) -> Any:
    """Returns the checked flags; a UsageError or ConfigError names a flag."""
    look: Any = dict(
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
      epilog=EXIT_CODES,
    )
    name, kind = f'python -m {self.package}.{self.name}', self.flags
    parser = _Parser(prog=name, description=self.text, **look)
    if isinstance(kind, dict):
      commands = parser.add_subparsers(dest='command', required=True)
      for name, choice in kind.items():
        texts = dict(description=choice.__doc__, help=choice.__doc__)
        _declare(commands.add_parser(name, **texts, **look), choice)
    else:
      _declare(parser, kind)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    if any('overrides' in choice.__dataclass_fields__ for choice in kinds):
      argv = [*_with_overrides(argv)]
    arguments, unknown = parser.parse_known_args(argv)
    values = vars(arguments)
    registry.trust(*values.pop('trust').split(','))
    if isinstance(kind, dict):
      kind = kind[values.pop('command')]
    if unknown:
      name = unknown[0].partition('=')[0]
      legal = [word for f in dataclasses.fields(kind) for word in _names(f)]
      near = difflib.get_close_matches(name, legal, 1)
      hint = f'did you mean {near[0]}? ' if near else ''
      raise UsageError(f'{name}: no such flag; {hint}see --help')
    try:
      return kind(**fields.check(kind, values, ''))
    except ConfigError as error:
      name = f'--{error.field.removeprefix("--")}'
      raise ConfigError(name, error.given, error.expected) from error


def _discard_output() -> None:
  """Lets Python flush stdout at exit without another error."""
  with contextlib.suppress(OSError, ValueError):  # a test's stdout has no file
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise UsageError(f'{message}; see --help')


def _names(field: dataclasses.Field) -> list[str]:
  return (field.metadata['names'] or f'--{field.name}').split()


def _declare(parser: argparse.ArgumentParser, kind: Any) -> None:
  """Adds the flags of a dataclass; `fields.check` parses their values later."""
  for field in dataclasses.fields(kind):
    default, text = field.default, field.metadata['words']
    needed = default is dataclasses.MISSING
    options: dict[str, Any] = dict(default=argparse.SUPPRESS)
    is_flag = _names(field)[0].startswith('-')  # else it has a position
    if is_flag:
      options |= dict(dest=field.name)
    if field.type is bool:
      options |= dict(action='store_true')
    else:
      options |= dict(type=fields.Unread)
      options |= dict(metavar=field.metadata['metavar'])
      if is_flag:
        options |= dict(required=needed)
      if field.metadata['many']:
        options |= dict(action='append', type=str)
      if default and not needed:
        shown = default if isinstance(default, tuple) else (default,)
        text += f' (default: {",".join(map(str, shown))})'
    text = text.replace('%', '%%')  # argparse formats them
    parser.add_argument(*_names(field), help=text, **options)
  text = 'packages whose classes a saved run may name, besides those of here'
  parser.add_argument('--trust', help=text, metavar='PACKAGE,...', default='')


def _with_overrides(argv: Sequence[str]) -> Iterator[str]:
  """Rewrites `--config.a=1` and `--config.a 1` as `--config.KEY=a=1`."""
  items = iter(argv)
  for item in items:
    if item.startswith('--config.'):
      body = item.removeprefix('--config.')
      body = body if '=' in body else f'{body}={next(items, "")}'
      item = f'{OVERRIDE}={body}'
    yield item


def load_config(flag: str, overrides: Sequence[str]) -> ConfigDict:
  """Returns the complete configuration of `file.py[:argument]`.

  Overrides are texts such as 'optimizer.lr=1e-3'. Raises UsageError for a file
  whose `get_config` fails, ConfigError for a missing file or an illegal field.
  """
  path, _, argument = flag.partition(':')
  items = argument.split(',')
  if MINILM in items and not os.path.isdir('minilm'):
    from model_lib import convert  # slow to import

    place = f'pretrained={convert.packaged_minilm()}'
    argument = ','.join(place if item == MINILM else item for item in items)
  if not path.endswith('.py') or not os.path.isfile(path):
    paths = [str(p) for p in pathlib.Path('configs').rglob('[!_]*.py')]
    near = difflib.get_close_matches(path, paths, 1) or [EXAMPLE]
    raise ConfigError('--config', path, f'a Python file such as {near[0]}')
  try:
    get_config = runpy.run_path(path)['get_config']
    config = get_config(argument) if argument else get_config()
    if not isinstance(config, fields.ConfigLike):
      raise TypeError(repr(config))
  except Exception as error:  # the file is the user's
    message = str(error)
    if not isinstance(error, ValueError):
      expected = 'a file whose get_config returns a ConfigDict'
      message = f'expected {expected}, got {type(error).__name__}: {error}'
    raise UsageError(f'--config={flag}: {message}') from error
  # Imported late, so that wrong flags fail before jax is imported.
  from train_lib import config_schema

  registry.trust_named([config, *overrides])
  run = config_schema.validate(config, overrides)
  config_schema.check_weights(run)
  return run


def parse_fields(flag: str, text: str) -> dict[str, Any]:
  """Splits `name=folder,root=/data,image_size=64` into unread values."""
  values: dict[str, Any] = {}
  for item in text.split(','):
    name, separator, value = item.partition('=')
    if not separator:
      raise ConfigError(flag, item, 'key=value')
    if name in values:
      raise ConfigError(f'{flag}.{name}', value, 'one value')
    values[name] = fields.Unread(value)
  registry.trust_named(values)
  return values


def refuse(flags: Any, names: Sequence[str], expected: str) -> None:
  """Raises ConfigError for a named flag that differs from its default."""
  for field in dataclasses.fields(flags):
    value = getattr(flags, field.name)
    if field.name in names and value != field.default:
      raise ConfigError(f'--{field.name}', value, expected)


def fail(message: object, code: int = USAGE) -> NoReturn:
  """Prints one line on stderr, or each of `lines`; exits with the code."""
  lines = message.lines if isinstance(message, UserError) else [message]
  for text in lines:
    sentences = re.sub(r'([^\s.:;,])\s*\n', r'\1. ', str(text).strip())
    line = files.printable(' '.join(sentences.split()))
    print('error:', shortened(line, MAX_LINE), file=sys.stderr)
  raise SystemExit(code)


def check_texts(workdir: str) -> None:
  """Raises ConfigError if a run has no tokenizer, e.g. a run on token ids."""
  from train_lib.run_directory import TOKENIZER

  if not os.path.isfile(os.path.join(workdir, TOKENIZER)):
    raise ConfigError('--workdir', workdir, f'a run with its {TOKENIZER}')


def check_place(name: str, directory: str, is_new: bool = False) -> None:
  """Raises ConfigError unless it is writable, and empty if it `is_new`."""
  path = pathlib.Path(directory).absolute()
  nearest = next(place for place in (path, *path.parents) if place.exists())
  if not nearest.is_dir() or not os.access(nearest, os.W_OK):
    problem = 'not writable' if nearest.is_dir() else 'a file'
    expected = f'a directory to write, where {str(nearest)!r} is {problem}'
    raise ConfigError(name, directory, expected)
  if is_new and nearest == path and (inside := sorted(os.listdir(path))):
    expected = f'a new or empty directory, without {inside[0]!r}'
    raise ConfigError(name, directory, expected)
