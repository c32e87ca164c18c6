"""`metrics.jsonl`: the metrics of a run, one JSON object a line."""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from dataset_lib import atomic_file
from train_lib import strict_json


class Metrics:
  """Writer of `metrics.jsonl`: one JSON object a line, with its `step`.

  NaN and infinities are the strings 'NaN', 'Infinity' and '-Infinity'.

  Attributes:
    path: the file.
  """

  def __init__(self, path: pathlib.Path, primary: bool = True):
    self.path = path
    self._primary = primary

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Appends a line; it is in the file when this returns."""
    if not self._primary:
      return
    line = strict_json.dumps({'step': step, **values}) + '\n'
    # One write call: a kill leaves at most this line torn.
    with self.path.open('ab', buffering=0) as file:
      file.write(line.encode())

  def truncate_after(self, step: int) -> None:
    """Drops the lines of later steps, which will be written again.

    A torn last line is what a kill leaves, and is dropped; any other line
    that is not JSON is dropped with a warning.
    """
    if not self._primary or not self.path.exists():
      return
    lines = self.path.read_bytes().split(b'\n')
    kept = []
    for number, line in enumerate(lines, 1):
      row = _read_row(line)
      if row is None and line and number < len(lines):
        warnings.warn(
          f'{self.path}: line {number} is damaged and was dropped',
          stacklevel=2,
        )
      # Without its newline the last line may be a torn, shorter number.
      if row is not None and row['step'] <= step and number < len(lines):
        kept.append(line.decode() + '\n')
    atomic_file.write_text(self.path, ''.join(kept))

  def read(self) -> list[dict[str, Any]]:
    """All rows, numbers that are not finite as floats again."""
    if not self.path.exists():
      return []
    rows = map(_read_row, self.path.read_bytes().split(b'\n'))
    return [
      {key: _number(value) for key, value in row.items()}
      for row in rows
      if row is not None
    ]


def _read_row(line: bytes) -> dict[str, Any] | None:
  try:
    row = strict_json.loads(line.decode())
  except ValueError:
    return None
  valid = isinstance(row, dict) and isinstance(row.get('step'), int)
  return row if valid else None


def _number(value: Any) -> Any:
  return float(value) if value in ('NaN', 'Infinity', '-Infinity') else value
