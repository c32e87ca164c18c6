"""Files of labelled texts, read as rows of token ids.

TSV files have no quoting: a `"` is a character of the text, and csv's reader
would join rows between two of them. A line is a row, a tab ends a column, and
every line is decoded by itself, so that a bad row spoils no other.
"""

import contextlib
import dataclasses
import functools
import gzip
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Interval, Len, Predicate

from dataset_lib import source, tokenizer
from dataset_lib.errors import BadRecord, InvalidDataError
from dataset_lib.order import record_rng
from dataset_lib.source import DatasetInfo, TokenSource, require

MAX_SCORE = 5.0  # of STS-B
DEFAULT_BUCKETS = (32, 64, 128)
MIN_LENGTH, MAX_LENGTH = tokenizer.MIN_LENGTH, 65536
_SUBSET_SEED = 0

Line = tuple[int, bytes]  # its number in the file, from 1


class Example(NamedTuple):
  """One or two texts, and a class or a score."""

  texts: tuple[str, ...]
  label: int | float | str


class Table(NamedTuple):
  """The rows of one split, bad ones included."""

  size: int
  example: Callable[[int], Example]  # raises BadRecord
  where: Callable[[int], str]  # file of a row and its line or record there


@dataclasses.dataclass(frozen=True)
class TextTask:
  """Columns and labels of a task; alternatives of columns are best first."""

  folder: str  # among GLUE's official files
  texts: tuple[tuple[str, ...], ...]  # names of the one or two text columns
  label: tuple[str, ...]  # name of the label's column
  class_names: tuple[str, ...]  # of each label id; () for a regression
  headless: tuple[str, ...] = ()  # columns of official files without a header
  # Files have the id or the name of a class, or only the name; 'text' leaves
  # labels as they are.
  labels: Literal['id', 'name', 'text'] = 'id'

  @property
  def is_regression(self) -> bool:
    """True where the label is a number, not a class."""
    return not self.class_names

  @property
  def num_classes(self) -> int:
    """Number of outputs: 1 for a regression."""
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
    """Returns an example; BadRecord if a text or the label is not legal."""
    for number, text in enumerate(texts, 1):
      require(text.strip(), 'empty_text', f'text {number} is empty')
    return Example(tuple(texts), self._read_label(label.strip()))

  def _read_label(self, label: str) -> int | float | str:
    if self.labels == 'text':
      require(label, 'illegal_label', 'expected a label, got nothing')
      return label
    if self.is_regression:
      with contextlib.suppress(ValueError):
        if 0.0 <= float(label) <= MAX_SCORE:  # not NaN
          return float(label)
      message = f'score {label!r:.40} not in [0, {MAX_SCORE}]'
      raise BadRecord('illegal_label', '', message)
    if label not in self._ids:
      legal = ', '.join(
        f'{n} {name}' for n, name in enumerate(self.class_names)
      )
      legal = legal if self.labels == 'id' else 'the train split'
      message = f'label {label!r:.40} is none of {legal}'
      raise BadRecord('illegal_label', '', message)
    return self._ids[label]

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    names = {name: number for number, name in enumerate(self.class_names)}
    ids = {str(number): number for number in names.values()}
    return ids | names if self.labels == 'id' else names


def table(
  path: pathlib.Path,
  lines: Sequence[Line],
  read: Callable[[list[str]], Example],
) -> Table:
  """Returns the rows of a file; `read` makes examples of their columns."""
  return Table(
    len(lines),
    lambda row: read(decoded(lines[row][1]).split('\t')),
    lambda row: f'{path}, line {lines[row][0]}',
  )


def decoded(text: bytes) -> str:
  """Returns a text; raises BadRecord if it is not UTF-8."""
  try:
    return text.decode('utf-8')
  except UnicodeDecodeError as error:
    raise BadRecord('not_utf8', '', str(error)) from error


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
      message = f'{path} is damaged or cut short, copy it again: {error}'
      raise InvalidDataError(message) from error
  if not data.strip():
    raise InvalidDataError(f'{path} is empty; copy it again')
  lines = data.removeprefix(b'\xef\xbb\xbf').split(b'\n')
  while not lines[-1].strip(b'\r '):
    lines.pop()
  return [
    (number, line.removesuffix(b'\r')) for number, line in enumerate(lines, 1)
  ]


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
  'train[:95%]' are slices of one fixed permutation: files are ordered (CoLA's
  by source), so that their ends are no samples. `max_examples` takes the first
  rows of such a permutation of a split that begins with 'train', 0 all of them.
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
    self, text_task: TextTask, open_table: Callable[[str], Table]
  ) -> None:
    """Reads and tokenises the rows; `open_table` opens a split by its name."""
    given = tokenizer.load(self.tokenizer)
    rows = self._rows(functools.cache(open_table))
    examples, good, bad_rows = [], [], []
    for number, (table, row) in enumerate(rows):
      try:
        examples.append(table.example(row))
        good.append((table, row))
      except BadRecord as bad:
        placed = bad.kind, bad.where or table.where(row), bad.message
        bad_rows.append((number, BadRecord(*placed)))
    if not good:
      found = f'has {len(rows)} rows, of which none can be used; the first: '
      found = found + str(bad_rows[0][1]) if rows else 'is empty'
      raise InvalidDataError(f'split {self.split!r} of {self.task} {found}')
    texts, labels = zip(*examples, strict=True)
    first, *second = zip(*texts, strict=True)
    info = DatasetInfo(
      'tokens',
      (self.max_length,),
      'int32',
      text_task.num_classes,
      text_task.class_names,
      len(good),
      given.vocab_size,
      'float32' if text_task.is_regression else 'int32',
      source.length_buckets(self.length_buckets, self.max_length),
    )
    super().__init__(
      info,
      given.encode(first, second[0] if second else None, self.max_length),
      np.array(labels),
      given.pad_id,
      lambda index: good[index][0].where(good[index][1]),
      bad_rows,
    )

  def _rows(
    self, open_table: Callable[[str], Table]
  ) -> list[tuple[Table, int]]:
    rows: list[tuple[Table, int]] = []
    for part in source.parts(self.split):
      table = open_table(part.name)
      chosen = _permuted(table.size)[part.rows(table.size)]
      rows += [(table, row) for row in np.sort(chosen).tolist()]
    if self.max_examples and self.split.startswith('train'):
      chosen = _permuted(len(rows))[: self.max_examples]
      rows = [rows[row] for row in np.sort(chosen)]
    return rows


def _permuted(count: int) -> np.ndarray:
  return record_rng(_SUBSET_SEED).permutation(count)
