"""Labelled texts as rows of token ids, and parts of splits.

A split is a sum with '+' of parts like 'train[:95%]' and 'train[:2000]'. Parts
are slices of one fixed permutation of a split, the same for every run: files
are ordered (CoLA's by source), so that their ends are no samples.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from annotated_types import Interval, Len, Predicate

from dataset_lib import source, tokenizer
from dataset_lib.errors import BadRecord, InvalidDataError
from dataset_lib.order import record_rng
from dataset_lib.source import DatasetInfo, TokenSource
from dataset_lib.text_files import Example, Table

DEFAULT_BUCKETS = (32, 64, 128)
MIN_LENGTH, MAX_LENGTH = tokenizer.MIN_LENGTH, 65536
_SUBSET_SEED = 0
_PART = re.compile(r'(\w+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?')


def _are_buckets(sizes: Sequence[int]) -> bool:
  legal = all(MIN_LENGTH <= size <= MAX_LENGTH for size in sizes)
  return legal and list(sizes) == sorted({*sizes}) and len(sizes) < 256


MaxLength = Annotated[int, Interval(ge=MIN_LENGTH, le=MAX_LENGTH)]
Buckets = Annotated[
  tuple[int, ...],
  Predicate(_are_buckets),
  f'a tuple of ascending lengths in [{MIN_LENGTH}, {MAX_LENGTH}]; max_length '
  'is always the last one',
]


def parts(split: str) -> list[tuple[str, str | None, str | None]]:
  """Returns (name, first bound, second bound) of each part of a split.

  Raises:
    ValueError: it does not read like 'train[:95%]'.
  """
  matches = [_PART.fullmatch(part) for part in split.split('+')]
  found = [(match[1], match[2], match[3]) for match in matches if match]
  bounds = [bound for part in found for bound in part[1:] if bound]
  shares = [int(bound[:-1]) for bound in bounds if bound.endswith('%')]
  if len(found) < len(matches) or any(abs(share) > 100 for share in shares):
    raise ValueError(split)
  return found


def is_split(split: str, names: str) -> bool:
  """Returns whether a split is a sum of parts of splits.

  Args:
    split: like 'train[:95%]+validation'.
    names: regular expression of the legal names.
  """
  try:
    return all(re.fullmatch(names, part[0]) for part in parts(split))
  except ValueError:
    return False


PART_WORDS = 'or a part like train[:95%] or train[:2000]'


@dataclasses.dataclass(kw_only=True, eq=False)
class LabelledTexts(TokenSource):
  """Fields and reading of every source of labelled texts.

  All rows are tokenised when the split is opened. `max_examples` limits splits
  that begin with 'train', 0 takes all: the first rows of one fixed permutation,
  whatever the run's seed, so that a larger subset contains a smaller one.
  """

  split: str
  task: str
  directory: str
  tokenizer: Annotated[
    str,
    Len(1),
    'a directory with tokenizer.json or vocab.txt, or such a file',
  ]
  max_length: MaxLength = 128
  length_buckets: Buckets = DEFAULT_BUCKETS
  max_examples: Annotated[int, Interval(ge=0, le=source.MAX_EXAMPLES)] = 0
  max_bad_share: source.BadShare = source.DEFAULT_BAD_SHARE

  def _open(
    self, class_names: tuple[str, ...], open_table: Callable[[str], Table]
  ) -> None:
    """Reads and tokenises the rows of the split.

    Args:
      class_names: a name for each label; () for a regression.
      open_table: opens a split by its name.

    Raises:
      InvalidDataError: no row can be used.
    """
    given = tokenizer.load(self.tokenizer)
    rows = self._rows(open_table)
    good, examples, bad_rows = _examples(rows)
    if not good:
      raise InvalidDataError(
        f'split {self.split!r} of {self.task}: none of its {len(rows)} rows '
        f'can be used; the first: {bad_rows[0][1]}'
      )
    texts = list(zip(*(example.texts for example in examples), strict=True))
    encoded = given.encode(
      texts[0], texts[1] if len(texts) == 2 else None, self.max_length
    )
    buckets = source.length_buckets(self.length_buckets, self.max_length)
    info = DatasetInfo(
      input_key='tokens',
      input_shape=(self.max_length,),
      input_dtype='int32',
      num_classes=max(len(class_names), 1),
      class_names=class_names,
      num_examples=len(good),
      vocab_size=given.vocab_size,
      label_dtype='int32' if class_names else 'float32',
      length_buckets=buckets,
    )
    super().__init__(
      info,
      encoded,
      np.array([example.label for example in examples]),
      given.pad_id,
      lambda index: _where(rows[good[index]]),
      bad_rows,
    )

  def _rows(self, open_table: Callable[[str], Table]) -> list['_Row']:
    """Returns the rows of the split's parts, at most `max_examples`."""
    rows: list[_Row] = []
    open_table = functools.cache(open_table)
    for name, first, last in parts(self.split):
      table = open_table(name)
      start = _bound(first, table.size, 0)
      stop = _bound(last, table.size, table.size)
      chosen = record_rng(_SUBSET_SEED).permutation(table.size)[start:stop]
      rows += [(table, row) for row in np.sort(chosen).tolist()]
    limit = self.max_examples
    if limit and self.split.startswith('train') and limit < len(rows):
      chosen = record_rng(_SUBSET_SEED).permutation(len(rows))[:limit]
      rows = [rows[row] for row in np.sort(chosen)]
    if not rows:
      raise InvalidDataError(f'split {self.split!r} of {self.task} is empty')
    return rows


_Row = tuple[Table, int]


def _where(row: _Row) -> str:
  table, number = row
  return table.where(number)


def _bound(text: str | None, size: int, default: int) -> int:
  """Returns a bound in rows; percentages round to the nearest, as in TFDS."""
  if text is None:
    return default
  if text.endswith('%'):
    bound = round(int(text[:-1]) * size / 100)
  else:
    bound = int(text)
  return min(max(bound + size if bound < 0 else bound, 0), size)


def _examples(
  rows: Sequence[_Row],
) -> tuple[list[int], list[Example], list[tuple[int, BadRecord]]]:
  """Returns numbers of the good rows, their examples, and the bad rows."""
  good, examples, bad_rows = [], [], []
  for number, (table, row) in enumerate(rows):
    try:
      examples.append(table.example(row))
      good.append(number)
    except BadRecord as bad:
      placed = BadRecord(bad.kind, bad.where or table.where(row), bad.message)
      bad_rows.append((number, placed))
  return good, examples, bad_rows
