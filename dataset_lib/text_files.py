"""Atomic text files, strict JSON and locked directories.

NaN and infinity become the strings 'NaN', 'Infinity' and '-Infinity', which
`float()` turns back into numbers.
"""

import collections
import contextlib
import contextvars
import fcntl
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Literal

from dataset_lib import data_files
from dataset_lib.errors import InvalidDataError, MissingDataError, WriteError

Path = str | os.PathLike[str]

# What reading a damaged file raises.
DAMAGE = (
  OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
)  # fmt: skip
# A number as `dumps` writes it.
Number = float | int | Literal['NaN', 'Infinity', '-Infinity']
MAX_DEPTH = 100  # of values of a JSON file, which Python's own code recurses
_late: contextvars.ContextVar[list[WriteError] | None] = contextvars.ContextVar(
  'late', default=None
)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
  """Turns an OSError of writing a file into a WriteError that names it."""
  try:
    yield
  except WriteError:
    raise
  except OSError as error:
    reason = error.strerror or error
    raise WriteError(f'{path} cannot be written: {reason}') from error


@contextlib.contextmanager
def failing_late() -> Iterator[None]:
  """Raises the first WriteError of this module at the end of the context.

  So results that cannot be written are still printed within it.
  """
  errors: list[WriteError] = []
  token = _late.set(errors)
  try:
    yield
  finally:
    _late.reset(token)
  if errors:
    raise errors[0]


def write_text(path: Path, text: str) -> None:
  """Replaces a file by a text in UTF-8; see `write_bytes`."""
  write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
  """Replaces a file, or a link, atomically, with fsync; makes its folder.

  Raises WriteError, see `failing_late`.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with writing(path):
      path.parent.mkdir(parents=True, exist_ok=True)
      temporary.unlink(missing_ok=True)  # of a killed process, or a link
      try:
        with temporary.open('xb') as file:
          file.write(content)
          file.flush()
          os.fsync(file.fileno())
        temporary.replace(path)
      finally:
        temporary.unlink(missing_ok=True)
  except WriteError as error:
    if (errors := _late.get()) is None:
      raise
    errors.append(error)


def open_append(path: Path) -> BinaryIO:
  """Opens a file to append, unbuffered; an OSError if it is a link."""
  flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
  return open(os.open(path, flags, 0o666), 'ab', buffering=0)


def printable(text: object) -> str:
  """Returns a text of others with escapes for what a terminal acts on.

  Of control and format characters and lone surrogates only newlines stay.
  """
  return ''.join(
    c if c.isprintable() or c == '\n' else c.encode('unicode_escape').decode()
    for c in str(text)
  )


def lock_directory(path: Path) -> int:
  """Locks a directory until the returned descriptor is closed.

  The kernel frees the lock of a killed process. Raises BlockingIOError if it is
  held, another OSError where directories cannot be locked, as on NFS.
  """
  descriptor = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    raise
  return descriptor


def dumps(value: Any, indent: int | None = None) -> str:
  """Serialises mappings, sequences, numbers, arrays [], strings and None."""
  text = json.dumps(value, default=_plain)
  return json.dumps(json.loads(text, parse_constant=str), indent=indent)


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return dict(value)
  if getattr(value, 'ndim', None) == 0:
    return value.item()
  raise TypeError(f'a value of type {type(value).__name__} is not JSON')


def loads(text: str, parse_int: Any = None) -> Any:
  """Parses strict JSON; raises ValueError for any other text.

  Numbers must be finite in float64, the names of an object distinct. `int` as
  `parse_int` leaves the range of integers to the caller.
  """
  try:
    numbers: Any = dict(
      parse_constant=_finite,
      parse_float=_finite,
      parse_int=parse_int or _integer,
    )
    return json.loads(text, object_pairs_hook=_distinct, **numbers)
  except RecursionError as error:
    raise ValueError('values that are nested too deeply') from error


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f'{text:.40}, which is no finite number')
  return value


def _integer(text: str) -> int:
  _finite(text)
  return int(text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    [(name, _)] = collections.Counter(n for n, _ in pairs).most_common(1)
    raise ValueError(f'the name {name[:100]!r} twice in one object')
  return values


def with_tuples(value: Any) -> Any:
  """Returns a value of JSON with tuples for its lists."""
  if isinstance(value, dict):
    return {key: with_tuples(item) for key, item in value.items()}
  if isinstance(value, list):
    return tuple(map(with_tuples, value))
  return value


def write_json(path: Path, value: Any) -> None:
  """Writes an indented JSON file atomically."""
  write_text(path, dumps(value, indent=2) + '\n')


@contextlib.contextmanager
def damage_of(path: Path) -> Iterator[None]:
  """Turns `DAMAGE` into MissingDataError or InvalidDataError of a file."""
  try:
    yield
  except (MissingDataError, InvalidDataError):
    raise
  except FileNotFoundError as error:
    raise MissingDataError(f'{path} is missing') from error
  except DAMAGE as error:
    reason = getattr(error, 'message', error)  # of BadRecord, without the path
    raise InvalidDataError(f'{path} is damaged ({reason})') from error


def read_bytes(path: Path, limit: int | None = None) -> bytes:
  """Reads a file, see `data_files.opened`; errors are those of `damage_of`."""
  with damage_of(path):
    return data_files.read_bytes(path, limit)


def parse(content: bytes) -> Any:
  """Parses strict JSON, as `loads`, of at most `MAX_DEPTH` nested values."""
  value = loads(content.decode())
  level = [value]
  for _ in range(MAX_DEPTH):
    inner = (list(x.values()) if isinstance(x, dict) else x for x in level)
    level = [
      item for group in inner if isinstance(group, list) for item in group
    ]
  if level:
    raise ValueError(f'values that are nested more than {MAX_DEPTH} deep')
  return value


def read_json(path: Path) -> Any:
  """Reads a file of JSON, see `parse`; errors are those of `damage_of`."""
  with damage_of(path):
    return parse(read_bytes(path))


def read_object(path: Path) -> dict[str, Any]:
  """Reads a file of one JSON object; errors are those of `damage_of`."""
  with damage_of(path):
    value = read_json(path)
    if not isinstance(value, dict):
      raise ValueError(f'expected an object, got {type(value).__name__}')
  return value
