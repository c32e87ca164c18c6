"""Probing tasks: classes of sentences (Conneau et al., 2018).

Reads SentEval's files `<task>.txt`, which hold all splits ('tr', 'va' or 'te',
the class, perhaps more columns, the sentence), and TSV files of one split with
a header (`<task>/train.tsv`, columns 'sentence' and 'label'); both plain or
gzip. Splits are 'train', 'validation' ('dev') and 'test', and parts and sums of
them; see `text_rows`.
"""

import dataclasses
import pathlib
import re
from typing import Annotated

from annotated_types import Len, Predicate

from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib.text_files import (
  SUFFIXES,
  Example,
  Line,
  Table,
  TextTask,
  file_table,
  first_file,
  labelled,
  read_columns,
  read_lines,
  tsv_table,
)
from dataset_lib.text_rows import PART_WORDS, LabelledTexts, is_split

# SentEval's ten tasks: how many classes there are at most, and their names.
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
_MARKS = {'tr': 'train', 'va': 'validation', 'te': 'test'}
_MARK_COLUMNS = 3  # split, class, sentence; perhaps others before the last
_STEMS = {
  'train': ('train', 'tr'),
  'validation': ('dev', 'validation', 'va'),
  'test': ('test', 'te'),
}
_SHOWN_CLASSES = 10
_SPLITS = 'train|validation|dev|test'


@dataclasses.dataclass(kw_only=True, eq=False)
class Probing(LabelledTexts):
  """Rows of a probing task.

  The classes are the sorted labels of the whole train split, whatever part of
  it is read; a row with another label is a bad one.

  Raises:
    MissingDataError: the files or the tokenizer are not there.
    InvalidDataError: they are not usable, or no row is.
  """

  split: Annotated[
    str,
    Predicate(lambda split: is_split(split, _SPLITS)),
    f'train, validation, test, {PART_WORDS}',
  ]
  task: Annotated[
    str,
    Predicate(lambda task: bool(re.fullmatch(r'[A-Za-z0-9][\w-]*', task))),
    f'the name of a file or folder, of SentEval one of {", ".join(TASKS)}',
  ]
  directory: Annotated[
    str, Len(1), 'a folder of <task>.txt or <task>/train.tsv, plain or gzip'
  ]

  def __post_init__(self) -> None:
    self._folder = pathlib.Path(self.directory).expanduser()
    # SentEval's file of all splits, if there is one.
    files = [f'{self.task}{suffix}' for suffix in ('.txt', '.txt.gz')]
    self._whole = first_file([self._folder], files)
    texts, label = (('sentence',),), ('label',)
    names = self._class_names()
    self._task = TextTask('', texts, label, names, ids_are_labels=False)
    self._open(names, self._table)

  def _table(self, name: str) -> Table:
    path, columns, lines = self._read('validation' if name == 'dev' else name)
    if path != self._whole:
      return tsv_table(path, columns, lines, self._task)
    return file_table(path, lines, self._marked)

  def _marked(self, fields: list[str]) -> Example:
    """Returns an example of a line of SentEval's file."""
    if len(fields) < _MARK_COLUMNS:
      message = f'expected {_MARK_COLUMNS} columns or more, got {len(fields)}'
      raise BadRecord('wrong_columns', '', message)
    if fields[0] not in _MARKS:
      expected = f'expected one of {", ".join(_MARKS)} first'
      raise BadRecord('unknown_split', '', f'{expected}, got {fields[0]!r:.40}')
    return labelled(fields[-1:], self._task.read_label, fields[1])

  def _read(self, split: str) -> tuple[pathlib.Path, list[str], list[Line]]:
    """Returns path, columns and lines of a split.

    SentEval's file has no names of columns; its lines of no split are read as
    training.
    """
    if self._whole:
      marks = {mark.encode(): name for mark, name in _MARKS.items()}
      lines = [
        (number, line)
        for number, line in read_lines(self._whole)
        if marks.get(line.partition(b'\t')[0], 'train') == split
      ]
      return self._whole, [], lines
    stems = _STEMS[split]
    names = [stem + suffix for stem in stems for suffix in SUFFIXES]
    path = first_file((self._folder / self.task, self._folder), names)
    if not path:
      raise MissingDataError(
        f'no split {split!r} of {self.task} in {self._folder}: expected '
        f'{self.task}.txt or {self.task}.txt.gz there, or {", ".join(names)} '
        f'there or in {self.task}/; without a validation split take parts, '
        'train[:90%] and train[90%:]'
      )
    (_, first), *lines = read_lines(path)
    columns = read_columns(path, first)
    if 'label' not in columns:
      raise InvalidDataError(
        f'{path}: expected the columns sentence, label, got '
        f'{", ".join(columns)}'
      )
    return path, columns, lines

  def _class_names(self) -> tuple[str, ...]:
    """Returns the sorted labels of the train split.

    Raises:
      InvalidDataError: there are fewer than two, or more than the task has.
    """
    path, columns, lines = self._read('train')
    rows = [line.split(b'\t') for _, line in lines]
    if path == self._whole:  # not the lines that belong to no split
      given = {row[1] for row in rows if row[0] == b'tr' and len(row) > 2}
    else:
      column = columns.index('label')
      given = {row[column] for row in rows if len(row) == len(columns)}
    # A label that is not UTF-8 is counted as a bad row when it is read.
    names = {label.decode('utf-8', errors='replace').strip() for label in given}
    labels = sorted(name for name in names if name and '\ufffd' not in name)
    limit, known = TASKS.get(self.task, (max(len(labels), 2), 'any'))
    if not 2 <= len(labels) <= limit:
      shown = ', '.join(labels[:_SHOWN_CLASSES])
      raise InvalidDataError(
        f'{path}: expected at least 2 and at most {limit} classes of '
        f'{self.task} ({known}), got {len(labels)}: {shown}'
      )
    return tuple(labels)
