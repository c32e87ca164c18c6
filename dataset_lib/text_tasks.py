"""Tasks of labelled texts: GLUE (Wang et al., 2019), probing (Conneau, 2018).

Splits are 'train', 'validation' (or 'dev'), 'test', for MNLI also
'validation_mismatched', 'test_mismatched' and 'ax' (GLUE's diagnostic rows).
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Len, Predicate

from core import errors, files
from core.errors import BadRecord, ConfigError, InvalidDataError
from dataset_lib import tables
from dataset_lib.records import tfds
from dataset_lib.records.sharded import RecordFiles
from dataset_lib.source import PART_WORDS, TextSplit, parts, require
from dataset_lib.tables import Table
from dataset_lib.text_rows import MAX_SCORE, UNLABELLED, LabelledTexts, TextTask

_ENDS = '', '.gz'
_SINGLE, _PAIR = ('sentence',), ('sentence1', 'sentence2')
_ENTAILMENT = ('entailment', 'not_entailment')

# Label ids are the same as in GLUE's own code and in TFDS.
GLUE = {
  'cola': TextTask(
    (_SINGLE,), ('label', 'is_acceptable'), ('unacceptable', 'acceptable'),
    'CoLA', ('source', 'label', 'mark', 'sentence')),
  'sst2': TextTask((_SINGLE,), ('label',), ('negative', 'positive'), 'SST-2'),
  'mrpc': TextTask(
    (_PAIR, ('#1 String', '#2 String')), ('label', 'Quality'),
    ('not_equivalent', 'equivalent'), 'MRPC'),
  'qqp': TextTask(
    (('question1', 'question2'),), ('is_duplicate', 'label'),
    ('not_duplicate', 'duplicate'), 'QQP'),
  'stsb': TextTask(
    (_PAIR,), ('score', 'label'), (), 'STS-B', kind='number',
    limits=(0.0, MAX_SCORE)),
  'mnli': TextTask(
    (('premise', 'hypothesis'), _PAIR), ('gold_label', 'label'),
    ('entailment', 'neutral', 'contradiction'), 'MNLI'),
  'qnli': TextTask(
    (('question', 'sentence'),), ('label',), _ENTAILMENT, 'QNLI'),
  'rte': TextTask((_PAIR,), ('label',), _ENTAILMENT, 'RTE'),
  'wnli': TextTask((_PAIR,), ('label',), _ENTAILMENT[::-1], 'WNLI'),
}  # fmt: skip
# Rows share a premise, a question or an article: they are not independent.
REPEATED_TEXTS = ('mnli', 'qqp', 'qnli', 'wnli')
# SentEval's ten tasks: (maximum number of classes, meaning of the classes).
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
_PROBING = TextTask((_SINGLE,), ('label',), (), by_name=True)

_GLUE_SPLIT = '(?:validation|dev|test)(?:_matched|_mismatched)?|ax|train'
_MARKS = {b'tr': 'train', b'va': 'validation', b'te': 'test'}


def num_texts(dataset: Mapping[str, Any]) -> int | None:
  """Returns the number of texts in a row of a run's data; None if unknown."""
  if dataset.get('name') == 'glue':
    return len(GLUE[dataset['task']].texts[0])
  counts = {'probing': 1, 'texts': 1 + bool(dataset.get('pair'))}
  return counts.get(str(dataset.get('name')))


def find_file(
  task: str, split: str, folders: Sequence[Path], names: Sequence[str]
) -> Path:
  """Returns the first file that is there."""
  paths = [folder / name for name in names for folder in folders]
  path = next(filter(Path.is_file, paths), None)
  if not path:
    raise errors.MissingDataError(
      f'no split {split!r} of {task}: expected {", ".join(names)} in '
      f'{" or ".join(map(str, folders))}; without a validation split take '
      'parts, train[:90%] and train[90%:]'
    )
  files.check_inside(path, os.path.commonpath(folders))
  return path


def _tsv_names(*stems: str) -> list[str]:
  return [f'{stem}.tsv{end}' for stem in dict.fromkeys(stems) for end in _ENDS]


def _tsv_file(path: Path, task: TextTask, split: str) -> Table:
  table = tables.read(path, task.names, task.headless)
  try:
    task.columns(table.columns, str(path))
  except InvalidDataError as error:
    is_test = task.folder and split.startswith(('test', 'ax'))
    if is_test and task.label and not {*table.columns} & {*task.label}:
      raise _unlabelled(split, error) from error
    raise
  return table


def _unlabelled(split: str, found: object) -> ConfigError:
  expected = "a split with labels, which GLUE's test sets do not have "
  expected += f'({found}); train and evaluate on train and validation'
  return ConfigError('split', split, expected)


def _tfds_rows(builder: Any, task: TextTask, split: str) -> RecordFiles:
  features, name = builder.info.features, builder.info.full_name
  texts, (label_column,) = task.columns([*features], name)
  label = features[label_column]
  is_class = type(label).__name__ == 'ClassLabel'
  classes = tuple(label.names or ()) if is_class else ()
  if classes != task.class_names:
    expected = f'the classes {task.class_names}'
    raise InvalidDataError(f'{name}: expected {expected}, got {classes}')
  rows = tfds.examples(builder, split, [*texts, label_column])
  with contextlib.suppress(BadRecord):  # all rows have labels, or none has
    if rows[0][label_column] == UNLABELLED:
      raise _unlabelled(split, rows.where(0))
  return rows


def _sent_eval(line: bytes) -> tuple[str, str]:
  """Returns label and sentence; there may be other columns between them."""
  mark, *fields = tables.decoded(line).split('\t')
  message = f'expected 3 columns or more, got {len(fields) + 1}'
  require(len(fields) >= 2, 'wrong_columns', message)
  message = f'expected tr, va or te first, got {mark!r:.40}'
  require(mark.encode() in _MARKS, 'unknown_split', message)
  return fields[0], fields[-1]


@dataclasses.dataclass(kw_only=True, eq=False)
class Glue(LabelledTexts):
  """Rows of a GLUE task: TSV files, plain or gzip, or TFDS's `glue/<task>`."""

  split: Annotated[
    str,
    Predicate(functools.partial(parts, names=_GLUE_SPLIT)),
    'train, validation, test, of mnli also validation_matched, '
    f'validation_mismatched and ax, {PART_WORDS}',
  ]
  task: Literal[*GLUE]
  directory: Annotated[
    str, "a folder of TSV files or of a folder <task>/ of them, or '' for TFDS"
  ] = ''
  builder: tfds.BuilderName = ''
  data_dir: tfds.DataDir = ''

  @classmethod
  def sketch(cls, config: Any, classes: int, examples: int) -> Any:
    """See `TextRows.sketch`; the task tells the classes."""
    task = GLUE[config['task']]
    info, rows = super().sketch(config, task.num_classes, examples)
    dtype = 'float32' if task.is_regression else 'int32'
    names = task.class_names
    return dataclasses.replace(info, class_names=names, label_dtype=dtype), rows

  def __post_init__(self) -> None:
    self._kind = self._text_task()
    self._open(self._kind, self._rows_of, self.task)

  def _text_task(self) -> TextTask:
    return GLUE[self.task]

  def _rows_of(self, name: str) -> Any:
    split, task = re.sub('^dev', 'validation', name), self._kind
    if self.task == 'mnli' and split in ('validation', 'test'):
      split += '_matched'
    elif self.task != 'mnli' and (split == 'ax' or '_' in split):
      expected = f'train, validation or test: {self.task} has no {split}'
      raise ConfigError('split', split, expected)
    if not self.directory:
      name = self.builder or f'glue/{self.task}'
      user = "dataset 'glue' without dataset.directory"
      builder = tfds.prepared_builder(name, self.data_dir, user)
      return _tfds_rows(builder, task, split)
    stem = 'diagnostic' if split == 'ax' else split.replace('validation', 'dev')
    folder = Path(self.directory).expanduser()
    folders = [folder, folder / self.task, folder / task.folder]
    folders += [folder / stem] * (split == 'ax')
    path = find_file(self.task, split, folders, _tsv_names(stem, split))
    return _tsv_file(path, task, split)


@dataclasses.dataclass(kw_only=True, eq=False)
class GlueTexts(Glue):
  """All rows of TSV files in their order, without labels, which are -1."""

  def _text_task(self) -> TextTask:
    if not self.directory:
      expected = "a folder of GLUE's files: TFDS changes the order of the rows"
      raise ConfigError('dataset.directory', '', expected)
    return dataclasses.replace(GLUE[self.task], label=())


@dataclasses.dataclass(kw_only=True, eq=False)
class Probing(LabelledTexts):
  """Rows of a probing task.

  Reads SentEval's `<task>.txt`, which have all splits, and TSV files of a split
  with 'sentence' and 'label'. The classes are the labels of the train split.
  """

  split: TextSplit
  task: Annotated[
    str,
    Predicate(re.compile(r'[A-Za-z0-9][\w-]*').fullmatch),
    f'the name of a file or folder, of SentEval one of {", ".join(PROBING)}',
  ]
  directory: Annotated[
    str, Len(1), 'a folder of <task>.txt or <task>/train.tsv, plain or gzip'
  ]

  def __post_init__(self) -> None:
    most, meaning = PROBING.get(self.task, (0, 'any'))
    names = self._class_names(
      self._rows_of('train'), _PROBING.classes_of, most,
      f'classes of {self.task} ({meaning})',
    )  # fmt: skip
    task = dataclasses.replace(_PROBING, class_names=names)
    self._open(task, self._rows_of, self.task)

  def _rows_of(self, name: str) -> Any:
    split = 'validation' if name == 'dev' else name
    all_splits = [f'{self.task}.txt{end}' for end in _ENDS]
    stems = split.replace('validation', 'dev'), split, split[:2]
    folder = Path(self.directory).expanduser()
    folders, names = (folder / self.task, folder), _tsv_names(*stems)
    path = find_file(self.task, split, folders, [*all_splits, *names])
    if path.name not in all_splits:
      return _tsv_file(path, _PROBING, split)
    rows: list[Any] = []
    numbers = []
    for number, line in tables.read_lines(path):
      # Lines with an unknown split mark go to train, which counts them as bad.
      if _MARKS.get(line.partition(b'\t')[0], 'train') == split:
        numbers.append(number)
        try:
          rows.append(_sent_eval(line))
        except BadRecord as bad:
          rows.append(bad)
    columns = 'label', 'sentence'
    return Table(path, columns, columns, rows, numbers)
