"""GLUE: sentences and pairs of sentences with a class or a score.

Reads the official TSV files, TSV files with named columns (plain or gzip), or
what TFDS prepared as `glue/<task>`. Everything is tokenised once, when the
split is opened, and kept as flat arrays of 8 bytes a token. Splits are
'train', 'validation' ('dev'), 'test' where it has labels, of MNLI
'validation_matched' (also 'validation') and 'validation_mismatched', and parts
and sums of them; see `text_rows`.
"""

from collections.abc import Mapping
from typing import Any

from dataset_lib import fields, glue_files, glue_tfds, text_rows, tokenizer
from dataset_lib.errors import ConfigError
from dataset_lib.glue_tasks import TASKS, canonical_split
from dataset_lib.source import TokenSource
from dataset_lib.tfds_source import FIELDS as TFDS_FIELDS
from dataset_lib.tsv_files import Table

_PART = text_rows.part_pattern(
  '(?:validation|dev|test)(?:_matched|_mismatched)?|train'
)

FIELDS = {
  'task': fields.Field(
    f'one of {", ".join(TASKS)}',
    lambda value: isinstance(value, str) and value in TASKS,
    fields.REQUIRED,
  ),
  'directory': fields.text(
    "a folder of TSV files or of a folder <task>/ of them, or '' for TFDS", ''
  ),
  'builder': TFDS_FIELDS['builder'],
  'data_dir': TFDS_FIELDS['data_dir'],
  **text_rows.TEXT_FIELDS,
}


def check_split(split: str) -> None:
  """Raises ConfigError unless the split reads like 'train[:95%]'."""
  text_rows.check_parts(
    split,
    _PART,
    'train, validation, test, of mnli also validation_matched and '
    'validation_mismatched',
  )


def build(config: Mapping[str, Any], split: str) -> TokenSource:
  """The source of one split; `config` has every field of FIELDS.

  Raises:
    ConfigError: the split has no labels, or the task no such split.
    MissingDataError: the files or the tokenizer are not there.
    InvalidDataError: they are not usable, or no row is.
  """
  given = tokenizer.load(config['tokenizer'])
  tables: dict[str, Table] = {}

  def table(name: str) -> Table:
    name = canonical_split(config['task'], name)
    if name not in tables:
      tables[name] = _open(config, name)
    return tables[name]

  rows = text_rows.select(config, split, _PART, table)
  class_names = TASKS[config['task']].class_names
  return text_rows.token_source(config, split, rows, given, class_names)


def _open(config: Mapping[str, Any], name: str) -> Table:
  task, directory = config['task'], config['directory']
  if '_' in name and task != 'mnli':
    expected = f'train, validation or test: {task} has no {name}'
    raise ConfigError('split', name, expected)
  table: Table
  if directory:
    table = glue_files.open_table(directory, task, name)
  else:
    table = glue_tfds.open_table(
      config['builder'], config['data_dir'], task, name
    )
  if len(table) and not table.is_labelled:
    raise ConfigError(
      'split',
      name,
      f"a split with labels, which GLUE's test sets do not have "
      f'({table.where(0)}); train and evaluate on train and validation',
    )
  return table
