"""Tables of labelled texts, read as rows of token ids."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval, Len, Predicate
from jaxtyping import Shaped

from core import files
from core.errors import BadRecord, InvalidDataError
from dataset_lib import source, splits, tables, tokenizer
from dataset_lib.order import Places, record_rng
from dataset_lib.source import DatasetInfo, pad_rows, require
from dataset_lib.tables import decoded
from dataset_lib.tokenizer import Encoded

MAX_SCORE = 5.0  # of STS-B
MAX_NUMBER = float(np.finfo(np.float32).max)  # of labels
UNLABELLED = -1  # label of a row whose label is hidden, as in TFDS
MIN_LENGTH, MAX_LENGTH = tokenizer.MIN_LENGTH, tokenizer.MAX_LENGTH
FEW_ROWS = 'is empty; its file needs more rows, or more groups of them'
LISTS = '["', "['"  # how a list of texts begins
Function = Callable[[Any], Any]
SEVERAL = ('classes', 'tasks')  # kinds of rows with several labels
SOURCES = ('genre', 'source')  # columns of a row's source, preferred first


@dataclasses.dataclass(frozen=True)
class TextTask:
  """Columns and labels of a task; alternative column names, preferred first."""

  texts: tuple[tuple[str, ...], ...]  # names of the one or two text columns
  # Name of the label's column, of tasks the column of each; () reads no label.
  label: tuple[str, ...]
  class_names: tuple[str, ...] = ()  # of each label id; () for a regression
  folder: str = ''  # among GLUE's official files
  headless: tuple[str, ...] = ()  # columns of official files without a header
  by_name: bool = False  # files have the names of classes and not their ids
  sources: tuple[str, ...] = SOURCES  # alternatives; rows may have none
  kind: Literal['class', 'number', 'classes', 'tasks'] = 'class'
  limits: tuple[float, float] = (-MAX_NUMBER, MAX_NUMBER)  # of a number
  separator: str = ';'  # of several labels

  @property
  def is_regression(self) -> bool:
    """True where the label is a number, not a class."""
    return self.kind == 'number'

  @property
  def num_classes(self) -> int:
    """Number of outputs: 1 for a regression."""
    return len(self.class_names) or 1

  @property
  def names(self) -> set[str]:
    """All names that a column of the task may have."""
    return {*itertools.chain(*self.texts), *self.label, *self.sources}

  def columns(self, given: Collection[str], where: str = '') -> tuple[Any, Any]:
    """Returns the columns of texts and labels; InvalidDataError without."""
    texts = [names for names in self.texts if {*names} <= {*given}]
    labels = [name for name in self.label if name in given]
    count = len(self.label) if self.kind == 'tasks' else bool(self.label)
    if not texts or len(labels) < count:
      wanted = self.label if texts else map(', '.join, self.texts)
      wanted_columns = f'columns {" or ".join(wanted)}, got {", ".join(given)}'
      raise InvalidDataError(f'{where}: expected the {wanted_columns}')
    return texts[0], (*labels[:count],)

  def read(self, fields: Mapping[str, Any]) -> tuple[list[str], str]:
    """Returns the texts and the label of a row; BadRecord of a bad one."""
    columns = self._chosen(tuple(fields))
    texts, labels = (
      [decoded(x) if isinstance(x, bytes) else str(x) for x in values]
      for values in (map(fields.__getitem__, names) for names in columns)
    )
    if not labels:
      return texts, ''  # also of an empty text: every row is to be answered
    for number, text in enumerate(texts, 1):
      require(text.strip(), 'empty_text', f'text {number} is empty')
    if self.kind != 'tasks':
      return texts, labels[0].strip()
    named = zip(self.label, map(str.strip, labels), strict=True)
    return texts, json.dumps([f'{task}={one}' for task, one in named if one])

  def classes_of(self, fields: Mapping[str, Any]) -> list[str]:
    """Returns the classes of a row; BadRecord of a bad one."""
    return self.names_in(self.read(fields)[1])

  def names_in(self, label: str) -> list[str]:
    """Returns the classes that a label names; [] of a number.

    Several labels are a JSON list, or texts between separators.
    """
    if self.kind not in SEVERAL:
      return [label] * bool(label and self.kind == 'class')
    parts: Any = label.split(self.separator)
    if label.startswith('['):
      try:
        parts = files.loads(label)
      except ValueError as error:  # else a class, as [urgent]
        message = f'expected a list like ["a", "b"], got {label!r:.40}'
        if label.startswith(LISTS):  # of Python, or cut short
          raise BadRecord('illegal_label', '', message) from error
    names = (str(part).strip() for part in parts if part is not None)
    return [*dict.fromkeys(filter(None, names))]

  def read_label(self, label: str) -> Any:
    """Returns class ids, an id, or a number; BadRecord if it is not legal."""
    if not self.label:
      return math.nan if self.is_regression else UNLABELLED
    if self.is_regression:
      low, high = self.limits
      with contextlib.suppress(ValueError):
        # Python also reads 1_5.
        if low <= (value := float(label.replace('_', '?'))) <= high:
          return value
      expected = f'expected a number like 1.5 in [{low:.3g}, {high:.3g}]'
      raise BadRecord('illegal_label', '', f'{expected}, got {label!r:.40}')
    names = self.names_in(label)
    require(names, 'illegal_label', 'the label is empty')
    legal = 'the train split' if self.by_name else ', '.join(self._ids)
    for name in names:
      message = f'label {name!r:.40} not in {legal}'
      require(name in self._ids, 'illegal_label', message)
    ids = [self._ids[name] for name in names]
    return ids if self.kind in SEVERAL else ids[0]

  @functools.cached_property
  def _chosen(self) -> Function:
    return functools.cache(self.columns)

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    ids = {name: number for number, name in enumerate(self.class_names)}
    return ids if self.by_name else {str(n): n for n in ids.values()} | ids


class TokenSource(source.Batched):
  """Rows of token ids, padded when read; the last length bucket holds all."""

  def __init__(
    self,
    info: DatasetInfo,
    encoded: Encoded,
    labels: np.ndarray,
    pad_id: int,
    split: str = 'all',
  ):
    segments = int(encoded.token_types.max(initial=0)) + 1
    self.info = dataclasses.replace(info, token_types=segments)
    self.split = split
    self.lengths = encoded.lengths
    self.padding = {'tokens': pad_id, 'length': 1}
    self._encoded, self._labels = encoded, labels.astype(info.label_dtype)

  def read(self, places: Places, *how: Any) -> Any:
    """See `Source`."""
    return places.indices, self.records(places.indices, places.length or None)

  def records(self, indices: source.Indices, length: int | None = None) -> Any:
    """Returns rows padded to `length`, or to the bucket that holds them.

    {'tokens', 'token_types': int32 [B, length], 'length': int32 [B], 'label'}.
    """
    lengths = self.lengths[indices]
    if length is None:
      longest = lengths.max(initial=1)
      length = min(size for size in self.info.length_buckets if size >= longest)
    column = np.arange(length)
    valid = column < lengths[:, None]
    places = (self._encoded.offsets[indices][:, None] + column)[valid]
    tokens = np.full(valid.shape, self.padding['tokens'], np.int32)
    tokens[valid] = self._encoded.tokens[places]
    types = np.zeros(valid.shape, np.int32)
    types[valid] = self._encoded.token_types[places]
    label = self._labels[indices]
    return dict(tokens=tokens, token_types=types, length=lengths, label=label)

  def record(self, index: int) -> dict[str, Any]:
    """Returns tokens and types int32 [L] without padding, and the label."""
    row = slice(*self._encoded.offsets[index : index + 2])
    tokens, types = self._encoded.tokens[row], self._encoded.token_types[row]
    label = self._labels[index].tolist()
    return dict(tokens=tokens, token_types=types, label=label)


def length_buckets(sizes: Sequence[int], max_length: int) -> tuple[int, ...]:
  """Returns the sizes below `max_length`, and `max_length`."""
  return (*(size for size in sizes if size < max_length), max_length)


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
  tokenizer: Annotated[
    str, Len(1), 'a directory with tokenizer.json or vocab.txt, or such a file'
  ]
  max_length: MaxLength = 128
  length_buckets: Buckets = (32, 64, 128)
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

  def _read(self, name: str, open_split: Function, read: Function) -> list[Any]:
    """Returns `read` of all good rows; sets their places, and the bad rows.

    `open_split(split)` is like a `Table`; `name` is for errors.
    """
    rows: list[tables.Place] = []
    for _, records, part in source.selected(self.split, open_split):
      rows += [(records, row) for row in _subset(len(records), part)]
    if self.max_examples and self.split.startswith('train'):
      rows = [rows[row] for row in _subset(len(rows), range(self.max_examples))]
    good, self.bad_rows = tables.read_all(rows, read)
    self._places = [rows[number] for number, _ in good]
    if not good:
      problem = f'has {len(rows)} rows, of which none can be used; the first: '
      problem = problem + str(self.bad_rows[0][1]) if rows else FEW_ROWS
      raise InvalidDataError(f'split {self.split!r} of {name} {problem}')
    return [value for _, value in good]

  def _class_names(
    self, rows: Any, names_of: Function, most: int, what: str, least: int = 2
  ) -> tuple[str, ...]:
    """Returns the sorted classes of the rows, `least` to `most`, 0: any."""
    good, bad = tables.read_all(tables.places(rows), names_of)
    names = sorted({name for _, own in good for name in own})
    if bad and not good:  # as of a file in another encoding
      error = bad[0][1]
      raise InvalidDataError(
        f'{error.where}: {error.message}; no row can be read'
      )
    if not least <= len(names) <= (most or len(names)):
      expected = f'{least} to {most}' if most else f'at least {least}'
      message = f'{rows.path}: expected {expected} {what}, got {len(names)}: '
      message += ', '.join(names[:10])
      for _, error in bad[:1]:  # all are reported where they are used
        message += f'; {error.where}: {error.message}'
      raise InvalidDataError(message)
    return tuple(names)

  def _hold(
    self,
    words: tokenizer.Tokenizer,
    class_names: Sequence[str],
    encoded: Encoded,
    labels: Shaped[np.ndarray, 'N ...'],
    kind: source.LabelKind,
  ) -> None:
    """Initializes the source; without classes the labels are numbers."""
    info = DatasetInfo(
      'tokens', (self.max_length,), 'int32', len(class_names) or 1,
      tuple(class_names), len(encoded.lengths), words.vocab_size,
      'int32' if class_names else 'float32',
      length_buckets(self.length_buckets, self.max_length),
      labels.shape[1] if kind in SEVERAL else 0,
      label_kind=kind,
      preprocessing=words.preprocessing(self.max_length),
      digest=splits.digest(encoded.tokens, encoded.offsets, labels),
    )  # fmt: skip
    super().__init__(info, encoded, labels, words.pad_id, self.split)


@dataclasses.dataclass(kw_only=True, eq=False)
class LabelledTexts(TextRows):
  """Texts or pairs with a label; `sources` are those of the rows."""

  HAS_FILES = True

  def _open(self, task: TextTask, open_split: Function, name: str) -> None:
    """Reads and tokenises rows; see `_read`."""

    def read(fields: Mapping[str, Any]) -> tuple[list[str], Any, str]:
      texts, label = task.read(fields)
      # MNLI may have both, with one source for all rows.
      origin = next((fields[n] for n in task.sources if n in fields), '')
      return texts, task.read_label(label), sys.intern(origin)

    self._task = task
    loaded = tokenizer.load(self.tokenizer)
    rows = self._read(name, open_split, read)
    texts, labels, self.sources = zip(*rows, strict=True)
    ids: Any = labels
    if task.kind in SEVERAL:
      most = len(task.label) if task.kind == 'tasks' else max(map(len, labels))
      ids = pad_rows(labels, (len(labels), most), fill=-1)
    first, second, *_ = [*zip(*texts, strict=True), None]
    encoded = loaded.encode(first, second, self.max_length)
    self._hold(loaded, task.class_names, encoded, np.asarray(ids), task.kind)

  def item(self, index: int) -> dict[str, str]:
    """See `Source`."""
    records, row = self._places[index]
    texts, _ = self._task.read(records[row])
    return dict(zip(('text', 'pair'), texts, strict=False))

  def contents(self) -> list[str]:
    """Returns a key of the texts of each row; see `splits.content`."""
    return [splits.content(self.item(i).values()) for i in range(len(self))]


def _subset(size: int, part: range) -> list[int]:
  """Returns a part of a fixed permutation, in ascending order."""
  rows = record_rng(0).permutation(size)[part.start : part.stop]
  return np.sort(rows).tolist()
