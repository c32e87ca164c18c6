"""Files of labelled texts, read as rows of token ids.

TSV files have no quoting: a `"` is a character of the text, and csv's reader
would join rows between two of them. A line is a row, a tab ends a column, and
every line is decoded by itself, so that a bad row spoils no other.
"""

import dataclasses
import functools
import gzip
import math
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval, Len, Predicate

from dataset_lib import source, tokenizer
from dataset_lib.errors import BadRecord, InvalidDataError
from dataset_lib.order import record_rng
from dataset_lib.source import DatasetInfo, TokenSource, require

SUFFIXES = ('.tsv', '.tsv.gz')
MAX_SCORE = 5.0  # of STS-B
DEFAULT_BUCKETS = (32, 64, 128)
MIN_LENGTH, MAX_LENGTH = tokenizer.MIN_LENGTH, 65536
_BOM = b'\xef\xbb\xbf'
_SUBSET_SEED = 0

Line = tuple[int, bytes]  # its number in the file, from 1


class Example(NamedTuple):
  """One or two texts, and a class or a score."""

  texts: tuple[str, ...]
  label: int | float


class Table(NamedTuple):
  """The rows of one split.

  Attributes:
    size: number of rows, bad ones included.
    example: returns a row; raises BadRecord if it cannot be used.
    where: returns the file of a row and its line or record there.
  """

  size: int
  example: Callable[[int], Example]
  where: Callable[[int], str]


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

  @property
  def expected(self) -> str:
    """The legal text columns in words."""
    return ' or '.join(', '.join(names) for names in self.texts)

  def columns(self, given: Iterable[str]) -> tuple[str, ...]:
    """Returns the text columns that a file has, the best ones; () if none."""
    fitting = [names for names in self.texts if {*names} <= {*given}]
    return fitting[0] if fitting else ()

  def example(self, texts: Sequence[str], label: str) -> Example:
    """Returns an example.

    Raises:
      BadRecord: a text is empty, or the task has no such label.
    """
    for number, text in enumerate(texts, 1):
      require(text.strip(), 'empty_text', f'text {number} is empty')
    label = label.strip()
    if self.is_regression:
      return Example(tuple(texts), _score(label))
    if label not in self._ids:
      named = enumerate(self.class_names)
      legal = ', '.join(f'{number} {name}' for number, name in named)
      legal = legal if self.ids_are_labels else 'the train split'
      message = f'label {label!r:.40} is none of {legal}'
      raise BadRecord('illegal_label', '', message)
    return Example(tuple(texts), self._ids[label])

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    names = {name: number for number, name in enumerate(self.class_names)}
    ids = {str(number): number for number in names.values()}
    return ids | names if self.ids_are_labels else names


def _score(text: str) -> float:
  try:
    score = float(text)
  except ValueError:
    score = math.nan
  is_legal = 0.0 <= score <= MAX_SCORE  # False for NaN
  require(is_legal, 'illegal_label', f'score {score} not in [0, {MAX_SCORE}]')
  return score


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


def read_columns(path: pathlib.Path, lines: Sequence[Line]) -> list[str]:
  """Returns the names of the columns in the first line of a file.

  Raises:
    InvalidDataError: the line is not UTF-8.
  """
  try:
    return lines[0][1].decode('utf-8').split('\t')
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
  if not texts or not labels:
    expected = ' or '.join(task.label) if texts else task.expected
    raise InvalidDataError(
      f'{path}: expected the columns {expected}, got {", ".join(columns)}'
    )

  def read(fields: list[str]) -> Example:
    message = f'expected {len(columns)} columns, got {len(fields)}'
    require(len(fields) == len(columns), 'wrong_columns', message)
    return task.example([fields[place] for place in texts], fields[labels[0]])

  return file_table(path, lines, read)


def first_file(
  folders: Iterable[pathlib.Path], names: Sequence[str]
) -> pathlib.Path | None:
  """Returns the first of the files in the first of the folders that exists."""
  paths = [folder / name for folder in folders for name in names]
  return next((path for path in paths if path.is_file()), None)


def _are_buckets(sizes: Sequence[int]) -> bool:
  legal = all(MIN_LENGTH <= size <= MAX_LENGTH for size in sizes)
  return legal and list(sizes) == sorted({*sizes}) and len(sizes) < 256


MaxLength = Annotated[int, Interval(ge=MIN_LENGTH, le=MAX_LENGTH)]
Buckets = Annotated[
  tuple[int, ...],
  Predicate(_are_buckets),
  f'a tuple of ascending lengths in [{MIN_LENGTH}, {MAX_LENGTH}]; max_length '
  'is always the last one',
]


@dataclasses.dataclass(kw_only=True, eq=False)
class LabelledTexts(TokenSource):
  """Fields and reading of every source of labelled texts.

  All rows are tokenised when the split is opened. Parts of a split such as
  'train[:95%]' are slices of one fixed permutation, the same for every run:
  files are ordered (CoLA's by source), so that their ends are no samples.
  `max_examples` limits splits that begin with 'train', 0 takes all: the first
  rows of such a permutation, so that a larger subset contains a smaller one.
  """

  split: str
  task: str
  directory: str
  tokenizer: Annotated[
    str,
    Len(1),
    'a directory with tokenizer.json or vocab.txt, or such a file',
  ]
  max_length: MaxLength = 128
  length_buckets: Buckets = DEFAULT_BUCKETS
  max_examples: Annotated[int, Interval(ge=0, le=source.MAX_EXAMPLES)] = 0
  max_bad_share: source.BadShare = source.DEFAULT_BAD_SHARE

  def _open(
    self, class_names: tuple[str, ...], open_table: Callable[[str], Table]
  ) -> None:
    """Reads and tokenises the rows of the split.

    Args:
      class_names: a name for each label; () for a regression.
      open_table: opens a split by its name.

    Raises:
      InvalidDataError: no row can be used.
    """
    given = tokenizer.load(self.tokenizer)
    rows = self._rows(functools.cache(open_table))
    examples: dict[int, Example] = {}
    bad_rows = []
    for number, (table, row) in enumerate(rows):
      try:
        examples[number] = table.example(row)
      except BadRecord as bad:
        placed = bad.kind, bad.where or table.where(row), bad.message
        bad_rows.append((number, BadRecord(*placed)))
    if not examples:
      raise InvalidDataError(
        f'split {self.split!r} of {self.task}: none of its {len(rows)} rows '
        f'can be used; the first: {bad_rows[0][1]}'
      )
    good, texts = list(examples), [row.texts for row in examples.values()]
    first, *second = zip(*texts, strict=True)
    super().__init__(
      DatasetInfo(
        input_key='tokens',
        input_shape=(self.max_length,),
        input_dtype='int32',
        num_classes=max(len(class_names), 1),
        class_names=class_names,
        num_examples=len(good),
        vocab_size=given.vocab_size,
        label_dtype='int32' if class_names else 'float32',
        length_buckets=source.length_buckets(
          self.length_buckets, self.max_length
        ),
      ),
      given.encode(first, second[0] if second else None, self.max_length),
      np.array([example.label for example in examples.values()]),
      given.pad_id,
      lambda index: rows[good[index]][0].where(rows[good[index]][1]),
      bad_rows,
    )

  def _rows(
    self, open_table: Callable[[str], Table]
  ) -> list[tuple[Table, int]]:
    """Returns the rows of the split's parts, at most `max_examples`."""
    rows: list[tuple[Table, int]] = []
    for part in source.parts(self.split):
      table = open_table(part.name)
      start, stop = part.bounds(table.size)
      chosen = record_rng(_SUBSET_SEED).permutation(table.size)[start:stop]
      rows += [(table, row) for row in np.sort(chosen).tolist()]
    limit = self.max_examples
    if limit and self.split.startswith('train') and limit < len(rows):
      chosen = record_rng(_SUBSET_SEED).permutation(len(rows))[:limit]
      rows = [rows[row] for row in np.sort(chosen)]
    if not rows:
      raise InvalidDataError(f'split {self.split!r} of {self.task} is empty')
    return rows
