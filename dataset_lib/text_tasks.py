"""Tasks of labelled texts: GLUE (Wang et al., 2019), probing (Conneau, 2018).

Splits are 'train', 'validation' ('dev') and 'test', of MNLI also
'validation_mismatched', and parts and sums of them such as
'train[:95%]+validation'.
"""

import contextlib
import dataclasses
import functools
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
from dataset_lib.source import PART_WORDS, parts, require
from dataset_lib.text_rows import (
  Example,
  LabelledTexts,
  Line,
  Table,
  TextTask,
  decoded,
  read_lines,
  table,
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

_GLUE_SPLIT = '(?:validation|dev|test)(?:_matched|_mismatched)?|train'
# MRPC as Microsoft gives it: train and dev in one file, told apart by a list.
_MSR_TRAIN, _MSR_TEST = 'msr_paraphrase_train.txt', 'msr_paraphrase_test.txt'
_MSR_DEV_IDS, _MSR_IDS = 'dev_ids.tsv', ('#1 ID', '#2 ID')
_UNLABELLED = -1  # label of TFDS's test sets
_MARKS = {'tr': 'train', 'va': 'validation', 'te': 'test'}
_MARK_COLUMNS = 3  # split, class, sentence; perhaps others before the last
_SHOWN_CLASSES = 10


def _file_table(
  name: str, task: TextTask, split: str, folders: Sequence[pathlib.Path]
) -> Table:
  """Returns the rows of a split in a TSV file of one of the folders."""
  short = () if name in GLUE else (split[:2],)
  stems = dict.fromkeys((split.replace('validation', 'dev'), split, *short))
  names = [stem + end for stem in stems for end in ('.tsv', '.tsv.gz')]
  if name == 'mrpc':
    # Microsoft's test file has labels, the official test.tsv has none.
    names = [_MSR_TEST, *names] if split == 'test' else [*names, _MSR_TRAIN]
  files = [folder / file for folder in folders for file in names]
  path = next(filter(pathlib.Path.is_file, files), None)
  if not path:
    names = names if name in GLUE else [f'{name}.txt', *names]
    raise MissingDataError(
      f'no split {split!r} of {name}: expected {", ".join(names)} in '
      f'{" or ".join(map(str, folders))}; without a validation split take '
      'parts, train[:90%] and train[90%:]'
    )
  lines = read_lines(path)
  try:
    columns = decoded(lines[0][1]).split('\t')
  except BadRecord as error:
    raise InvalidDataError(f'{path}: line 1 is not UTF-8: {error}') from error
  if len(columns) == len(task.headless) and not task.columns(columns):
    columns = list(task.headless)
  else:
    lines = lines[1:]
  if path.name == _MSR_TRAIN:
    lines = _msr_rows(path, columns, lines, split)
  texts = [columns.index(column) for column in task.columns(columns)]
  labels = [columns.index(column) for column in task.label if column in columns]
  if not texts or not labels:
    expected = ' or '.join(task.label) if texts else task.expected
    found = f'{path}: expected the columns {expected}, got {", ".join(columns)}'
    if name in GLUE and split.startswith('test') and not labels:
      raise _unlabelled(split, found)
    raise InvalidDataError(found)

  def read(fields: list[str]) -> Example:
    message = f'expected {len(columns)} columns, got {len(fields)}'
    require(len(fields) == len(columns), 'wrong_columns', message)
    return task.example([fields[n] for n in texts], fields[labels[0]])

  return table(path, lines, read)


def _unlabelled(split: str, found: str) -> ConfigError:
  expected = "a split with labels, which GLUE's test sets do not have "
  expected += f'({found}); train and evaluate on train and validation'
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


def _tfds_table(split: str, task: TextTask, builder: Any) -> Table:
  features, name = builder.info.features, builder.info.full_name
  columns = task.columns(features)
  if not columns or 'label' not in features:
    expected = f'the features {task.expected} and label'
    found = ', '.join(features)
    raise InvalidDataError(f'{name}: expected {expected}, got {found}')
  classes = tuple(getattr(features['label'], 'names', None) or ())
  if classes != task.class_names:
    expected = f'the classes {task.class_names}'
    raise InvalidDataError(f'{name}: expected {expected}, got {classes}')
  records = tfds.Examples(builder, split, (*columns, 'label'))

  def example(row: int) -> Example:
    parsed = records[row]
    # All of a split has labels or none of it has.
    if parsed['label'] == _UNLABELLED:
      raise _unlabelled(split, records.where(row))
    texts = [decoded(parsed[column]) for column in columns]
    return task.example(texts, str(parsed['label']))

  return Table(len(records), example, records.where)


@dataclasses.dataclass(kw_only=True, eq=False)
class Glue(LabelledTexts):
  """Rows of a GLUE task.

  Reads official TSV files, others with named columns (both plain or gzip), or
  TFDS's `glue/<task>`.
  """

  split: Annotated[
    str,
    Predicate(functools.partial(parts, names=_GLUE_SPLIT)),
    'train, validation, test, of mnli also validation_matched and '
    f'validation_mismatched, {PART_WORDS}',
  ]
  task: Annotated[
    str, Predicate(GLUE.__contains__), f'one of {", ".join(GLUE)}'
  ]
  directory: Annotated[
    str, "a folder of TSV files or of a folder <task>/ of them, or '' for TFDS"
  ] = ''
  builder: tfds.BuilderName = ''
  data_dir: tfds.DataDir = ''

  def __post_init__(self) -> None:
    self._open(GLUE[self.task], self._table)

  def _table(self, name: str) -> Table:
    name, task = re.sub('^dev', 'validation', name), GLUE[self.task]
    if self.task == 'mnli' and name in ('validation', 'test'):
      name += '_matched'
    elif self.task != 'mnli' and '_' in name:
      expected = f'train, validation or test: {self.task} has no {name}'
      raise ConfigError('split', name, expected)
    if self.directory:
      folder = pathlib.Path(self.directory).expanduser()
      folders = folder, folder / self.task, folder / task.folder
      return _file_table(self.task, task, name, folders)
    builder = tfds.prepared_builder(
      self.builder or f'glue/{self.task}',
      self.data_dir,
      "dataset 'glue' without dataset.directory",
    )
    return _tfds_table(name, task, builder)


def num_texts(dataset: Mapping[str, Any]) -> int | None:
  """Returns the number of texts in a row of a run's data; None if unknown."""
  if dataset.get('name') == 'glue':
    return len(GLUE[dataset['task']].texts[0])
  return 1 if dataset.get('name') == 'probing' else None


@dataclasses.dataclass(kw_only=True, eq=False)
class Probing(LabelledTexts):
  """Rows of a probing task.

  Reads SentEval's files `<task>.txt`, which hold all splits ('tr', 'va' or
  'te', the class, perhaps more columns, the sentence), and TSV files of one
  split with a header (`<task>/train.tsv`, columns 'sentence' and 'label'); both
  plain or gzip. The classes are the sorted labels of the whole train split,
  whatever part of it is read; a row with another label is a bad one.
  """

  split: Annotated[
    str,
    Predicate(functools.partial(parts, names='train|validation|dev|test')),
    f'train, validation, test, {PART_WORDS}',
  ]
  task: Annotated[
    str,
    Predicate(re.compile(r'[A-Za-z0-9][\w-]*').fullmatch),
    f'the name of a file or folder, of SentEval one of {", ".join(PROBING)}',
  ]
  directory: Annotated[
    str, Len(1), 'a folder of <task>.txt or <task>/train.tsv, plain or gzip'
  ]

  def __post_init__(self) -> None:
    task = TextTask('', (_SINGLE,), ('label',), (), labels='text')
    known = self._class_names(self._table('train', task))
    task = dataclasses.replace(task, class_names=known, labels='name')
    self._open(task, functools.partial(self._table, task=task))

  def _table(self, name: str, task: TextTask) -> Table:
    split = 'validation' if name == 'dev' else name
    folder = pathlib.Path(self.directory).expanduser()
    files = [folder / (self.task + end) for end in ('.txt', '.txt.gz')]
    whole = next(filter(pathlib.Path.is_file, files), None)
    if not whole:
      folders = folder / self.task, folder
      return _file_table(self.task, task, split, folders)
    marks = {mark.encode(): name for mark, name in _MARKS.items()}
    # Lines of no split are read, and found bad, as training.
    lines = [
      (number, line)
      for number, line in read_lines(whole)
      if marks.get(line.partition(b'\t')[0], 'train') == split
    ]

    def read(fields: list[str]) -> Example:
      message = f'expected {_MARK_COLUMNS} columns or more, got {len(fields)}'
      require(len(fields) >= _MARK_COLUMNS, 'wrong_columns', message)
      message = f'expected {", ".join(_MARKS)} first, got {fields[0]!r:.40}'
      require(fields[0] in _MARKS, 'unknown_split', message)
      return task.example(fields[-1:], fields[1])

    return table(whole, lines, read)

  def _class_names(self, rows: Table) -> tuple[str, ...]:
    """Returns the sorted labels of the good rows."""
    names = set()
    for row in range(rows.size):
      with contextlib.suppress(BadRecord):
        names.add(str(rows.example(row).label))
    limit, known = PROBING.get(self.task, (max(len(names), 2), 'any'))
    if not 2 <= len(names) <= limit:
      shown = ', '.join(sorted(names)[:_SHOWN_CLASSES])
      raise InvalidDataError(
        f'{self.directory}: expected at least 2 and at most {limit} classes of '
        f'{self.task} ({known}), got {len(names)}: {shown}'
      )
    return tuple(sorted(names))
