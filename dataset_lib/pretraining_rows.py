"""From stretches of a corpus to rows of two segments, many at once.

The random numbers of a row come from a counter, so that row i of an epoch needs
nothing but (seed, epoch, i).
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32, UInt64

from dataset_lib.corpus import Split
from dataset_lib.errors import InvalidDataError
from dataset_lib.masking import Rows
from dataset_lib.parity import splitmix64

DRAWS = 5  # random numbers that `segments` takes of a row
_FIRST = 2  # shortest row to shorten to: a token in each segment

Flags = Bool[np.ndarray, 'B L']
Numbers = Int[np.ndarray, ' B']


def row_keys(
  seed: int, epochs: Int[np.ndarray, ' B'], indices: Int[np.ndarray, ' B']
) -> UInt64[np.ndarray, ' B']:
  """Where the random numbers of rows begin, far from each other."""
  key = splitmix64(np.array([seed], np.uint64))
  key = splitmix64(key + epochs.astype(np.uint64))
  return splitmix64(key + indices.astype(np.uint64))


def uniform(
  keys: UInt64[np.ndarray, ' B'], first: int, count: int
) -> Float64[np.ndarray, 'B C']:
  """Numbers `first` to `first + count` of each row, uniform in [0, 1)."""
  counters = keys[:, None] + np.arange(first, first + count, dtype=np.uint64)
  return (splitmix64(counters) >> np.uint64(11)) * 2.0**-53


@dataclasses.dataclass(frozen=True)
class Table:
  """What rows must know of a tokenizer.

  Attributes:
    pad_id: behind the end of a row.
    cls_id: in front of it.
    sep_id: behind each segment.
    begins_word: whether a token begins a word, by id.
  """

  pad_id: int
  cls_id: int
  sep_id: int
  begins_word: Bool[np.ndarray, ' V']


class Segments(NamedTuple):
  """Stretches of text, each with the place where it is split.

  Attributes:
    tokens: of the stretches, as the document has them.
    begins_word: which begin a word.
    start: first token that is used.
    split: where the second segment begins.
    stop: behind the last token that is used.
    swapped: whether the second segment comes first.
  """

  tokens: Int32[np.ndarray, 'B W']
  begins_word: Bool[np.ndarray, 'B W']
  start: Numbers
  split: Numbers
  stop: Numbers
  swapped: Bool[np.ndarray, ' B']


def segments(
  split: Split,
  indices: Int[np.ndarray, ' B'],
  limit: int,
  short_share: float,
  table: Table,
  draws: Float64[np.ndarray, 'B D'],
) -> Segments:
  """Splits rows, and shortens some around the place of the split.

  A row is split at a sentence border; one that has none, at a word border. One
  that is shortened ends at sentence borders, or where none is near at words.

  Args:
    split: the corpus.
    indices: which rows.
    limit: tokens that a row may have, without special tokens.
    short_share: share of the rows that are shortened, to about a length
      uniform in [2, limit]; a row that is no longer than that stays as it is.
    table: of the tokenizer.
    draws: uniform numbers, `DRAWS` for each row.

  Raises:
    InvalidDataError: a token is not in the vocabulary.
  """
  vocab_size = len(table.begins_word)
  bounds = split.rows[indices[:, None] + np.arange(2)]
  lengths = bounds[:, 1] - bounds[:, 0]
  place = np.arange(limit)
  inside = place < lengths[:, None]
  tokens = np.zeros(inside.shape, np.int32)
  tokens[inside] = split.tokens[(bounds[:, :1] + place)[inside]]
  if not 0 <= tokens.min(initial=0) <= tokens.max(initial=0) < vocab_size:
    raise InvalidDataError(
      f'tokens.npy: expected token ids below {vocab_size}, got '
      f'{tokens.min()} to {tokens.max()}; prepare the corpus again'
    )
  word = table.begins_word[tokens] & inside
  word[:, 0] = True
  sentence = _sentence_begins(split, bounds, limit)
  middle = _pick(_borders(sentence, word, inside), draws[:, 0])
  wanted = _FIRST + (draws[:, 1] * (limit - _FIRST + 1)).astype(np.int64)
  is_short = draws[:, 2] < short_share
  wanted = np.where(is_short, np.minimum(wanted, lengths), lengths)
  start = _around(middle, wanted, lengths, draws[:, 3])
  start, stop = _to_borders(
    sentence, word, lengths, start, middle, start + wanted
  )
  return Segments(tokens, word, start, middle, stop, draws[:, 4] < 0.5)


def _sentence_begins(
  split: Split, bounds: Int[np.ndarray, 'B 2'], limit: int
) -> Flags:
  """Where sentences begin in rows, but for the first token of a row."""
  first = np.searchsorted(split.sentences, bounds[:, 0], 'right')
  behind = np.searchsorted(split.sentences, bounds[:, 1], 'left')
  counts = np.maximum(behind - first, 0)
  row = np.repeat(np.arange(len(bounds)), counts)
  within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
  begins = np.zeros((len(bounds), limit), bool)
  begins[row, split.sentences[first[row] + within] - bounds[row, 0]] = True
  return begins


def _borders(sentence: Flags, word: Flags, inside: Flags) -> Flags:
  """Sentence borders of rows that have one, else word borders, else all."""
  word, inside = word.copy(), inside.copy()
  word[:, 0] = inside[:, 0] = False
  has_sentence = sentence.any(axis=1, keepdims=True)
  has_word = word.any(axis=1, keepdims=True)
  return np.where(has_sentence, sentence, np.where(has_word, word, inside))


def _pick(flags: Flags, draws: Float64[np.ndarray, ' B']) -> Numbers:
  """One of the set places of each row, all equally likely."""
  wanted = (draws * flags.sum(axis=1)).astype(np.int64)
  return (np.cumsum(flags, axis=1) > wanted[:, None]).argmax(axis=1)


def _around(
  middle: Numbers,
  wanted: Numbers,
  lengths: Numbers,
  draws: Float64[np.ndarray, ' B'],
) -> Numbers:
  """Where `wanted` tokens begin that reach over the middle of each row."""
  lowest = np.maximum(0, middle + 1 - wanted)
  highest = np.minimum(middle - 1, lengths - wanted)
  return lowest + (draws * (highest - lowest + 1)).astype(np.int64)


def _to_borders(
  sentence: Flags,
  word: Flags,
  lengths: Numbers,
  start: Numbers,
  middle: Numbers,
  stop: Numbers,
) -> tuple[Numbers, Numbers]:
  """Moves the ends of stretches to the borders of sentences or words.

  Each end comes nearer to the middle, to a sentence border if there is one on
  its side. Else it goes further, to the border of the word it is in: rows have
  room for that, as they were no shorter before.
  """
  place = np.arange(sentence.shape[1])
  inner = (sentence | (place == 0)) & (place >= start[:, None])
  inner &= place < middle[:, None]
  outer = word & (place <= start[:, None])
  start = np.where(inner.any(axis=1), inner.argmax(axis=1), _last(outer))
  inner = sentence & (place <= stop[:, None]) & (place > middle[:, None])
  outer = word & (place >= stop[:, None])
  beyond = np.where(outer.any(axis=1), outer.argmax(axis=1), lengths)
  # The end of the row is the end of a sentence, or where it was cut.
  is_end = (stop == lengths) | ~inner.any(axis=1)
  return start, np.where(is_end, beyond, _last(inner))


def _last(flags: Flags) -> Numbers:
  """The last set place of each row."""
  return flags.shape[1] - 1 - flags[:, ::-1].argmax(axis=1)


class Framed(NamedTuple):
  """Rows with special tokens, padded.

  Attributes:
    text: tokens, and which of them may be masked.
    token_types: 0 for the first segment with its [SEP] and padding, else 1.
    lengths: tokens of each row, special ones included.
  """

  text: Rows
  token_types: Int32[np.ndarray, 'B L']
  lengths: Int32[np.ndarray, ' B']


def framed(given: Segments, length: int, table: Table) -> Framed:
  """Rows [CLS] a [SEP] b [SEP].

  Args:
    given: the segments.
    length: to which rows are padded.
    table: of the tokenizer.
  """
  swapped = given.swapped
  first = np.where(swapped, given.stop - given.split, given.split - given.start)
  total = given.stop - given.start
  column = np.arange(length)
  in_first = (column >= 1) & (column <= first[:, None])
  second_begin = first[:, None] + 2
  in_second = (column >= second_begin) & (column < total[:, None] + 2)
  is_text = in_first | in_second
  # From a place in the row to one in the stretch, of either segment.
  starts = np.where(swapped, given.split, given.start)[:, None] - 1
  others = np.where(swapped, given.start, given.split)[:, None] - second_begin
  places = np.where(is_text, column + np.where(in_first, starts, others), 0)
  is_sep = (column == second_begin - 1) | (column == total[:, None] + 2)
  tokens = np.where(
    is_text,
    np.take_along_axis(given.tokens, places, axis=1),
    np.where(is_sep, table.sep_id, table.pad_id),
  ).astype(np.int32)
  tokens[:, 0] = table.cls_id
  begins_segment = is_text & ((column == 1) | (column == second_begin))
  begins_word = np.take_along_axis(given.begins_word, places, axis=1) & is_text
  types = in_second | (column == total[:, None] + 2)
  rows = Rows(tokens, is_text, begins_word | begins_segment, begins_segment)
  return Framed(rows, types.astype(np.int32), (total + 3).astype(np.int32))
