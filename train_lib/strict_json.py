"""JSON as every reader understands it, written so that no half file is seen.

JSON has no NaN and no infinity; Python writes them all the same, and other
readers then refuse the file. Here they become the strings 'NaN', 'Infinity'
and '-Infinity', which `float()` turns back into numbers.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from dataset_lib import atomic_file

_NAMES = {math.inf: 'Infinity', -math.inf: '-Infinity'}


def dumps(value: Any, indent: int | None = None) -> str:
  """Serialises mappings, sequences, numbers, strings and None.

  Zero-dimensional arrays count as numbers.

  Raises:
    TypeError: if the value holds anything else.
  """
  return json.dumps(_plain(value), indent=indent, allow_nan=False)


def loads(text: str) -> Any:
  """Reads strict JSON.

  Raises:
    ValueError: if the text is not JSON or holds a bare NaN or infinity.
  """
  return json.loads(text, parse_constant=_refuse)


def write(path: str | os.PathLike[str], value: Any) -> None:
  """Writes an indented JSON file atomically: the old file or the new one."""
  atomic_file.write_text(path, dumps(value, indent=2) + '\n')


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
