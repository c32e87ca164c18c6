"""Labelled texts of one's own: files of rows, with splits made if need be.

`path` is a file that `dataset_lib.tables` reads, or a folder with a file for
each split: train, validation (or dev, val), test. Missing splits are made of
rows of train, see `dataset_lib.splits`. The classes are the labels of train.
"""

import collections
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Len, Predicate

from core import files
from core.errors import ConfigError, InvalidDataError, MissingDataError
from dataset_lib import splits, tables, tokenizer
from dataset_lib.source import PART_WORDS, Seed, parts, require
from dataset_lib.tables import Table
from dataset_lib.text_rows import (
  LISTS,
  Buckets,
  LabelledTexts,
  MaxLength,
  TextTask,
)

STEMS = {
  'train': ('train',), 'validation': ('validation', 'dev', 'val', 'valid'),
  'test': ('test',),
}  # fmt: skip
# A file of a split, or a part of one as a hub names it.
PART = re.compile(
  r'(?P<stem>.*?)(-(?P<part>\d+)-of-(?P<of>\d{1,6})(-[0-9a-f]+)?)?', re.DOTALL
)
Tables = dict[str, Table]
ALL = 'all'  # the rows of a file, without splits
COLUMNS = ('text', 'pair', 'label', 'source', 'group')  # fields
MAX_LENGTH, UNIT = 512, 8  # tokens of a row, and their unit, of data
QUANTILES = (0.5, 0.9)  # of the lengths of rows, which are buckets
SAMPLE = 4096  # train rows that determine lengths
MISSING = {'nan', 'NaN', 'None', 'null', 'NULL', 'N/A'}  # of other programs
FEW = 20  # classes, which may be more than half of the rows


@dataclasses.dataclass(kw_only=True, eq=False)
class Texts(LabelledTexts):
  """Rows of a file, or of a folder of files; 'all' is all rows of a file."""

  PLACE = 'path'

  split: Annotated[
    str,
    Predicate(lambda split: parts(split, 'train|validation|dev|test|all')),
    f'train, validation, test, all, {PART_WORDS}',
  ]
  path: Annotated[str, Len(1), 'a file, or a folder with a file of each split']
  text: Annotated[str, Len(1), 'the column of the text'] = 'text'
  pair: Annotated[str, "the column of a second text, or ''"] = ''
  # Of kind=tasks 'domain+language': a row's label for each, perhaps empty.
  label: Annotated[str, Len(1), 'the column of the label'] = 'label'
  source: Annotated[str, "the column of a row's source, or ''"] = ''
  # Rows of a group are in one split; '': rows of the same texts are a group.
  group: Annotated[str, "the column of a row's group, or ''"] = ''
  kind: Literal['class', 'number', 'classes', 'tasks'] = 'class'
  separator: Annotated[str, Len(1)] = ';'  # of several labels
  split_shares: splits.Shares = splits.SHARES
  split_seed: Seed = 0
  # 0 and (): those of the train rows.
  max_length: MaxLength | Literal[0] = 0
  length_buckets: Buckets = ()

  @staticmethod
  def check_fields(config: Mapping[str, Any]) -> None:
    """See `Source`; names of tasks are in names of files and metrics."""
    names = config['label'].split('+')
    is_legal = len({*names}) == len(names) > 1
    is_legal &= all(re.fullmatch(r'[\w-]+', name) for name in names)
    if config['kind'] == 'tasks' and not is_legal:
      expected = "columns as 'domain+language', whose names have letters, "
      expected += 'digits, _ and - only; rename them'
      raise ConfigError('dataset.label', config['label'], expected)

  @classmethod
  def sketch(cls, config: Any, classes: int, examples: int) -> Any:
    """See `TextRows.sketch`; `max_length` must be given."""
    if not config['max_length']:
      expected = 'a number, as there are no rows to take it from'
      raise ConfigError('dataset.max_length', 0, expected)
    info, rows = super().sketch(config, classes, examples)
    if config['kind'] == 'number':
      info = dataclasses.replace(info, num_classes=1, label_dtype='float32')
    return info, rows

  def __post_init__(self) -> None:
    texts = (self.text, self.pair) if self.pair else (self.text,)
    labels = self.label.split('+') if self.kind == 'tasks' else [self.label]
    task = TextTask(
      (texts,), (*labels,), by_name=True, kind=self.kind,
      sources=(self.source,) * bool(self.source), separator=self.separator,
    )  # fmt: skip
    # `where` compares; methods of a path raise for an endless link.
    root = Path(os.path.realpath(os.path.expanduser(self.path)))
    opened = {k: self._table(p, task) for k, p in _files(root).items()}
    self._about: dict[str, Any] = {}
    names_of_parts = {part.name for part in parts(self.split)}
    if not (is_all := ALL in names_of_parts):
      opened = self._completed(opened, task)
    elif len(opened) > 1 or len(names_of_parts) > 1:
      expected = "'all' alone, and of one file: name one of a folder"
      raise ConfigError('split', self.split, expected)
    train = opened['train']
    if self.kind != 'number':
      names = self._classes(train, task, least=1 if is_all else 2)
      task = dataclasses.replace(task, class_names=names)
    self._fit_lengths(train, task)
    other: Any = {'dev': 'validation', ALL: 'train'}
    self._open(task, lambda name: opened[other.get(name, name)], str(root))
    are_made = root.is_file() and not self.group  # without copies
    if not (is_all or are_made or 'train' in names_of_parts):
      good, _ = tables.read_all(tables.places(train), task.read)
      known = [splits.content(texts) for _, (texts, _) in good]
      where = f'{self.path}, {self.split}'
      splits.warn_of_copies(where, 'texts', known, self.contents())
    scale = self._label_scale(train, task)
    self.info = dataclasses.replace(
      self.info, splits=self._about, label_scale=scale
    )

  def _table(self, paths: Sequence[Path], task: TextTask) -> Table:
    """Reads the columns of the fields; ConfigError if one is not there."""
    names = task.names | {self.group} - {''}
    table = _joined([tables.read(path, names) for path in paths])
    for label in task.label:
      columns = {field: getattr(self, field) for field in COLUMNS}
      table.require(columns | {'label': label})
    if not len(table):
      what = 'has no rows, only names of columns'
      raise InvalidDataError(f'{table.path} {what}')
    return table

  def _classes(
    self, train: Table, task: TextTask, least: int
  ) -> tuple[str, ...]:
    """Returns the classes, of each task at least two if `least` is."""
    what = f'classes in the column {self.label!r}'
    names = self._class_names(train, task.classes_of, 0, what, least)
    splits.warn_of_look_alikes(train.path, names)
    for name in MISSING.intersection(names):
      missing = f'the class {name!r}: a cell of a missing label is empty'
      splits.warn_once(f'{train.path}: {missing}')
    columns = {self.label: names}
    if self.kind == 'class' and (lists := [n for n in names if n[:2] in LISTS]):
      expected = f'classes: the column {self.label!r} has lists, as {lists[0]}'
      raise ConfigError('dataset.kind', self.kind, expected)
    if self.kind == 'tasks':
      columns = {
        label: tuple(name for name in names if name.startswith(f'{label}='))
        for label in task.label
      }
    for label, own in columns.items():
      if len(own) < least > 1:
        what = f'2 classes in the column {label!r}, got {", ".join(own)}'
        raise InvalidDataError(f'{train.path}: expected at least {what}')
      # A list names several; rows of a run that is trained may be few.
      is_free = self.kind == 'classes' or least == 1
      if len(own) > max(FEW, len(train) / 2) and not is_free:
        expected = f'a column of classes: it has {len(own)} values in '
        expected += (
          f'{len(train)} rows; configs/texts.py:kind=number trains numbers'
        )
        raise ConfigError('dataset.label', label, expected)
    return (*itertools.chain(*columns.values()),)

  def _completed(self, opened: Tables, task: TextTask) -> Tables:
    """Returns all splits, the missing ones made of rows of train."""
    given = zip(splits.NAMES, self.split_shares, strict=True)
    shares = [0.0 if name in opened else share for name, share in given]
    table = opened['train']
    read = functools.partial(self._row, task)
    good, bad = tables.read_all(tables.places(table), read)
    _warn_of_repeats(table.path, [row[:2] for _, row in good])
    if not any(shares):
      return dict.fromkeys(splits.NAMES, table.take(())) | opened
    shares[0] = 1 - sum(shares)
    rows = [row for _, (*_, row) in good]
    made, about = splits.make(rows, shares, self.split_seed)
    self._about = about | {'group': self.group}
    taken = {name: [good[row][0] for row in made[name]] for name in made}
    taken['train'] += [place for place, _ in bad]  # train tolerates some
    tables_made = {name: table.take(taken[name]) for name in taken}
    return {**tables_made, **opened, 'train': tables_made['train']}

  def _row(
    self, task: TextTask, values: Mapping[str, str]
  ) -> tuple[str, str, splits.Row]:
    """Returns content, label, and what the split depends on; or BadRecord."""
    texts, label = task.read(values)
    names = task.names_in(label)
    if self.kind == 'number':
      task.read_label(label)
    else:
      require(names, 'illegal_label', 'the label is empty')
    content = splits.content(texts)
    group = values[self.group].strip() if self.group else ''
    hashed = group or content, f'{content}\0{label}'
    sums = [splits.checksum(x.encode()) for x in hashed]
    return content, label, splits.Row(names, *sums)

  def _label_scale(self, train: Table, task: TextTask) -> tuple[float, float]:
    """Returns mean and standard deviation of numbers; (0, 1) of classes."""
    if self.kind != 'number':
      return 0.0, 1.0

    def number(values: Mapping[str, str]) -> float:
      return task.read_label(task.read(values)[1])

    good, _ = tables.read_all(tables.places(train), number)
    numbers = [label for _, label in good]
    if not numbers:
      return 0.0, 1.0
    return float(np.mean(numbers)), float(np.std(numbers)) or 1.0

  def _fit_lengths(self, train: Table, task: TextTask) -> None:
    """Sets lengths that are not given, by those of at most 2 `SAMPLE` rows."""
    good, _ = tables.read_all(tables.places(train), task.read)
    rows = [texts for _, (texts, _) in good]
    if not rows or (self.max_length and self.length_buckets):
      return
    rows.sort(key=lambda texts: sum(map(len, texts)))
    # The longest, which is the last, is always there.
    sample = rows[:: -(len(rows) // SAMPLE + 1)]
    first, second, *_ = [*zip(*sample, strict=True), None]
    words = tokenizer.load(self.tokenizer)
    longest = self.max_length or MAX_LENGTH
    lengths = words.encode(first, second, longest).lengths
    self.max_length = self.max_length or _rounded(float(lengths.max(initial=1)))
    sizes = map(_rounded, np.quantile(lengths, QUANTILES))
    # A bucket that saves little is not worth its compilation.
    self.length_buckets = self.length_buckets or tuple(
      size for size, longer in itertools.pairwise((*sizes, self.max_length))
      if size <= 0.75 * longer
    )  # fmt: skip


def _joined(parts: Sequence[Table]) -> Table:
  """Returns the rows of several files, which have the same columns."""
  first, *others = parts
  for one in others:
    if one.kept != first.kept:
      expected = f'the columns {", ".join(first.kept)}, as in {first.path}'
      got = ', '.join(one.kept) or 'none of them'
      raise InvalidDataError(f'{one.path}: expected {expected}, got {got}')
  if not others:
    return first
  return dataclasses.replace(
    first,
    rows=[row for one in parts for row in one.rows],
    numbers=[(one.path, number) for one in parts for number in one.numbers],
  )


def _warn_of_repeats(path: Path, rows: Sequence[Any]) -> None:
  """Logs how many of some (content, label) are there more than once."""
  if copies := len(rows) - len({*rows}):
    splits.warn_once(f'{path}: {copies} rows are copies of others')
  labels = collections.Counter(content for content, _ in {*rows})
  if several := sum(count > 1 for count in labels.values()):
    splits.warn_once(f'{path}: {several} texts occur with different labels')


def _rounded(length: float) -> int:
  return -(-int(np.ceil(length)) // UNIT) * UNIT


def _files(root: Path) -> dict[str, list[Path]]:
  """Returns the files of each split, in order; a single file is 'train'."""
  if not root.is_dir() or tables.form_of(root):
    return {'train': [root]}
  found: dict[str, list[Path]] = {}
  numbers: dict[str, list[tuple[str, int]]] = {}  # of each part, and of all
  for path in sorted(root.iterdir()):
    name: Any = PART.fullmatch(path.name.split('.')[0].lower())
    split = next((k for k, stems in STEMS.items() if name['stem'] in stems), '')
    if split and tables.form_of(path):
      files.check_inside(path, root)
      found.setdefault(split, []).append(path)
      number = name['part'] or '', int(name['of'] or 1)
      numbers.setdefault(split, []).append(number)
  for split, paths in found.items():
    parts, totals = zip(*numbers[split], strict=True)
    if {*totals} != {len({*parts})} or len(paths) != totals[0]:
      got = ', '.join(path.name for path in paths)
      expected = f'one file of {split}, or all parts, as '
      expected += f'{split}-00000-of-00002'
      raise InvalidDataError(f'{root}: expected {expected}, got {got}')
  if 'train' not in found:
    expected = 'expected train.csv, .tsv, .jsonl or .parquet, perhaps with '
    expected += 'validation and test; or give the path of one file'
    raise MissingDataError(f'{root}: {expected}')
  return found
