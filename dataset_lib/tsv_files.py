"""Rows of TSV files, of which a bad one spoils no other.

These files have no quoting: a `"` is a character of the text, and csv's default
would swallow rows between two of them. A line is a row, a tab ends a column,
and every line is decoded by itself.
"""

import gzip
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from dataset_lib.errors import BadRecord, InvalidDataError

SUFFIXES = ('.tsv', '.tsv.gz')
_BOM = '\ufeff'


class Example(NamedTuple):
  """One good row.

  Attributes:
    texts: one text, or two.
    label: class, or score.
  """

  texts: tuple[str, ...]
  label: int | float


@runtime_checkable
class Table(Protocol):
  """The rows of one split, wherever they come from.

  Attributes:
    is_labelled: whether the rows have labels; test sets may not.
  """

  is_labelled: bool

  def __len__(self) -> int:
    """Number of rows, bad ones included."""

  def example(self, row: int) -> Example:
    """One row; BadRecord if it cannot be used."""

  def where(self, row: int) -> str:
    """File of the row and its place there."""


@runtime_checkable
class RowTask(Protocol):
  """What the columns of a file mean."""

  @property
  def texts(self) -> tuple[tuple[str, ...], ...]:
    """Names of the one or two text columns; alternatives, best first."""

  @property
  def label(self) -> tuple[str, ...]:
    """Names of the label's column; alternatives, best first."""

  def read_label(self, text: str) -> int | float:
    """The label in a file; BadRecord if it is none that the task has."""


class TsvTable:
  """Rows of one TSV file.

  Args:
    path: the file, plain or gzip; it need not be open any more.
    columns: names of the columns.
    lines: the rows, each with the number of its line in the file (from 1).
    task: what the columns mean.

  Raises:
    InvalidDataError: the file lacks a text column.
  """

  def __init__(
    self,
    path: pathlib.Path,
    columns: Sequence[str],
    lines: Sequence[tuple[int, bytes]],
    task: RowTask,
  ):
    self._path, self._lines, self._task = path, lines, task
    self._width = len(columns)
    fitting = [names for names in task.texts if {*names} <= {*columns}]
    if not fitting:
      wanted = ' or '.join(', '.join(names) for names in task.texts)
      raise InvalidDataError(
        f'{path}: expected the columns {wanted}, got {", ".join(columns)}'
      )
    self._texts = [columns.index(name) for name in fitting[0]]
    labels = [columns.index(name) for name in task.label if name in columns]
    self.is_labelled = bool(labels)
    self._label = labels[0] if labels else -1

  def __len__(self) -> int:
    return len(self._lines)

  def example(self, row: int) -> Example:
    """One row; BadRecord if it cannot be used."""
    try:
      fields = self._lines[row][1].decode('utf-8').split('\t')
    except UnicodeDecodeError as error:
      raise BadRecord('not_utf8', self.where(row), str(error)) from error
    if len(fields) != self._width:
      message = f'expected {self._width} columns, got {len(fields)}'
      raise BadRecord('wrong_columns', self.where(row), message)
    texts = tuple(fields[column] for column in self._texts)
    check_texts(texts, self.where(row))
    try:
      return Example(texts, self._task.read_label(fields[self._label]))
    except BadRecord as bad:
      raise BadRecord(bad.kind, self.where(row), bad.message) from bad

  def where(self, row: int) -> str:
    """File of the row and its line there, from 1."""
    return f'{self._path}, line {self._lines[row][0]}'


def check_texts(texts: Iterable[str], where: str) -> None:
  """Raises BadRecord if one of the texts of a row is empty."""
  for number, text in enumerate(texts, 1):
    if not text.strip():
      raise BadRecord('empty_text', where, f'text {number} is empty')


def read_lines(path: pathlib.Path) -> list[tuple[int, bytes]]:
  """Lines with their numbers; the end of the last line begins no other.

  Raises:
    InvalidDataError: the file is empty or, as gzip, damaged.
  """
  data = path.read_bytes()
  if path.suffix == '.gz':
    try:
      data = gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
      raise InvalidDataError(
        f'{path} is damaged or cut short, copy it again: {error}'
      ) from error
  lines = data.removesuffix(b'\n').split(b'\n')
  if not data.strip():
    raise InvalidDataError(f'{path} is empty; copy it again')
  return [(number, line.removesuffix(b'\r')) for number, line in
          enumerate(lines, 1)]  # fmt: skip


def read_columns(path: pathlib.Path, line: bytes) -> list[str]:
  """The names of the columns, of the first line of a file.

  Raises:
    InvalidDataError: the line is not UTF-8.
  """
  try:
    return line.decode('utf-8').removeprefix(_BOM).split('\t')
  except UnicodeDecodeError as error:
    raise InvalidDataError(f'{path}: line 1 is not UTF-8: {error}') from error
