"""GLUE: sentences and pairs of sentences with a class or a score.

Reads the official TSV files, TSV files with named columns (plain or gzip), or
what TFDS prepared as `glue/<task>`. Everything is tokenised once, when the
split is opened, and kept as flat arrays of 8 bytes a token. Splits are
'train', 'validation' ('dev'), 'test' where it has labels, of MNLI
'validation_matched' (also 'validation') and 'validation_mismatched', parts of
them like 'train[:95%]' and 'train[:2000]', and sums of parts with '+'. Parts
are slices of one fixed permutation of a split, the same for every run: files
have an order (CoLA's is by source), so that their ends are no samples.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataset_lib import fields, glue_files, glue_tfds, source, tokenizer
from dataset_lib.errors import BadRecord, ConfigError, InvalidDataError
from dataset_lib.glue_files import Example, Table
from dataset_lib.glue_tasks import TASKS, canonical_split
from dataset_lib.order import record_rng
from dataset_lib.source import DatasetInfo, Encoded, TokenSource
from dataset_lib.tfds_source import FIELDS as TFDS_FIELDS

DEFAULT_BUCKETS = (32, 64, 128)
MAX_LENGTH = 65536
_SUBSET_SEED = 0
_NAMES = '(?:validation|dev|test)(?:_matched|_mismatched)?|train'
_PART = re.compile(rf'({_NAMES})(?:\[(-?\d+%?)?:(-?\d+%?)?\])?')


def _accepts_buckets(value: Any) -> bool:
  return (
    isinstance(value, (tuple, list))
    and all(type(size) is int for size in value)
    and list(value) == sorted({*value})
    and all(tokenizer.MIN_LENGTH <= size <= MAX_LENGTH for size in value)
    and len(value) < 256
  )


# Shared with other sources of text: what a batch of rows looks like.
LENGTH_FIELDS = {
  'max_length': fields.integer(tokenizer.MIN_LENGTH, MAX_LENGTH, default=128),
  'length_buckets': fields.Field(
    f'a tuple of ascending lengths in [{tokenizer.MIN_LENGTH}, {MAX_LENGTH}]; '
    'max_length is always the last one',
    _accepts_buckets,
    DEFAULT_BUCKETS,
  ),
}

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
  'tokenizer': fields.text(
    'a directory with tokenizer.json or vocab.txt, or such a file'
  ),
  **LENGTH_FIELDS,
  # Of splits that begin with 'train'; 0 takes all. The same rows whatever
  # the run's seed: the first of one fixed permutation, so that a larger
  # subset contains a smaller one.
  'max_examples': fields.integer(0, source.MAX_EXAMPLES, default=0),
  'max_bad_share': fields.real(0.0, 0.5, default=source.DEFAULT_BAD_SHARE),
}


def check_split(split: str) -> None:
  """Raises ConfigError unless the split reads like 'train[:95%]'."""
  parts = [_PART.fullmatch(part) for part in split.split('+')]
  bounds = [bound for part in parts if part for bound in part.groups()[1:]]
  shares = [int(bound[:-1]) for bound in bounds if (bound or '').endswith('%')]
  if not all(parts) or any(abs(share) > 100 for share in shares):
    raise ConfigError(
      'split',
      split,
      'train, validation, test, of mnli also validation_matched and '
      'validation_mismatched, or a part like train[:95%] or train[:2000]',
    )


def build(config: Mapping[str, Any], split: str) -> TokenSource:
  """The source of one split; `config` has every field of FIELDS.

  Raises:
    ConfigError: the split has no labels, or the task no such split.
    MissingDataError: the files or the tokenizer are not there.
    InvalidDataError: they are not usable, or no row is.
  """
  given = tokenizer.load(config['tokenizer'])
  rows = _rows(config, split)
  good, examples, bad_rows = _examples(rows)
  encoded = _encode(given, examples, config['max_length'])
  outside = rows_outside(encoded, given.vocab_size)
  for row in outside:
    table, number = rows[good[row]]
    message = f'a token id not in [0, {given.vocab_size - 1}]'
    bad = BadRecord('token_out_of_range', table.where(number), message)
    bad_rows.append((good[row], bad))
  kept = np.setdiff1d(np.arange(len(good)), outside)
  if not len(kept):
    raise InvalidDataError(
      f'split {split!r} of {config["task"]}: none of its {len(rows)} rows can '
      f'be used; the first: {bad_rows[0][1]}'
    )
  places = np.array(good)[kept]

  def where(index: int) -> str:
    table, number = rows[places[index]]
    return table.where(number)

  return TokenSource(
    _info(config, len(kept), given.vocab_size),
    encoded.take(kept) if len(outside) else encoded,
    np.array([example.label for example in examples])[kept],
    given.pad_id,
    where,
    bad_rows,
  )


def _info(
  config: Mapping[str, Any], num_examples: int, vocab_size: int
) -> DatasetInfo:
  task, max_length = TASKS[config['task']], config['max_length']
  return DatasetInfo(
    input_key='tokens',
    input_shape=(max_length,),
    input_dtype='int32',
    num_classes=task.num_classes,
    class_names=task.class_names,
    num_examples=num_examples,
    vocab_size=vocab_size,
    label_dtype='float32' if task.is_regression else 'int32',
    length_buckets=source.length_buckets(config['length_buckets'], max_length),
  )


def _rows(config: Mapping[str, Any], split: str) -> list[tuple[Table, int]]:
  """The rows that a split names: its parts, then at most `max_examples`."""
  rows: list[tuple[Table, int]] = []
  tables: dict[str, Table] = {}
  for part in split.split('+'):
    match = _PART.fullmatch(part)
    assert match  # check_split has seen it
    name = canonical_split(config['task'], match[1])
    if name not in tables:
      tables[name] = _open(config, name)
    table = tables[name]
    start = _bound(match[2], len(table), 0)
    stop = _bound(match[3], len(table), len(table))
    chosen = record_rng(_SUBSET_SEED).permutation(len(table))[start:stop]
    rows += [(table, row) for row in np.sort(chosen).tolist()]
  limit = config['max_examples']
  if limit and split.startswith('train') and limit < len(rows):
    chosen = record_rng(_SUBSET_SEED).permutation(len(rows))[:limit]
    rows = [rows[row] for row in np.sort(chosen)]
  if not rows:
    raise InvalidDataError(f'split {split!r} of {config["task"]} is empty')
  return rows


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


def _bound(text: str | None, size: int, default: int) -> int:
  """A bound of a part in rows; percentages round to the nearest, as in TFDS."""
  if text is None:
    return default
  if text.endswith('%'):
    bound = round(int(text[:-1]) * size / 100)
  else:
    bound = int(text)
  return min(max(bound + size if bound < 0 else bound, 0), size)


def _examples(
  rows: Sequence[tuple[Table, int]],
) -> tuple[list[int], list[Example], list[tuple[int, BadRecord]]]:
  """(numbers of the good rows, their examples, the bad rows)."""
  good, examples, bad_rows = [], [], []
  for number, (table, row) in enumerate(rows):
    try:
      examples.append(table.example(row))
      good.append(number)
    except BadRecord as bad:
      bad_rows.append((number, bad))
  return good, examples, bad_rows


def _encode(
  given: tokenizer.Tokenizer, examples: Sequence[Example], max_length: int
) -> Encoded:
  texts = [example.texts[0] for example in examples]
  pairs = None
  if examples and len(examples[0].texts) == 2:
    pairs = [example.texts[1] for example in examples]
  return given.encode(texts, pairs, max_length)


def rows_outside(encoded: Encoded, vocab_size: int) -> np.ndarray:
  """Rows with a token id that no embedding has, ascending."""
  wrong = (encoded.tokens < 0) | (encoded.tokens >= vocab_size)
  places = np.flatnonzero(wrong)
  return np.unique(np.searchsorted(encoded.offsets, places, 'right') - 1)
