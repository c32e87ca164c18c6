"""Rows of GLUE's TSV files: the official ones and ones with named columns.

These files have no quoting: a `"` is a character of the text, and csv's default
would swallow rows between two of them. A line is a row, a tab ends a column,
and every line is decoded by itself, so that a bad one spoils no other.
"""

import gzip
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.glue_tasks import TASKS, GlueTask

SUFFIXES = ('.tsv', '.tsv.gz')
# MRPC as Microsoft gives it: train and dev in one file, told apart by a list.
MSR_TRAIN, MSR_TEST = 'msr_paraphrase_train.txt', 'msr_paraphrase_test.txt'
MSR_DEV_IDS = 'dev_ids.tsv'
_MSR_IDS = ('#1 ID', '#2 ID')
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
    task: GlueTask,
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


def open_table(directory: str, task: str, split: str) -> TsvTable:
  """The rows of one split.

  Args:
    directory: the task's folder, or the parent of the folders of all tasks.
    task: name of the task.
    split: canonical name of the split.

  Raises:
    MissingDataError: there is no such file; the message has the legal names.
    InvalidDataError: it is damaged, empty, or has other columns.
  """
  path = _find(pathlib.Path(directory).expanduser(), task, split)
  what = TASKS[task]
  lines = read_lines(path)
  first = read_columns(path, lines[0][1])
  if what.headless and not any({*names} <= {*first} for names in what.texts):
    if len(first) != len(what.headless):
      raise InvalidDataError(
        f'{path}: expected a header, or the {len(what.headless)} columns '
        f'{", ".join(what.headless)}, got {", ".join(first)}'
      )
    return TsvTable(path, what.headless, lines, what)
  lines = lines[1:]
  if path.name == MSR_TRAIN:
    lines = _msr_rows(path, first, lines, split)
  return TsvTable(path, first, lines, what)


def _find(directory: pathlib.Path, task: str, split: str) -> pathlib.Path:
  names = _file_names(task, split)
  folders = (directory, directory / task, directory / TASKS[task].folder)
  for folder in folders:
    for name in names:
      if (folder / name).is_file():
        return folder / name
  raise MissingDataError(
    f'no split {split!r} of {task} in {directory}: expected '
    f'{", ".join(names)} there, in {task}/ or in {TASKS[task].folder}/'
  )


def _file_names(task: str, split: str) -> list[str]:
  stem = split.replace('validation', 'dev')
  stems = [stem] if stem == split else [stem, split]
  names = [stem + suffix for stem in stems for suffix in SUFFIXES]
  if task == 'mrpc':
    # Microsoft's test file has labels, the official test.tsv has none.
    return [MSR_TEST, *names] if split == 'test' else [*names, MSR_TRAIN]
  return names


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


def _msr_rows(
  path: pathlib.Path,
  columns: Sequence[str],
  lines: Sequence[tuple[int, bytes]],
  split: str,
) -> list[tuple[int, bytes]]:
  """The rows of MRPC's train or dev split out of Microsoft's one file."""
  ids_file = path.with_name(MSR_DEV_IDS)
  if not ids_file.is_file() or not {*_MSR_IDS} <= {*columns}:
    raise MissingDataError(
      f"{path} holds MRPC train and dev together: put GLUE's list of the dev "
      f'pairs beside it as {MSR_DEV_IDS}'
    )
  dev = {tuple(line.split(b'\t')[:2]) for _, line in read_lines(ids_file)}
  first, second = (columns.index(name) for name in _MSR_IDS)

  def is_dev(line: bytes) -> bool:
    # A row with too few columns is bad; it is counted with the training ones.
    fields = line.split(b'\t') + [b''] * len(columns)
    return (fields[first], fields[second]) in dev

  wants_dev = split == 'validation'
  return [entry for entry in lines if is_dev(entry[1]) == wants_dev]
