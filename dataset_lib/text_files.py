"""Files of labelled texts: lines, columns and labels.

TSV files have no quoting: a `"` is a character of the text, and csv's reader
would join rows between two of them. A line is a row, a tab ends a column, and
every line is decoded by itself, so that a bad row spoils no other.
"""

import dataclasses
import gzip
import math
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dataset_lib.errors import BadRecord, InvalidDataError

SUFFIXES = ('.tsv', '.tsv.gz')
MAX_SCORE = 5.0  # of STS-B
_BOM = b'\xef\xbb\xbf'

Line = tuple[int, bytes]  # its number in the file, from 1


class Example(NamedTuple):
  """One or two texts, and a class or a score."""

  texts: tuple[str, ...]
  label: int | float


def labelled(
  texts: Iterable[str], read_label: Callable[[str], int | float], label: str
) -> Example:
  """Returns an example; BadRecord if a text is empty or the label illegal."""
  texts = tuple(texts)
  for number, text in enumerate(texts, 1):
    if not text.strip():
      raise BadRecord('empty_text', '', f'text {number} is empty')
  return Example(texts, read_label(label))


@dataclasses.dataclass(frozen=True)
class TextTask:
  """Columns and labels of a task.

  Attributes:
    folder: its folder among GLUE's official files.
    texts: names of the one or two text columns; alternatives, best first.
    label: names of the label's column; alternatives, best first.
    class_names: name of each label id; () for a regression.
    headless: the columns of official files that have no header.
    ids_are_labels: files may have the label id instead of the name.
  """

  folder: str
  texts: tuple[tuple[str, ...], ...]
  label: tuple[str, ...]
  class_names: tuple[str, ...]
  headless: tuple[str, ...] = ()
  ids_are_labels: bool = True

  @property
  def is_regression(self) -> bool:
    """Whether the label is a number and not a class."""
    return not self.class_names

  @property
  def num_classes(self) -> int:
    """Of a classification; 1 for a regression."""
    return max(len(self.class_names), 1)

  def read_label(self, text: str) -> int | float:
    """Returns the label of its id, its name, or as a score.

    Raises:
      BadRecord: the task has no such label.
    """
    text = text.strip()
    if self.is_regression:
      return check_score(text)
    names = list(self.class_names)
    if text in names:
      return names.index(text)
    if not self.ids_are_labels:
      message = f'label {text!r:.40} is none of the train split'
      raise BadRecord('illegal_label', '', message)
    ids = [str(label) for label in range(len(names))]
    if text in ids:
      return ids.index(text)
    legal = ', '.join(f'{label} {name}' for label, name in enumerate(names))
    raise BadRecord('illegal_label', '', f'label {text!r} is none of {legal}')

  def columns(self, given: Iterable[str]) -> tuple[str, ...]:
    """Returns the text columns that a file has, the best ones; () if none."""
    fitting = [names for names in self.texts if {*names} <= {*given}]
    return fitting[0] if fitting else ()

  @property
  def expected(self) -> str:
    """The legal text columns in words."""
    return ' or '.join(', '.join(names) for names in self.texts)


def check_score(text: Any) -> float:
  """Returns a score; raises BadRecord unless it is in [0, 5]."""
  try:
    score = float(text)
  except ValueError:
    score = math.nan
  if not 0.0 <= score <= MAX_SCORE:  # False for NaN
    raise BadRecord(
      'illegal_label', '', f'score {score} not in [0, {MAX_SCORE}]'
    )
  return score


@dataclasses.dataclass(frozen=True)
class Table:
  """The rows of one split.

  Attributes:
    size: number of rows, bad ones included.
    example: returns a row; raises BadRecord if it cannot be used.
    where: returns the file of a row and its line or record there.
  """

  size: int
  example: Callable[[int], Example]
  where: Callable[[int], str]


def read_lines(path: pathlib.Path) -> list[Line]:
  """Reads the lines of a file, plain or gzip, without blank ones at its end.

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
  if not data.strip():
    raise InvalidDataError(f'{path} is empty; copy it again')
  lines = data.removeprefix(_BOM).split(b'\n')
  while not lines[-1].strip(b'\r '):
    lines.pop()
  return [
    (number, line.removesuffix(b'\r')) for number, line in enumerate(lines, 1)
  ]


def read_columns(path: pathlib.Path, line: bytes) -> list[str]:
  """Returns the names of the columns in the first line of a file.

  Raises:
    InvalidDataError: the line is not UTF-8.
  """
  try:
    return line.decode('utf-8').split('\t')
  except UnicodeDecodeError as error:
    raise InvalidDataError(f'{path}: line 1 is not UTF-8: {error}') from error


def file_table(
  path: pathlib.Path,
  lines: Sequence[Line],
  read: Callable[[list[str]], Example],
) -> Table:
  """Returns the rows of a file; `read` makes examples of their columns."""

  def example(row: int) -> Example:
    try:
      return read(lines[row][1].decode('utf-8').split('\t'))
    except UnicodeDecodeError as error:
      raise BadRecord('not_utf8', '', str(error)) from error

  return Table(len(lines), example, lambda row: f'{path}, line {lines[row][0]}')


def tsv_table(
  path: pathlib.Path,
  columns: Sequence[str],
  lines: Sequence[Line],
  task: TextTask,
) -> Table:
  """Returns the rows of a TSV file with these columns.

  Raises:
    InvalidDataError: it has no column of the texts, or of the label.
  """
  texts = [columns.index(name) for name in task.columns(columns)]
  labels = [columns.index(name) for name in task.label if name in columns]
  for found, expected in ((texts, task.expected),
                          (labels, ' or '.join(task.label))):  # fmt: skip
    if not found:
      raise InvalidDataError(
        f'{path}: expected the columns {expected}, got {", ".join(columns)}'
      )

  def read(fields: list[str]) -> Example:
    if len(fields) != len(columns):
      message = f'expected {len(columns)} columns, got {len(fields)}'
      raise BadRecord('wrong_columns', '', message)
    given = [fields[column] for column in texts]
    return labelled(given, task.read_label, fields[labels[0]])

  return file_table(path, lines, read)


def first_file(
  folders: Iterable[pathlib.Path], names: Sequence[str]
) -> pathlib.Path | None:
  """Returns the first of the files in the first of the folders that exists."""
  paths = [folder / name for folder in folders for name in names]
  return next((path for path in paths if path.is_file()), None)
