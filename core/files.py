"""Files of others, read with bounds; atomic writes, strict JSON, locks.

NaN and infinity become the strings 'NaN', 'Infinity' and '-Infinity', which
`float()` turns back into numbers.
"""

import collections
import contextlib
import contextvars
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import stat
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Literal

import numpy as np

from core.errors import (
  BadRecord,
  DataError,
  InvalidDataError,
  MissingDataError,
  WriteError,
)

Path = str | os.PathLike[str]

# What reading a damaged file raises.
DAMAGE = (
  OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
)  # fmt: skip
# A number as `dumps` writes it.
Number = float | int | Literal['NaN', 'Infinity', '-Infinity']
MAX_PIXELS = 2**28 // 3  # of an image by default; 256 MiB as RGB
MAX_BYTES = 2**26  # of a file with one image, of one record, of JSON
MAX_LOG, MAX_WEIGHTS = 2**30, 2**34  # of metrics, of parameters or a bundle
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
  """Raises the first WriteError of this module at the end of the context."""
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
  """Escapes all that a terminal might act on, but newlines."""
  return ''.join(
    c if c.isprintable() or c == '\n' else c.encode('unicode_escape').decode()
    for c in str(text)
  )


def lock_directory(path: Path) -> int:
  """Locks a directory until the descriptor is closed, or the process ends.

  BlockingIOError if it is held, another OSError where it cannot be, as on NFS.
  """
  descriptor = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    raise
  return descriptor


def dumps(value: Any, indent: int | None = None) -> str:
  """Serialises mappings, dataclasses, sequences, numbers, strings and None."""
  text = json.dumps(value, default=_plain)
  return json.dumps(json.loads(text, parse_constant=str), indent=indent)


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return dict(value)
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return dataclasses.asdict(value)
  array = np.asarray(value)
  if array.ndim == 0 and array.dtype.kind in 'biufV':  # V: bfloat16
    return array.item()
  raise TypeError(f'a value of type {type(value).__name__} is not JSON')


def loads(text: str, parse_int: Any = None) -> Any:
  """Parses strict JSON; raises ValueError for any other text.

  Numbers must be finite in float64 (integers by default), names distinct.
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
  except DataError:
    raise
  except FileNotFoundError as error:
    raise MissingDataError(f'{path} is missing') from error
  except DAMAGE as error:
    reason = error.message if isinstance(error, BadRecord) else error
    raise InvalidDataError(f'{path} is damaged ({reason})') from error


def read_bytes(path: Path, limit: int | None = None) -> bytes:
  """Reads a file, see `opened`; raises the errors of `damage_of`."""
  with damage_of(path):
    return read_record(path, limit)


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
  """Reads a file of JSON, see `parse`; raises the errors of `damage_of`."""
  with damage_of(path):
    return parse(read_bytes(path))


def read_object(path: Path) -> dict[str, Any]:
  """Reads a file of one JSON object; raises the errors of `damage_of`."""
  with damage_of(path):
    value = read_json(path)
    if not isinstance(value, dict):
      raise ValueError(f'expected an object, got {type(value).__name__}')
  return value


def read_record(path: Path, limit: int | None = None) -> bytes:
  """Reads a file; see `opened`."""
  with opened(path, limit) as file:
    return file.read(MAX_BYTES if limit is None else limit)


@contextlib.contextmanager
def opened(path: Path, limit: int | None = None) -> Iterator[BinaryIO]:
  """Opens a regular file of at most `limit` bytes, by default `MAX_BYTES`.

  Else BadRecord 'not_a_file' or 'too_large'; OSError if it cannot be opened.
  """
  # Without O_NONBLOCK, opening a pipe waits for its writer.
  descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  # A descriptor of a folder cannot be passed to `open`.
  try:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
      raise BadRecord('not_a_file', str(path), 'not a regular file')
    check_size(status.st_size, limit, str(path))
    with open(descriptor, 'rb', closefd=False) as file:
      yield file
  finally:
    os.close(descriptor)


def check_size(size: int, limit: int | None = None, where: str = '') -> None:
  """Raises BadRecord 'too_large' for more bytes; see `read_record`."""
  limit = MAX_BYTES if limit is None else limit
  if size > limit:
    message = f'expected at most {limit} bytes, got {size}'
    raise BadRecord('too_large', where, message)


def check_inside(path: Path, root: Path) -> None:
  """Raises InvalidDataError if a link leads from `path` out of `root`."""
  target, real_root = (pathlib.Path(os.path.realpath(p)) for p in (path, root))
  if not target.is_relative_to(real_root):
    raise InvalidDataError(
      f'{path} links to {target}, outside of {real_root}; copy the data, or '
      'give the folder it lies in'
    )


def check_no_link(path: Path) -> None:
  """Raises InvalidDataError if a folder to write to is a link."""
  if os.path.islink(path) and os.path.isdir(path):
    raise InvalidDataError(
      f'{path} links to {os.path.realpath(path)}, which would be written to: '
      'put the folder itself there, or remove the link'
    )


def check_replaceable(path: Path) -> None:
  """Raises InvalidDataError unless a file to write is regular or missing."""
  is_link, exists = os.path.islink(path), os.path.exists(path)
  if is_link or (exists and not os.path.isfile(path)):
    raise InvalidDataError(f'{path} is not a regular file: remove it')


def check_regular(path: Path, root: Path) -> None:
  """Raises Missing- or InvalidDataError unless a file is regular, in `root`."""
  if not os.path.exists(path):
    raise MissingDataError(f'missing {path}; copy it again')
  check_inside(path, root)
  if not os.path.isfile(path):
    raise InvalidDataError(f'{path} is not a regular file')


def cache_folder(name: str) -> pathlib.Path:
  """Returns a folder of the user's cache, which may not exist yet."""
  cache = os.environ.get('XDG_CACHE_HOME', '')
  # By its specification a relative path is not valid.
  cache = cache if os.path.isabs(cache) else '~/.cache'
  return pathlib.Path(cache).expanduser() / 'adaptive_computation' / name
