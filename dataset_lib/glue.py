"""GLUE: sentences and pairs of sentences with a class or a score.

Wang et al., "GLUE", ICLR 2019. Reads the official TSV files, TSV files with
named columns (plain or gzip), or TFDS's `glue/<task>`. Splits are 'train',
'validation' ('dev'), 'test' where it has labels, of MNLI 'validation_matched'
(also 'validation') and 'validation_mismatched', and parts and sums of them; see
`text_rows`.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Predicate

from dataset_lib import tfds
from dataset_lib.errors import (
  BadRecord,
  ConfigError,
  InvalidDataError,
  MissingDataError,
)
from dataset_lib.text_files import (
  SUFFIXES,
  Example,
  Line,
  Table,
  TextTask,
  first_file,
  labelled,
  read_columns,
  read_lines,
  tsv_table,
)
from dataset_lib.text_rows import PART_WORDS, LabelledTexts, is_split

_SINGLE, _PAIR = ('sentence',), ('sentence1', 'sentence2')
_ENTAILMENT = ('entailment', 'not_entailment')

# Label ids are those of GLUE's own code and of TFDS; names of columns are given
# for each layout in use.
TASKS = {
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

# MRPC as Microsoft gives it: train and dev in one file, told apart by a list.
_MSR_TRAIN, _MSR_TEST = 'msr_paraphrase_train.txt', 'msr_paraphrase_test.txt'
_MSR_DEV_IDS, _MSR_IDS = 'dev_ids.tsv', ('#1 ID', '#2 ID')
_UNLABELLED = -1  # label of TFDS's test sets

_GLUE_SPLITS = '(validation|dev|test)(_matched|_mismatched)?|train'


@dataclasses.dataclass(kw_only=True, eq=False)
class Glue(LabelledTexts):
  """Rows of a GLUE task.

  Raises:
    ConfigError: the split has no labels, or the task no such split.
    MissingDataError: the files or the tokenizer are not there.
    InvalidDataError: they are not usable, or no row is.
  """

  split: Annotated[
    str,
    Predicate(lambda split: is_split(split, _GLUE_SPLITS)),
    'train, validation, test, of mnli also validation_matched and '
    f'validation_mismatched, {PART_WORDS}',
  ]
  task: Annotated[
    str, Predicate(lambda task: task in TASKS), f'one of {", ".join(TASKS)}'
  ]
  directory: Annotated[
    str, "a folder of TSV files or of a folder <task>/ of them, or '' for TFDS"
  ] = ''
  builder: tfds.BuilderName = ''
  data_dir: tfds.DataDir = ''

  def __post_init__(self) -> None:
    self._open(TASKS[self.task].class_names, self._table)

  def _table(self, name: str) -> Table:
    name = canonical_split(self.task, name)
    if '_' in name and self.task != 'mnli':
      expected = f'train, validation or test: {self.task} has no {name}'
      raise ConfigError('split', name, expected)
    return self._of_files(name) if self.directory else self._of_tfds(name)

  def _of_files(self, split: str) -> Table:
    task = TASKS[self.task]
    folder = pathlib.Path(self.directory).expanduser()
    stem = split.replace('validation', 'dev')
    names = [stem + suffix for suffix in SUFFIXES]
    names += [split + suffix for suffix in SUFFIXES if stem != split]
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
    columns: Sequence[str] = read_columns(path, lines[0][1])
    if task.headless and not task.columns(columns):
      if len(columns) != len(task.headless):
        raise InvalidDataError(
          f'{path}: expected a header, or the {len(task.headless)} columns '
          f'{", ".join(task.headless)}, got {", ".join(columns)}'
        )
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

  def _of_tfds(self, split: str) -> Table:
    task = TASKS[self.task]
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
      try:
        texts = [parsed[column].decode('utf-8') for column in columns]
      except UnicodeDecodeError as error:
        raise BadRecord('not_utf8', '', str(error)) from error
      return labelled(texts, task.read_label, str(parsed['label']))

    # All of a split has labels or none of it has; bad records do not say.
    for row in range(len(records)):
      try:
        label = float(records[row]['label'])
      except BadRecord:
        continue
      if label == _UNLABELLED:
        raise _unlabelled(split, records.where(row))
      break
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


def canonical_split(task: str, name: str) -> str:
  """Returns TFDS's name of a split: 'validation' of 'dev', of MNLI matched."""
  first, underscore, kind = name.partition('_')
  first = 'validation' if first == 'dev' else first
  if task == 'mnli' and first != 'train' and not kind:
    return f'{first}_matched'
  return first + underscore + kind


def num_texts(dataset: Mapping[str, Any]) -> int | None:
  """Returns the number of texts in a row of a run's data; None if unknown.

  Args:
    dataset: the run's configuration of its data.
  """
  if dataset.get('name') == 'probing':
    return 1
  if dataset.get('name') != 'glue':
    return None
  return len(TASKS[dataset['task']].texts[0])
