"""Atomic text files, strict JSON and locked directories.

NaN and infinity become the strings 'NaN', 'Infinity' and '-Infinity', which
`float()` turns back into numbers.
"""

import collections
import fcntl
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from dataset_lib.errors import InvalidDataError

Path = str | os.PathLike[str]


def write_text(path: Path, text: str) -> None:
  """Replaces a file by a text in UTF-8; see `write_bytes`."""
  write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
  """Replaces a file atomically, with fsync."""
  path = pathlib.Path(path)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with temporary.open('wb') as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)


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


def loads(text: str) -> Any:
  """Parses strict JSON; raises ValueError for any other text.

  Numbers must be finite in float64, the names of an object distinct.
  """
  try:
    numbers: Any = dict(parse_constant=_finite, parse_float=_finite)
    return json.loads(text, object_pairs_hook=_distinct, **numbers)
  except RecursionError as error:
    raise ValueError('values that are nested too deeply') from error


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f'{text}, which is no finite number')
  return value


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


def read_object(path: Path) -> dict[str, Any]:
  """Reads a file that holds one JSON object.

  Raises FileNotFoundError without a file, InvalidDataError if it is unreadable
  or holds something else.
  """
  try:
    value = loads(pathlib.Path(path).read_text(encoding='utf-8'))
    if not isinstance(value, dict):
      raise ValueError(f'expected an object, got {type(value).__name__}')
  except FileNotFoundError:
    raise
  except (OSError, ValueError) as error:
    raise InvalidDataError(f'{path} is damaged ({error})') from error
  return value
