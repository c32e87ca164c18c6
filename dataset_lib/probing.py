"""Probing tasks: what does a sentence's representation tell about it?

Conneau et al. 2018, "What you can cram into a single vector". Reads SentEval's
files `<task>.txt`, which hold all splits ('tr', 'va' or 'te', the class,
perhaps more columns, the sentence), and TSV files of one split with a header
(`<task>/train.tsv`, columns 'sentence' and 'label'); both plain or gzip.
Batches are those of `glue`. Splits are 'train', 'validation' ('dev') and
'test', and parts and sums of them; see `text_rows`.

The classes are the sorted labels of the whole train split, whatever part of it
is read; a row with another label is a bad one.
"""

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from dataset_lib import fields, text_rows, tokenizer
from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.source import TokenSource
from dataset_lib.tsv_files import (
  SUFFIXES,
  Example,
  Table,
  TsvTable,
  check_texts,
  read_columns,
  read_lines,
)

# SentEval's ten tasks: how many classes there are at most, and which.
TASKS = {
  'sentence_length': (6, '0 to 5, for 5 to 28 words'),
  'word_content': (1000, 'the word of 1,000 that the sentence has'),
  'tree_depth': (8, '5 to 12, the depth of the syntax tree'),
  'bigram_shift': (2, 'I: two neighbours swapped; O: original'),
  'top_constituents': (20, 'what the sentence consists of, or OTHER'),
  'past_present': (2, 'PAST and PRES, the tense of the main verb'),
  'subj_number': (2, 'NN and NNS, the number of the subject'),
  'obj_number': (2, 'NN and NNS, the number of the direct object'),
  'odd_man_out': (2, 'C: a noun or verb replaced; O: original'),
  'coordination_inversion': (2, 'I: two clauses swapped; O: original'),
}
MARKS = {'tr': 'train', 'va': 'validation', 'te': 'test'}
_STEMS = {
  'train': ('train', 'tr'),
  'validation': ('dev', 'validation', 'va'),
  'test': ('test', 'te'),
}
_PART = text_rows.part_pattern('train|validation|dev|test')
_NAME = re.compile(r'[A-Za-z0-9][\w-]*')
_MARK_COLUMNS = 3  # split, class, sentence; perhaps others before the last
_SHOWN_CLASSES = 10
_BOM = '\ufeff'.encode()

FIELDS = {
  'task': fields.Field(
    f'the name of a file or folder, of SentEval one of {", ".join(TASKS)}',
    lambda value: isinstance(value, str) and bool(_NAME.fullmatch(value)),
    fields.REQUIRED,
  ),
  'directory': fields.text(
    'a folder of <task>.txt or <task>/train.tsv, plain or gzip'
  ),
  **text_rows.TEXT_FIELDS,
}


@dataclasses.dataclass(frozen=True)
class _Columns:
  """What the columns of a TSV file mean; see `tsv_files.RowTask`."""

  ids: Mapping[str, int]
  texts: ClassVar[tuple[tuple[str, ...], ...]] = (('sentence',),)
  label: ClassVar[tuple[str, ...]] = ('label',)

  def read_label(self, text: str) -> int:
    """The class; BadRecord if the train split has none of this name."""
    name = text.strip()
    if name not in self.ids:
      message = f'label {name!r:.40} is none of the train split'
      raise BadRecord('illegal_label', '', message)
    return self.ids[name]


class _SentEvalTable:
  """The rows of one split in a file of all splits; a `tsv_files.Table`."""

  is_labelled = True

  def __init__(
    self,
    path: pathlib.Path,
    lines: list[tuple[int, bytes]],
    columns: _Columns,
  ):
    self._path, self._lines, self._columns = path, lines, columns

  def __len__(self) -> int:
    return len(self._lines)

  def example(self, row: int) -> Example:
    """One row; BadRecord if it cannot be used."""
    where = self.where(row)
    try:
      parts = self._lines[row][1].decode('utf-8').split('\t')
    except UnicodeDecodeError as error:
      raise BadRecord('not_utf8', where, str(error)) from error
    if len(parts) < _MARK_COLUMNS:
      message = f'expected {_MARK_COLUMNS} columns or more, got {len(parts)}'
      raise BadRecord('wrong_columns', where, message)
    if parts[0] not in MARKS:
      message = (
        f'expected one of {", ".join(MARKS)} first, got {parts[0]!r:.40}'
      )
      raise BadRecord('unknown_split', where, message)
    check_texts(parts[-1:], where)
    try:
      return Example((parts[-1],), self._columns.read_label(parts[1]))
    except BadRecord as bad:
      raise BadRecord(bad.kind, where, bad.message) from bad

  def where(self, row: int) -> str:
    """File of the row and its line there, from 1."""
    return f'{self._path}, line {self._lines[row][0]}'


def check_split(split: str) -> None:
  """Raises ConfigError unless the split reads like 'train[:95%]'."""
  text_rows.check_parts(split, _PART, 'train, validation, test')


def build(config: Mapping[str, Any], split: str) -> TokenSource:
  """The source of one split; `config` has every field of FIELDS.

  Raises:
    MissingDataError: the files or the tokenizer are not there.
    InvalidDataError: they are not usable, or no row is.
  """
  given = tokenizer.load(config['tokenizer'])
  directory = pathlib.Path(config['directory']).expanduser()
  task = config['task']
  class_names = _class_names(directory, task)
  columns = _Columns({name: label for label, name in enumerate(class_names)})

  @functools.cache
  def table(name: str) -> Table:
    return _open(directory, task, name, columns)

  rows = text_rows.select(
    config,
    split,
    _PART,
    lambda name: table('validation' if name == 'dev' else name),
  )
  return text_rows.token_source(config, split, rows, given, class_names)


def _open(
  directory: pathlib.Path, task: str, split: str, columns: _Columns
) -> Table:
  """The rows of one split."""
  whole = _whole_file(directory, task)
  if whole:
    return _SentEvalTable(whole, _rows_of(whole, split), columns)
  path = _split_file(directory, task, split)
  names, lines = _read_tsv(path)
  return TsvTable(path, names, lines, columns)


def _whole_file(directory: pathlib.Path, task: str) -> pathlib.Path | None:
  """SentEval's file of all splits, if there is one."""
  paths = [directory / f'{task}{suffix}' for suffix in ('.txt', '.txt.gz')]
  return next((path for path in paths if path.is_file()), None)


def _split_file(directory: pathlib.Path, task: str, split: str) -> pathlib.Path:
  names = [stem + suffix for stem in _STEMS[split] for suffix in SUFFIXES]
  for folder in (directory / task, directory):
    for name in names:
      if (folder / name).is_file():
        return folder / name
  raise MissingDataError(
    f'no split {split!r} of {task} in {directory}: expected {task}.txt or '
    f'{task}.txt.gz there, or {", ".join(names)} there or in {task}/; '
    'without a validation split take parts, train[:90%] and train[90%:]'
  )


def _rows_of(path: pathlib.Path, split: str) -> list[tuple[int, bytes]]:
  """The lines of one split; those of none are counted with the training."""
  own = {mark for mark, name in MARKS.items() if name == split}
  others = set(MARKS) - own
  (number, first), *rest = read_lines(path)
  lines = [(number, first.removeprefix(_BOM)), *rest]
  marks = [line.partition(b'\t')[0].decode('latin1') for _, line in lines]
  if split == 'train':
    chosen = [mark not in others for mark in marks]
  else:
    chosen = [mark in own for mark in marks]
  return list(itertools.compress(lines, chosen))


def _read_tsv(path: pathlib.Path) -> tuple[list[str], list[tuple[int, bytes]]]:
  """(names of the columns, rows); InvalidDataError if there are no labels."""
  (_, first), *rest = read_lines(path)
  names = read_columns(path, first)
  if 'label' not in names:
    raise InvalidDataError(
      f'{path}: expected the columns sentence, label, got {", ".join(names)}'
    )
  return names, rest


def _class_names(directory: pathlib.Path, task: str) -> tuple[str, ...]:
  """The sorted labels of the train split.

  Raises:
    InvalidDataError: there are fewer than two, or more than the task has.
  """
  path = _whole_file(directory, task)
  if path:
    lines = [line.split(b'\t') for _, line in _rows_of(path, 'train')]
    # Not of the lines that belong to no split.
    given = [
      parts[1]
      for parts in lines
      if parts[0] == b'tr' and len(parts) >= _MARK_COLUMNS
    ]
  else:
    path = _split_file(directory, task, 'train')
    names, rows = _read_tsv(path)
    lines = [line.split(b'\t') for _, line in rows]
    column = names.index('label')
    given = [parts[column] for parts in lines if len(parts) == len(names)]
  labels = _decoded(given)
  limit, known = TASKS.get(task, (max(len(labels), 2), 'any'))
  if not 2 <= len(labels) <= limit:
    shown = ', '.join(labels[:_SHOWN_CLASSES])
    raise InvalidDataError(
      f'{path}: expected at least 2 and at most {limit} classes of {task} '
      f'({known}), got {len(labels)}: {shown}'
    )
  return tuple(labels)


def _decoded(labels: Iterable[bytes]) -> list[str]:
  """The distinct labels that are text, sorted."""
  found = set()
  for label in set(labels):
    try:
      found.add(label.decode('utf-8').strip())
    except UnicodeDecodeError:
      continue  # counted as a bad row when it is read
  return sorted(found - {''})
