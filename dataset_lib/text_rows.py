"""Rows of labelled texts: parts of splits, then token ids.

Shared by the sources of texts. A split is a sum with '+' of parts like
'train[:95%]' and 'train[:2000]'. Parts are slices of one fixed permutation of a
split, the same for every run: files have an order (CoLA's is by source), so
that their ends are no samples.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dataset_lib import fields, source, tokenizer
from dataset_lib.errors import BadRecord, ConfigError, InvalidDataError
from dataset_lib.order import record_rng
from dataset_lib.source import DatasetInfo, Encoded, TokenSource
from dataset_lib.tsv_files import Example, Table

DEFAULT_BUCKETS = (32, 64, 128)
MAX_LENGTH = 65536
_SUBSET_SEED = 0

Rows = list[tuple[Table, int]]


def _accepts_buckets(value: Any) -> bool:
  return (
    isinstance(value, (tuple, list))
    and all(type(size) is int for size in value)
    and list(value) == sorted({*value})
    and all(tokenizer.MIN_LENGTH <= size <= MAX_LENGTH for size in value)
    and len(value) < 256
  )


# What a batch of rows looks like.
LENGTH_FIELDS = {
  'max_length': fields.integer(tokenizer.MIN_LENGTH, MAX_LENGTH, default=128),
  'length_buckets': fields.Field(
    f'a tuple of ascending lengths in [{tokenizer.MIN_LENGTH}, {MAX_LENGTH}]; '
    'max_length is always the last one',
    _accepts_buckets,
    DEFAULT_BUCKETS,
  ),
}
# What every source of rows of texts has.
TEXT_FIELDS = {
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


def part_pattern(names: str) -> re.Pattern[str]:
  """Matches 'train', 'train[:95%]': a name and perhaps two bounds.

  Args:
    names: regular expression of the legal names.
  """
  return re.compile(rf'({names})(?:\[(-?\d+%?)?:(-?\d+%?)?\])?')


def check_parts(split: str, pattern: re.Pattern[str], names: str) -> None:
  """Raises ConfigError unless the split reads like 'train[:95%]'.

  Args:
    split: a sum of parts.
    pattern: of a part, see `part_pattern`.
    names: the legal names in words.
  """
  parts = [pattern.fullmatch(part) for part in split.split('+')]
  bounds = [bound for part in parts if part for bound in part.groups()[1:]]
  shares = [int(bound[:-1]) for bound in bounds if (bound or '').endswith('%')]
  if not all(parts) or any(abs(share) > 100 for share in shares):
    expected = f'{names}, or a part like train[:95%] or train[:2000]'
    raise ConfigError('split', split, expected)


def select(
  config: Mapping[str, Any],
  split: str,
  pattern: re.Pattern[str],
  open_table: Callable[[str], Table],
) -> Rows:
  """The rows that a split names: its parts, then at most `max_examples`.

  Args:
    config: with `TEXT_FIELDS` and 'task'.
    split: a sum of parts that `check_parts` accepts.
    pattern: of a part.
    open_table: gives the rows of a name; the same ones for every part of it.

  Raises:
    InvalidDataError: there are none.
  """
  rows: Rows = []
  for part in split.split('+'):
    match = pattern.fullmatch(part)
    assert match  # check_parts has seen it
    table = open_table(match[1])
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


def _bound(text: str | None, size: int, default: int) -> int:
  """A bound of a part in rows; percentages round to the nearest, as in TFDS."""
  if text is None:
    return default
  if text.endswith('%'):
    bound = round(int(text[:-1]) * size / 100)
  else:
    bound = int(text)
  return min(max(bound + size if bound < 0 else bound, 0), size)


def token_source(
  config: Mapping[str, Any],
  split: str,
  rows: Rows,
  given: tokenizer.Tokenizer,
  class_names: tuple[str, ...],
) -> TokenSource:
  """The source of some rows, all of which are tokenised here and now.

  Args:
    config: with `TEXT_FIELDS` and 'task'.
    split: what the rows are called in messages.
    rows: of `select`.
    given: the tokenizer.
    class_names: a name for each label; () for a regression.

  Raises:
    InvalidDataError: no row can be used.
  """
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
    _info(config, len(kept), given.vocab_size, class_names),
    encoded.take(kept) if len(outside) else encoded,
    np.array([example.label for example in examples])[kept],
    given.pad_id,
    where,
    bad_rows,
  )


def _info(
  config: Mapping[str, Any],
  num_examples: int,
  vocab_size: int,
  class_names: tuple[str, ...],
) -> DatasetInfo:
  max_length = config['max_length']
  return DatasetInfo(
    input_key='tokens',
    input_shape=(max_length,),
    input_dtype='int32',
    num_classes=max(len(class_names), 1),
    class_names=class_names,
    num_examples=num_examples,
    vocab_size=vocab_size,
    label_dtype='int32' if class_names else 'float32',
    length_buckets=source.length_buckets(config['length_buckets'], max_length),
  )


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
