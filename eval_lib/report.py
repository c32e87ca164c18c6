"""Measured numbers: estimates with quartiles, CSV, the terminal, logs.

A row of a table maps names of columns to values; None or a missing key is an
empty cell. An `Estimate` takes three columns of a CSV file, such as `seconds`,
`seconds_low` and `seconds_high`.
"""

import contextlib
import csv
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text
from jaxtyping import Float

from core import fields, files
from core.errors import InvalidDataError
from core.files import printable

Rows = Sequence[Mapping[str, Any]]

# How columns are printed: heading, unit, digits.
_PERCENT = {
  'quality': 'quality %', 'agreement': 'as own last head %',
  'retention': 'kept %', 'flops_share': 'of dense %', 'early': 'early %',
  'accuracy': 'accuracy %', 'ece': 'ECE %', 'ece_calibrated': 'ECE % after',
  'exceeded': 'exceeded %', 'mean': 'mean %', 'worst': 'worst %',
  'spearman': 'Spearman %', 'saved': 'saved %', 'lost': 'lost %',
}  # fmt: skip
COLUMNS: Mapping[str, tuple[str, float, str]] = {
  'seconds': ('ms', 1e3, '.3g'),
  'latency_mean': ('mean ms', 1e3, '.3g'),
  'latency_p50': ('p50 ms', 1e3, '.3g'),
  'latency_p95': ('p95 ms', 1e3, '.3g'),
  'latency_p99': ('p99 ms', 1e3, '.3g'),
  'flops': ('GFLOPs', 1e-9, '.3g'),
  'speedup': ('speed-up', 1.0, '.2f'),
  'limit': ('limit', 1.0, '.2f'),
  'share': ('of limit', 1.0, '.2f'),
  'difference': ('difference', 1.0, '.1e'),
  'quality_difference': ('points', 1.0, '+.2f'),
  'parameters': ('M parameters', 1e-6, '.2f'),
  'paper_parameters': ('M printed', 1e-6, '.1f'),
  'macs': ('G multiply-adds', 1e-9, '.3f'),
  'compiler_macs': ('by compiler', 1e-9, '.3f'),
  'paper_macs': ('G printed', 1e-9, '.3f'),
  'paper_speedup': ('printed', 1.0, '.2f'),
  'images_per_second': ('images/s', 1.0, '.3g'),
  'temporary_bytes': ('temporary MiB', 2.0**-20, '.0f'),
  **{name: (heading, 100.0, '.1f') for name, heading in _PERCENT.items()},
}


class Estimate(NamedTuple):
  """A median with its first and third quartile."""

  median: float
  low: float
  high: float

  @classmethod
  def of(cls, samples: Float[np.ndarray, ' R']) -> 'Estimate':
    """Summarises repeated measurements."""
    low, median, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return cls(median, low, high)

  def text(self, scale: float = 1.0) -> str:
    """Formats `median [low, high]`, times `scale`, the median in 3 digits."""
    magnitude = math.floor(math.log10(scale * abs(self.median) or 1.0))
    decimals = max(0, 2 - magnitude)
    ends = (f'{scale * x:.{decimals}f}' for x in (self.low, self.high))
    return f'{scale * self.median:.{decimals}f} [{", ".join(ends)}]'


class Table(NamedTuple):
  """A table: the name of its file, a title, rows, a note, printed columns."""

  name: str
  title: str
  rows: Any
  note: str = ''
  columns: Sequence[str] = ()  # () for all


def names(text: str) -> dict[str, str]:
  """Reads 'GIVEN=SHOWN;...': the names to show."""
  return dict(item.rsplit('=', 1) for item in text.split(';') if item)


def write_csv(
  path: files.Path, rows: Rows, constants: Mapping[str, Any] | None = None
) -> None:
  """Writes rows below a line of column names; replaces the file atomically.

  Columns are in the order of first use; rows get `constants` that they lack.
  """
  same = dict(constants or {})
  lines = [*map(flat, rows)]
  names = list(dict.fromkeys(name for line in [*lines, same] for name in line))
  file = io.StringIO()
  writer = csv.DictWriter(file, names, lineterminator='\n')
  writer.writeheader()
  writer.writerows(same | line for line in lines)
  files.write_text(path, file.getvalue())


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a row with three columns for each `Estimate`."""
  line: dict[str, Any] = {}
  for name, value in row.items():
    values = value if isinstance(value, Estimate) else [value]
    line |= zip((name, f'{name}_low', f'{name}_high'), values, strict=False)
  return line


def print_table(
  title: str, rows: Rows, note: str = '', columns: Sequence[str] = ()
) -> None:
  """Prints at least one row below a title and above a note.

  Cells are printed as `str` does; with `columns` only these, if not empty, in
  the format of `COLUMNS`. A narrow terminal wraps lines and cuts none off.
  """
  if columns:
    used = [c for c in columns if any(row.get(c) is not None for row in rows)]
    rows = [dict(_readable(c, row.get(c)) for c in used) for row in rows]
  table = rich.table.Table(box=rich.box.SIMPLE, collapse_padding=True)
  names = list(dict.fromkeys(name for row in rows for name in row))
  for name in names:
    side: Any = 'left' if name == names[0] else 'right'
    table.add_column(_cell(name), justify=side, no_wrap=True)
  for row in rows:
    cells = ['' if row.get(name) is None else f'{row[name]}' for name in names]
    # Brackets in a value are a range, not markup.
    table.add_row(*map(_cell, cells))
  console = rich.console.Console(highlight=False, width=100_000)
  for text in (printable(title), table, printable(note)):
    if text:
      console.print(text, markup=False)


def _cell(text: str) -> rich.text.Text:
  return rich.text.Text(printable(text).replace('\n', '\\n'))


def _readable(name: str, value: Any) -> tuple[str, Any]:
  """Returns the heading and the text of a cell by `COLUMNS`."""
  heading, unit, digits = COLUMNS.get(name, (name, 1.0, '.3g'))
  if isinstance(value, Estimate):
    # Columns like `over_torch` have many neighbours.
    is_further = name.startswith('over_')
    value = f'{value.median:.2f}' if is_further else value.text(unit)
  elif isinstance(value, float) or (name in COLUMNS and value is not None):
    value = f'{unit * value:{digits}}'
  return heading, value


def folder_of(out: str, workdir: str, name: str) -> pathlib.Path:
  """Returns `out`, or without one a folder of a run, which is no link."""
  path = pathlib.Path(out or pathlib.Path(workdir, name))
  if not out:
    files.check_no_link(path)
  return path


def read_result(workdir: files.Path) -> dict[str, Any] | None:
  """Reads the result of a training; None before its end, or an error."""
  path = pathlib.Path(workdir, 'result.json')
  with contextlib.suppress(FileNotFoundError), files.damage_of(path):
    values = files.read_object(path)
    metrics = {key: value for key, value in values.items() if '/' in key}
    fields.check_value('metrics', metrics, dict[str, files.Number])
    return values
  return None


def read_curves(path: pathlib.Path) -> dict[str, Sequence[np.ndarray]]:
  """Reads `metrics.jsonl`: one JSON object a line, each with its `step`.

  A torn last line is ignored, another damaged one is refused. Of several
  values for a step, as a resumed run may write them, the last counts.
  """
  values: dict[str, dict[int, float]] = {}
  content = files.read_bytes(path, files.MAX_LOG)
  # The text after the last newline is a line still being written.
  *lines, _ = content.decode(errors='replace').split('\n')
  for number, line in enumerate(lines, 1):
    try:
      row = files.loads(line.strip() or '{"step": 0}')
      row = {name: float(value) for name, value in row.items()}
      step = int(row.pop('step'))
    except (ValueError, AttributeError, KeyError, TypeError):
      raise InvalidDataError(
        f'{path}:{number}: expected a JSON object with a step, got '
        f'{line[:60]!r}; delete the line to draw the rest'
      ) from None
    for name, value in row.items():
      values.setdefault(name, {})[step] = value
  return {
    name: tuple(np.array(sorted(points.items()), float).T)
    for name, points in values.items()
  }
