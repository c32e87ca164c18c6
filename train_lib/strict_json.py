"""Strict JSON files and `metrics.jsonl`, readable after a crash.

JSON has no NaN and no infinity, but Python writes them, and other readers then
refuse the file. Here they become the strings 'NaN', 'Infinity' and
'-Infinity', which `float()` turns back into numbers.
"""

import json
import math
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from dataset_lib import atomic_file
from dataset_lib.errors import InvalidDataError

_NAMES = {math.inf: 'Infinity', -math.inf: '-Infinity'}


def dumps(value: Any, indent: int | None = None) -> str:
  """Serialises mappings, sequences, numbers, strings and None.

  Zero-dimensional arrays count as numbers.

  Raises:
    TypeError: if the value holds anything else.
  """
  return json.dumps(_plain(value), indent=indent, allow_nan=False)


def loads(text: str) -> Any:
  """Parses strict JSON.

  Raises:
    ValueError: if the text is not JSON or holds a bare NaN or infinity.
  """
  return json.loads(text, parse_constant=_refuse)


def write(path: str | os.PathLike[str], value: Any) -> None:
  """Writes an indented JSON file atomically."""
  text = dumps(value, indent=2) + '\n'
  atomic_file.write_text(path, text)


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads a file that holds one JSON object.

  Raises:
    FileNotFoundError: if there is no such file.
    InvalidDataError: if it is unreadable, or holds something else.
  """
  try:
    value = loads(pathlib.Path(path).read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise
  except (OSError, ValueError) as error:
    raise InvalidDataError(f'{path} is damaged ({error})') from error
  if not isinstance(value, dict):
    raise InvalidDataError(
      f'{path} is damaged (expected a JSON object, got {type(value).__name__})'
    )
  return value


class Metrics:
  """Writer of `metrics.jsonl`: one JSON object per line.

  Args:
    path: the file.
    primary: False in all processes of a run but one; they write nothing.
  """

  def __init__(self, path: pathlib.Path, primary: bool = True):
    self.path = path
    self._primary = primary

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Appends a line; it is in the file when this returns."""
    if not self._primary:
      return
    line = dumps({'step': step, **values}) + '\n'
    # One write call: a kill tears this line at most.
    with self.path.open('ab', buffering=0) as file:
      file.write(line.encode())

  def truncate_after(self, step: int) -> None:
    """Removes the lines of later steps, which will be written again.

    A torn last line, left by a kill, is removed; any other line that is not
    JSON is removed with a warning.
    """
    if not self._primary or not self.path.exists():
      return
    # Without its newline the last line may be a torn, shorter number.
    *lines, _ = self.path.read_bytes().split(b'\n')
    kept = []
    for number, line in enumerate(lines, 1):
      row = _row(line)
      if row is None:
        warnings.warn(
          f'{self.path}: line {number} is damaged and was dropped',
          stacklevel=2,
        )
      elif row['step'] <= step:
        kept.append(line.decode() + '\n')
    atomic_file.write_text(self.path, ''.join(kept))


def _row(line: bytes) -> dict[str, Any] | None:
  try:
    row = loads(line.decode())
  except ValueError:
    return None
  valid = isinstance(row, dict) and isinstance(row.get('step'), int)
  return row if valid else None


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if hasattr(value, 'item') and getattr(value, 'ndim', None) == 0:
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return _NAMES.get(value, 'NaN')
  return value


def _refuse(constant: str) -> None:
  raise ValueError(f'{constant} is not JSON')
