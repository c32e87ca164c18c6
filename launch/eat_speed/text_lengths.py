"""Lengths of texts, for timing length buckets."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats

from dataset_lib import text_files, tokenizer
from dataset_lib.errors import InvalidDataError, MissingDataError

# Tokens of the synthetic sentences: about those of SST-2's dev set.
MEDIAN_LENGTH, LENGTH_SPREAD = 24, 0.5


def synthetic(count: int, longest: int) -> tuple[int, ...]:
  """Tokens of made-up sentences: evenly spaced quantiles of a log-normal.

  Args:
    count: sentences.
    longest: in tokens; longer ones are cut.
  """
  places = (np.arange(count) + 0.5) / count
  law = scipy.stats.lognorm(LENGTH_SPREAD, scale=MEDIAN_LENGTH)
  lengths = np.clip(np.rint(law.ppf(places)), 3, longest).astype(int)
  return _shuffled(lengths)


def of_file(
  path: str,
  columns: Sequence[str],
  vocabulary: str,
  count: int,
  longest: int,
) -> tuple[int, ...]:
  """Tokens of the texts of a TSV file, evenly spaced over the file.

  Args:
    path: with a header; plain or gzip, no quoting.
    columns: name of the column of the text, or of both texts of a pair.
    vocabulary: what `dataset_lib.tokenizer.load` takes.
    count: texts at most.
    longest: in tokens; longer ones are cut.

  Raises:
    InvalidDataError: there is no such column, or the file is damaged.
    MissingDataError: there is no such file or vocabulary.
  """
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise MissingDataError(f'{path}: expected a TSV file, there is none')
  (_, names), *lines = text_files.read_lines(file)
  header = text_files.read_columns(file, names)
  if not {*columns} <= {*header} or not 1 <= len(columns) <= 2:
    raise InvalidDataError(
      f'{path}: expected one or two of its columns {", ".join(header)}, got '
      f'{", ".join(columns)}'
    )
  rows = [text.decode(errors='replace').split('\t') for _, text in lines]
  rows = [row for row in rows if len(row) == len(header)]
  if not rows:
    raise InvalidDataError(f'{path}: expected rows of {len(header)} columns')
  picked = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)
  texts = [
    [rows[row][header.index(column)] for row in picked] for column in columns
  ]
  first, *second = texts
  pairs = second[0] if second else None
  encoded = tokenizer.load(vocabulary).encode(first, pairs, longest)
  return _shuffled(np.diff(encoded.offsets))


def _shuffled(lengths: Any) -> tuple[int, ...]:
  """In an order that has nothing to do with the length."""
  return tuple(map(int, np.random.default_rng(0).permutation(lengths)))
