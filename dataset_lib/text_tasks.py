"""Tasks of labelled texts: GLUE (Wang et al., 2019), probing (Conneau, 2018).

Splits are 'train', 'validation' ('dev') and 'test', of MNLI also
'validation_mismatched', and parts and sums of them such as
'train[:95%]+validation'.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Len, Predicate

from dataset_lib import tfds
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
)
from dataset_lib.source import PART_WORDS, is_split, require
from dataset_lib.text_rows import (
  SUFFIXES,
  Example,
  LabelledTexts,
  Line,
  Table,
  TextTask,
  file_table,
  first_file,
  read_columns,
  read_lines,
  tsv_table,
)

_SINGLE, _PAIR = ('sentence',), ('sentence1', 'sentence2')
_ENTAILMENT = ('entailment', 'not_entailment')

# Label ids are those of GLUE's own code and of TFDS; names of columns are given
# for each layout in use.
GLUE = {
  'cola': TextTask(
    'CoLA', (_SINGLE,), ('label', 'is_acceptable'),
    ('unacceptable', 'acceptable'), ('source', 'label', 'mark', 'sentence')),
  'sst2': TextTask(
    'SST-2', (_SINGLE,), ('label',), ('negative', 'positive')),
  'mrpc': TextTask(
    'MRPC', (_PAIR, ('#1 String', '#2 String')), ('label', 'Quality'),
    ('not_equivalent', 'equivalent')),
  'qqp': TextTask(
    'QQP', (('question1', 'question2'),), ('is_duplicate', 'label'),
    ('not_duplicate', 'duplicate')),
  'stsb': TextTask('STS-B', (_PAIR,), ('score', 'label'), ()),
  'mnli': TextTask(
    'MNLI', (('premise', 'hypothesis'), _PAIR), ('gold_label', 'label'),
    ('entailment', 'neutral', 'contradiction')),
  'qnli': TextTask(
    'QNLI', (('question', 'sentence'),), ('label',), _ENTAILMENT),
  'rte': TextTask('RTE', (_PAIR,), ('label',), _ENTAILMENT),
  'wnli': TextTask('WNLI', (_PAIR,), ('label',), _ENTAILMENT[::-1]),
}  # fmt: skip
# Rows of one split share a premise, a question or an article, so they are not
# independent: several hypotheses to a premise, a question in several pairs.
REPEATED_TEXTS = ('mnli', 'qqp', 'qnli', 'wnli')
# SentEval's ten tasks: how many classes there are at most, and their names.
PROBING = {
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

# MRPC as Microsoft gives it: train and dev in one file, told apart by a list.
_MSR_TRAIN, _MSR_TEST = 'msr_paraphrase_train.txt', 'msr_paraphrase_test.txt'
_MSR_DEV_IDS, _MSR_IDS = 'dev_ids.tsv', ('#1 ID', '#2 ID')
_UNLABELLED = -1  # label of TFDS's test sets
_MARKS = {'tr': 'train', 'va': 'validation', 'te': 'test'}
_MARK_COLUMNS = 3  # split, class, sentence; perhaps others before the last
_STEMS = {
  'train': ('train', 'tr'),
  'validation': ('dev', 'validation', 'va'),
  'test': ('test', 'te'),
}
_SHOWN_CLASSES = 10


@dataclasses.dataclass(kw_only=True, eq=False)
class Glue(LabelledTexts):
  """Rows of a GLUE task.

  Reads the official TSV files, TSV files with named columns (plain or gzip), or
  TFDS's `glue/<task>`.

  Raises:
    ConfigError: the split has no labels, or the task no such split.
    MissingDataError: the files or the tokenizer are not there.
    InvalidDataError: they are not usable, or no row is.
  """

  split: Annotated[
    str,
    Predicate(
      lambda split: is_split(
        split, '(validation|dev|test)(_matched|_mismatched)?|train'
      )
    ),
    'train, validation, test, of mnli also validation_matched and '
    f'validation_mismatched, {PART_WORDS}',
  ]
  task: Annotated[
    str, Predicate(lambda task: task in GLUE), f'one of {", ".join(GLUE)}'
  ]
  directory: Annotated[
    str, "a folder of TSV files or of a folder <task>/ of them, or '' for TFDS"
  ] = ''
  builder: tfds.BuilderName = ''
  data_dir: tfds.DataDir = ''

  def __post_init__(self) -> None:
    self._open(GLUE[self.task].class_names, self._table)

  def _table(self, name: str) -> Table:
    first, underscore, kind = name.partition('_')
    name = ('validation' if first == 'dev' else first) + underscore + kind
    if self.task == 'mnli' and first != 'train' and not kind:
      name += '_matched'
    if kind and self.task != 'mnli':
      expected = f'train, validation or test: {self.task} has no {name}'
      raise ConfigError('split', name, expected)
    read = self._of_files if self.directory else self._of_tfds
    return read(name, GLUE[self.task])

  def _of_files(self, split: str, task: TextTask) -> Table:
    folder = pathlib.Path(self.directory).expanduser()
    stems = dict.fromkeys((split.replace('validation', 'dev'), split))
    names = [stem + suffix for stem in stems for suffix in SUFFIXES]
    if self.task == 'mrpc':
      # Microsoft's test file has labels, the official test.tsv has none.
      names = [_MSR_TEST, *names] if split == 'test' else [*names, _MSR_TRAIN]
    folders = folder, folder / self.task, folder / task.folder
    path = first_file(folders, names)
    if not path:
      raise MissingDataError(
        f'no split {split!r} of {self.task} in {folder}: expected '
        f'{", ".join(names)} there, in {self.task}/ or in {task.folder}/'
      )
    lines = read_lines(path)
    columns: Sequence[str] = read_columns(path, lines)
    if len(columns) == len(task.headless) and not task.columns(columns):
      columns = task.headless
    else:
      lines = lines[1:]
    if path.name == _MSR_TRAIN:
      lines = _msr_rows(path, columns, lines, split)
    if split.startswith('test') and not {*task.label} & {*columns}:
      wanted = ' or '.join(task.label)
      found = f'{path}: expected a column {wanted}, got {", ".join(columns)}'
      raise _unlabelled(split, found)
    return tsv_table(path, columns, lines, task)

  def _of_tfds(self, split: str, task: TextTask) -> Table:
    builder = tfds.prepared_builder(
      self.builder or f'glue/{self.task}',
      self.data_dir,
      "dataset 'glue' without dataset.directory",
    )
    features, name = builder.info.features, builder.info.full_name
    columns = task.columns(features)
    if not columns or 'label' not in features:
      raise InvalidDataError(
        f'{name}: expected the features {task.expected} and label, got '
        f'{", ".join(features)}'
      )
    classes = tuple(getattr(features['label'], 'names', None) or ())
    if classes != task.class_names:
      raise InvalidDataError(
        f'{name}: expected the classes {task.class_names}, got {classes}'
      )
    records = tfds.Examples(builder, split, (*columns, 'label'))

    def example(row: int) -> Example:
      parsed = records[row]
      # All of a split has labels or none of it has.
      if parsed['label'] == _UNLABELLED:
        raise _unlabelled(split, records.where(row))
      try:
        texts = [parsed[column].decode('utf-8') for column in columns]
      except UnicodeDecodeError as error:
        raise BadRecord('not_utf8', '', str(error)) from error
      return task.example(texts, str(parsed['label']))

    return Table(len(records), example, records.where)


def _unlabelled(split: str, found: str) -> ConfigError:
  expected = (
    f"a split with labels, which GLUE's test sets do not have ({found}); "
    'train and evaluate on train and validation'
  )
  return ConfigError('split', split, expected)


def _msr_rows(
  path: pathlib.Path, columns: Sequence[str], lines: Sequence[Line], split: str
) -> list[Line]:
  """Returns the rows of MRPC's train or dev split of Microsoft's one file."""
  ids_file = path.with_name(_MSR_DEV_IDS)
  if not ids_file.is_file() or not {*_MSR_IDS} <= {*columns}:
    raise MissingDataError(
      f"{path} holds MRPC train and dev together: put GLUE's list of the dev "
      f'pairs beside it as {_MSR_DEV_IDS}'
    )
  dev = {tuple(line.split(b'\t')[:2]) for _, line in read_lines(ids_file)}
  first, second = (columns.index(name) for name in _MSR_IDS)

  def is_dev(line: bytes) -> bool:
    # A row with too few columns is bad; it is counted with the training ones.
    fields = line.split(b'\t') + [b''] * len(columns)
    return (fields[first], fields[second]) in dev

  wants_dev = split == 'validation'
  return [entry for entry in lines if is_dev(entry[1]) == wants_dev]


def num_texts(dataset: Mapping[str, Any]) -> int | None:
  """Returns the number of texts in a row of a run's data; None if unknown.

  Args:
    dataset: the run's configuration of its data.
  """
  if dataset.get('name') == 'probing':
    return 1
  is_glue = dataset.get('name') == 'glue'
  return len(GLUE[dataset['task']].texts[0]) if is_glue else None


@dataclasses.dataclass(kw_only=True, eq=False)
class Probing(LabelledTexts):
  """Rows of a probing task.

  Reads SentEval's files `<task>.txt`, which hold all splits ('tr', 'va' or
  'te', the class, perhaps more columns, the sentence), and TSV files of one
  split with a header (`<task>/train.tsv`, columns 'sentence' and 'label'); both
  plain or gzip. The classes are the sorted labels of the whole train split,
  whatever part of it is read; a row with another label is a bad one.

  Raises:
    MissingDataError: the files or the tokenizer are not there.
    InvalidDataError: they are not usable, or no row is.
  """

  split: Annotated[
    str,
    Predicate(lambda split: is_split(split, 'train|validation|dev|test')),
    f'train, validation, test, {PART_WORDS}',
  ]
  task: Annotated[
    str,
    Predicate(lambda task: bool(re.fullmatch(r'[A-Za-z0-9][\w-]*', task))),
    f'the name of a file or folder, of SentEval one of {", ".join(PROBING)}',
  ]
  directory: Annotated[
    str, Len(1), 'a folder of <task>.txt or <task>/train.tsv, plain or gzip'
  ]

  def __post_init__(self) -> None:
    self._folder = pathlib.Path(self.directory).expanduser()
    # SentEval's file of all splits, if there is one.
    files = [f'{self.task}{suffix}' for suffix in ('.txt', '.txt.gz')]
    self._whole = first_file([self._folder], files)
    task = TextTask('', (_SINGLE,), ('label',), (), ids_are_labels=False)
    names = self._class_names(task)
    self._task = dataclasses.replace(task, class_names=names)
    self._open(names, self._table)

  def _table(self, name: str) -> Table:
    path, columns, lines = self._read('validation' if name == 'dev' else name)
    if columns:
      return tsv_table(path, columns, lines, self._task)
    return file_table(path, lines, self._marked)

  def _marked(self, fields: list[str]) -> Example:
    """Returns an example of a line of SentEval's file."""
    expected = f'expected {_MARK_COLUMNS} columns or more, got {len(fields)}'
    require(len(fields) >= _MARK_COLUMNS, 'wrong_columns', expected)
    expected = f'expected {", ".join(_MARKS)} first, got {fields[0]!r:.40}'
    require(fields[0] in _MARKS, 'unknown_split', expected)
    return self._task.example(fields[-1:], fields[1])

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
    names = [stem + suffix for stem in _STEMS[split] for suffix in SUFFIXES]
    path = first_file((self._folder / self.task, self._folder), names)
    if not path:
      raise MissingDataError(
        f'no split {split!r} of {self.task} in {self._folder}: expected '
        f'{self.task}.txt or {self.task}.txt.gz there, or {", ".join(names)} '
        f'there or in {self.task}/; without a validation split take parts, '
        'train[:90%] and train[90%:]'
      )
    lines = read_lines(path)
    return path, read_columns(path, lines), lines[1:]

  def _class_names(self, task: TextTask) -> tuple[str, ...]:
    """Returns the sorted labels of the train split.

    Raises:
      InvalidDataError: there are fewer than two, or more than the task has;
        or there is no column of them, or of the sentences.
    """
    path, columns, lines = self._read('train')
    rows = [line.split(b'\t') for _, line in lines]
    if columns:
      tsv_table(path, columns, lines, task)
      column = columns.index('label')
      given = {row[column] for row in rows if len(row) == len(columns)}
    else:  # not the lines that belong to no split
      given = {row[1] for row in rows if row[0] == b'tr' and len(row) > 2}
    # A label that is not UTF-8 is counted as a bad row when it is read.
    names = {label.decode('utf-8', errors='replace').strip() for label in given}
    labels = sorted(name for name in names if name and '\ufffd' not in name)
    limit, known = PROBING.get(self.task, (max(len(labels), 2), 'any'))
    if not 2 <= len(labels) <= limit:
      shown = ', '.join(labels[:_SHOWN_CLASSES])
      raise InvalidDataError(
        f'{path}: expected at least 2 and at most {limit} classes of '
        f'{self.task} ({known}), got {len(labels)}: {shown}'
      )
    return tuple(labels)
