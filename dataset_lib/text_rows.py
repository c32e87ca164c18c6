"""Files of labelled texts, read as rows of token ids.

TSV files have no quoting. Each line is decoded by itself, so that a bad row
does not affect others.
"""

import contextlib
import dataclasses
import functools
import gzip
import io
import math
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval, Len, Predicate

from core import files
from core.errors import BadRecord, InvalidDataError
from dataset_lib import source, tokenizer
from dataset_lib.order import record_rng
from dataset_lib.source import DatasetInfo, require
from dataset_lib.token_rows import Encoded, TokenSource, length_buckets

MAX_SCORE = 5.0  # of STS-B
UNLABELLED = -1  # label of a row whose label is hidden, as in TFDS
DEFAULT_BUCKETS = (32, 64, 128)
MIN_LENGTH, MAX_LENGTH = tokenizer.MIN_LENGTH, tokenizer.MAX_LENGTH
MAX_TEXT, MAX_LINES = 2**29, 10**7  # bytes and lines of a file, unpacked
MAX_LINE = 2**20  # bytes of a row
_SUBSET_SEED = 0
SOURCES = ('genre', 'source')  # columns of a row's source, preferred first

Line = tuple[int, bytes]  # its number in the file, from 1


@dataclasses.dataclass(frozen=True)
class TextFile:
  """Lines of a file as rows of named columns."""

  path: Path
  lines: Sequence[Line]
  columns: Sequence[str]

  def __len__(self) -> int:
    return len(self.lines)

  def __getitem__(self, row: int) -> dict[str, str]:
    fields = decoded(self.lines[row][1]).split('\t')
    message = f'expected {len(self.columns)} columns, got {len(fields)}'
    require(len(fields) == len(self.columns), 'wrong_columns', message)
    return dict(zip(self.columns, fields, strict=True))

  def where(self, row: int) -> str:
    """Returns the file of a row and its line there."""
    return f'{self.path}, line {self.lines[row][0]}'


@dataclasses.dataclass(frozen=True)
class TextTask:
  """Columns and labels of a task; alternative column names, preferred first."""

  texts: tuple[tuple[str, ...], ...]  # names of the one or two text columns
  label: tuple[str, ...]  # name of the label's column; () reads no label
  class_names: tuple[str, ...]  # of each label id; () for a regression
  folder: str = ''  # among GLUE's official files
  headless: tuple[str, ...] = ()  # columns of official files without a header
  by_name: bool = False  # files have the names of classes and not their ids

  @property
  def is_regression(self) -> bool:
    """True where the label is a number, not a class."""
    return not self.class_names

  @property
  def num_classes(self) -> int:
    """Number of outputs: 1 for a regression."""
    return len(self.class_names) or 1

  def columns(self, given: Collection[str], where: str = '') -> tuple[str, ...]:
    """Returns the columns of texts and label; InvalidDataError without them."""
    texts = [names for names in self.texts if {*names} <= {*given}]
    labels = [name for name in self.label if name in given]
    if not texts or len(labels) < bool(self.label):
      wanted = self.label if texts else map(', '.join, self.texts)
      wanted_columns = f'columns {" or ".join(wanted)}, got {", ".join(given)}'
      raise InvalidDataError(f'{where}: expected the {wanted_columns}')
    chosen = *texts[0], *labels[:1]
    for name in (*chosen, *SOURCES):
      if [*given].count(name) > 1:
        raise InvalidDataError(f'{where}: expected one column {name!r}')
    return chosen

  def read(self, fields: Mapping[str, Any]) -> tuple[list[str], str]:
    """Returns the texts and the label of a row; BadRecord of a bad one."""
    values = (fields[name] for name in self.columns(fields))
    texts = [
      decoded(text) if isinstance(text, bytes) else str(text) for text in values
    ]
    if not self.label:
      return texts, ''  # also of an empty text: every row is to be answered
    label = texts.pop()
    for number, text in enumerate(texts, 1):
      require(text.strip(), 'empty_text', f'text {number} is empty')
    return texts, label.strip()

  def read_label(self, label: str) -> int | float:
    """Returns the id of a class, or a score; BadRecord if it is not legal."""
    if not self.label:
      return math.nan if self.is_regression else UNLABELLED
    if self.is_regression:
      with contextlib.suppress(ValueError):
        if 0.0 <= float(label) <= MAX_SCORE:  # not NaN
          return float(label)
      legal = f'[0, {MAX_SCORE}]'
    elif label in self._ids:
      return self._ids[label]
    else:
      legal = 'the train split' if self.by_name else ', '.join(self._ids)
    raise BadRecord('illegal_label', '', f'label {label!r:.40} not in {legal}')

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    ids = {name: number for number, name in enumerate(self.class_names)}
    return ids if self.by_name else {str(n): n for n in ids.values()} | ids


def decoded(text: bytes) -> str:
  """Returns a text; BadRecord if it is long or not UTF-8."""
  files.check_size(len(text), MAX_LINE)
  try:
    return text.decode('utf-8')
  except UnicodeDecodeError as error:
    raise BadRecord('not_utf8', '', str(error)) from error


def read_lines(path: Path) -> list[Line]:
  """Reads lines, plain or gzip; MissingDataError if the file is missing.

  InvalidDataError if it is damaged, empty or larger than the limits.
  """
  data = files.read_bytes(path, MAX_TEXT)
  try:
    if path.suffix == '.gz':
      with gzip.open(io.BytesIO(data)) as file:
        data = file.read(MAX_TEXT + 1)
  except (EOFError, OSError, zlib.error) as error:
    message = f'{path} is damaged or cut short, copy it again: {error}'
    raise InvalidDataError(message) from error
  if len(data) > MAX_TEXT or data.count(b'\n') > MAX_LINES:
    limits = f'at most {MAX_TEXT} bytes, unpacked, and {MAX_LINES} lines'
    raise InvalidDataError(f'{path}: expected {limits}, got more; split it')
  data = data.removeprefix(b'\xef\xbb\xbf')
  if not data.strip():
    raise InvalidDataError(f'{path} is empty; copy it again')
  lines = data.split(b'\n')
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
class TextRows(TokenSource):
  """Texts in files, all tokenised when the split is opened.

  Files are ordered, so a part like 'train[:95%]' is a slice of one fixed
  permutation, as are `max_examples` rows of a training split; 0: all.
  """

  split: str
  directory: str
  tokenizer: Annotated[
    str, Len(1), 'a directory with tokenizer.json or vocab.txt, or such a file'
  ]
  max_length: MaxLength = 128
  length_buckets: Buckets = DEFAULT_BUCKETS
  max_examples: Annotated[int, Interval(ge=0, le=source.MAX_EXAMPLES)] = 0
  max_bad_share: source.BadShare = source.DEFAULT_BAD_SHARE

  @classmethod
  def sketch(cls, config: Any, classes: int, examples: int) -> Any:
    """See `Source`."""
    shape = (config['max_length'],)
    info = DatasetInfo('tokens', shape, 'int32', classes, (), examples)
    return info, {'token_types': (shape, 'int32'), 'length': ((), 'int32')}

  def where(self, index: int) -> str:
    """Returns the file of a row and its line there."""
    records, row = self._places[index]
    return records.where(row)

  def _read(
    self,
    name: str,
    open_split: Callable[[str], Any],
    read: Callable[[Any], Any],
  ) -> list[Any]:
    """Returns `read` of all good rows; sets their places, and the bad rows.

    `open_split(split)` is like a `TextFile`; `name` is for errors.
    """
    rows = self._rows(open_split)
    values, bad_rows = [], []
    self._places: list[tuple[Any, int]] = []
    for number, (records, row) in enumerate(rows):
      try:
        values.append(read(records[row]))
        self._places.append((records, row))
      except BadRecord as bad:
        placed = bad.kind, bad.where or records.where(row), bad.message
        bad_rows.append((number, BadRecord(*placed)))
    if not values:
      problem = f'has {len(rows)} rows, of which none can be used; the first: '
      problem = problem + str(bad_rows[0][1]) if rows else 'is empty'
      raise InvalidDataError(f'split {self.split!r} of {name} {problem}')
    self.bad_rows = tuple(bad_rows)
    return values

  def _class_names(
    self, rows: Any, names_of: Callable[[Any], set[str]], most: int, what: str
  ) -> tuple[str, ...]:
    """Returns the sorted classes of the train split, 2 to `most`, 0: any."""
    unique: set[str] = set()
    for row in range(len(rows)):
      with contextlib.suppress(BadRecord):  # reported where it is used
        unique |= names_of(rows[row])
    names = sorted(unique)
    if not 2 <= len(names) <= (most or len(names)):
      expected = f'2 to {most} {what}' if most else f'2 {what} or more'
      got = f'got {len(names)}: {", ".join(names[:10])}'
      raise InvalidDataError(f'{self.directory}: expected {expected}, {got}')
    return tuple(names)

  def _hold(
    self,
    words: tokenizer.Tokenizer,
    class_names: Sequence[str],
    encoded: Encoded,
    labels: Any,
    kind: source.LabelKind = '',
  ) -> None:
    """Initializes the source; without classes the labels are numbers."""
    info = DatasetInfo(
      'tokens', (self.max_length,), 'int32', len(class_names) or 1,
      tuple(class_names), len(encoded.lengths), words.vocab_size,
      'int32' if class_names else 'float32',
      length_buckets(self.length_buckets, self.max_length),
      label_kind=kind or ('class' if class_names else 'number'),
      preprocessing=words.preprocessing(self.max_length),
    )  # fmt: skip
    super().__init__(info, encoded, np.asarray(labels), words.pad_id)

  def _rows(self, open_split: Callable[[str], Any]) -> list[tuple[Any, int]]:
    rows: list[tuple[Any, int]] = []
    for _, records, part in source.selected(self.split, open_split):
      rows += [(records, row) for row in _subset(len(records), part)]
    if self.max_examples and self.split.startswith('train'):
      rows = [rows[row] for row in _subset(len(rows), range(self.max_examples))]
    return rows


@dataclasses.dataclass(kw_only=True, eq=False)
class LabelledTexts(TextRows):
  """Texts or pairs with a label; `sources`: the columns 'genre' or 'source'."""

  task: str

  def _open(self, task: TextTask, open_split: Callable[[str], Any]) -> None:
    """Reads and tokenises rows; `open_split(name)` is like a `TextFile`."""

    def read(fields: Mapping[str, Any]) -> tuple[list[str], int | float, str]:
      texts, label = task.read(fields)
      # MNLI may have both, with one source for all rows.
      origin = next((fields[name] for name in SOURCES if name in fields), '')
      return texts, task.read_label(label), sys.intern(origin)

    loaded = tokenizer.load(self.tokenizer)
    rows = self._read(self.task, open_split, read)
    texts, labels, self.sources = zip(*rows, strict=True)
    first, second, *_ = [*zip(*texts, strict=True), None]
    encoded = loaded.encode(first, second, self.max_length)
    self._hold(loaded, task.class_names, encoded, labels)


def _subset(size: int, part: range) -> list[int]:
  """Returns a part of a fixed permutation, in ascending order."""
  rows = record_rng(_SUBSET_SEED).permutation(size)[part.start : part.stop]
  return np.sort(rows).tolist()
