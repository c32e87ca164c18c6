"""What the benchmarks found, as CSV."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from launch import command_line


def write_csv(
  rows: Sequence[Any], path: str, constants: Mapping[str, Any]
) -> None:
  """Writes a line per row, in seconds and FLOPs; absent values are empty.

  Args:
    rows: of dataclasses, of `launch.adatape_benchmark` for example.
    path: the file, which is replaced.
    constants: columns that are the same in every line.
  """
  from eval_lib import report
  from eval_lib.timing import Estimate

  lines = []
  for row in rows:
    line: dict[str, Any] = {}
    for field in dataclasses.fields(row):
      value = getattr(row, field.name)
      if isinstance(value, Estimate):
        line[field.name] = value.median
        line[f'{field.name}_low'] = value.low
        line[f'{field.name}_high'] = value.high
      else:
        line[field.name] = value
    lines.append(line | dict(constants))
  report.write_csv(path, lines)


def check_out(path: str) -> None:
  """Raises UsageError unless the file of `--out` can be written, or is ''."""
  if not path:
    return
  file = pathlib.Path(path).absolute()
  if not file.parent.is_dir():
    raise command_line.UsageError(
      f'--out: expected a file in a directory that exists, got {path!r}'
    )
  if file.is_dir():
    raise command_line.UsageError(
      f'--out: expected a file, {path!r} is a directory'
    )
  if not os.access(file if file.exists() else file.parent, os.W_OK):
    raise command_line.UsageError(
      f'--out: expected a place to write, {path!r} is not writable'
    )
