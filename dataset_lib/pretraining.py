"""Pretraining as ALBERT's: masked n-grams, and the order of two segments.

A record is a row of consecutive sentences of one document, from a corpus that
`launch.prepare_corpus` wrote. Each time it is read it is

- shortened, with probability `short_share`, to about a random length;
- split in two segments at a random sentence border (at a word where there is
  none), swapped with probability 0.5 (label 1): the sentence-order prediction
  of Lan et al. (2020), section 3.1;
- framed as [CLS] a [SEP] b [SEP], padded, and masked, see `masking`.

All of this is a function of (seed, epoch, index), computed for many rows at
once. One ordered pass is epoch 0.
"""

import dataclasses
import math
import pathlib
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Interval, Len
from jaxtyping import Bool, Float64, Int, Int32

from dataset_lib import corpus, masking, tokenizer
from dataset_lib.corpus import Split
from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.order import splitmix64
from dataset_lib.source import DatasetInfo

_DRAWS = 5  # random numbers of a row, besides those for masking

Flags = Bool[np.ndarray, 'B L']
Numbers = Int[np.ndarray, ' B']


@dataclasses.dataclass(kw_only=True, eq=False)
class Pretraining:
  """Rows of one split of a prepared corpus; a `DrawnSource`.

  Raises:
    ConfigError: the rows were cut for another `max_length`.
    MissingDataError: there is no such corpus, or no such split.
    InvalidDataError: it is damaged.
  """

  split: Literal['train', 'validation']
  directory: Annotated[
    str, Len(1), 'a directory that launch.prepare_corpus wrote'
  ]
  max_length: Annotated[int, Interval(ge=8, le=65536)] = 128
  mask_share: Annotated[float, Interval(ge=0.01, le=0.9)] = 0.2
  max_ngram: Annotated[int, Interval(ge=1, le=16)] = 3
  short_share: Annotated[float, Interval(ge=0.0, le=1.0)] = 0.1

  def __post_init__(self) -> None:
    folder = pathlib.Path(self.directory).expanduser()
    self._name = f'{folder}, split {self.split}'
    self._rows = corpus.open_split(folder, self.split)
    length, vocab_size = self._rows.max_length, self._rows.vocab_size
    if length != self.max_length:
      expected = (
        f'{length}, for which {folder} was prepared; launch.prepare_corpus '
        f'--max_length={self.max_length} makes another'
      )
      raise ConfigError('dataset.max_length', self.max_length, expected)
    given = tokenizer.load(folder / corpus.TOKENIZER_FILE)
    if given.vocab_size != vocab_size or given.mask_id is None:
      raise InvalidDataError(
        f'{corpus.TOKENIZER_FILE} of the prepared corpus: expected '
        f'{vocab_size} tokens and [MASK], got {given.vocab_size} tokens; '
        'prepare it again'
      )
    self._tokenizer, self._mask_id = given, given.mask_id
    self._begins_word = given.word_starts()
    ordinary = np.setdiff1d(np.arange(vocab_size), given.special_ids)
    self._ordinary = ordinary.astype(np.int32)
    self.info = DatasetInfo(
      'tokens', (length,), 'int32', 2, ('in_order', 'swapped'),
      num_examples=len(self._rows.rows) - 1, vocab_size=vocab_size,
    )  # fmt: skip

  def __len__(self) -> int:
    return self.info.num_examples

  def draw(
    self, seed: int, epochs: Numbers, indices: Numbers
  ) -> dict[str, np.ndarray]:
    """Returns rows as they are in the given epochs.

    Returns:
      {'tokens', 'token_types': int32 [B, L]; 'length', 'label': int32 [B], the
      label 1 where segments are swapped; and the arrays of `masking.mask`,
      [B, P] with P = ceil(mask_share * max_length)}.
    """
    length = self.max_length
    slots = math.ceil(self.mask_share * length)
    count = _DRAWS + 2 * (length + slots)
    numbers = uniform(seed, epochs, indices, count)
    draws = numbers[:, :_DRAWS]
    swapped = draws[:, 4] < 0.5
    given = _gather(self._rows, indices, self._begins_word)
    spans = _segments(given, self.short_share, draws)
    rows, types, lengths = _framed(
      given, spans, swapped, length, self._tokenizer
    )
    budgets = np.round(self.mask_share * lengths).astype(np.int64)
    masked = masking.mask(
      rows, np.maximum(budgets, 1), self.max_ngram, self._mask_id,
      self._ordinary, numbers[:, _DRAWS:],
    )  # fmt: skip
    return {
      **masked,
      'token_types': types,
      'length': lengths,
      'label': swapped.astype(np.int32),
    }

  def record(self, index: int) -> dict[str, Any]:
    """Returns the tokens of a row in document order, int32 [M], and label 0."""
    start, stop = self._rows.rows[index : index + 2]
    tokens = self._rows.tokens[start:stop].astype(np.int32)
    return {'tokens': tokens, 'label': 0}

  def where(self, index: int) -> str:
    """Returns the document of a row, counted from 0."""
    document = np.searchsorted(self._rows.documents, index, 'right') - 1
    return f'{self._name}, document {document}'


def uniform(
  seed: int, epochs: Numbers, indices: Numbers, count: int
) -> Float64[np.ndarray, 'B C']:
  """Returns `count` numbers in [0, 1) for each row, by counters."""
  key = splitmix64(np.array([seed], np.uint64))
  key = splitmix64(key + epochs.astype(np.uint64))
  keys = splitmix64(key + indices.astype(np.uint64))
  counters = keys[:, None] + np.arange(count, dtype=np.uint64)
  return (splitmix64(counters) >> np.uint64(11)) * 2.0**-53


class _Given(NamedTuple):
  """Rows in document order; the first token begins a word, no sentence."""

  tokens: Int32[np.ndarray, 'B L']
  begins_word: Flags
  begins_sentence: Flags
  lengths: Numbers


def _gather(
  split: Split, indices: Numbers, begins_word: Bool[np.ndarray, ' V']
) -> _Given:
  vocab_size = len(begins_word)
  bounds = split.rows[indices[:, None] + np.arange(2)]
  lengths = bounds[:, 1] - bounds[:, 0]
  place = np.arange(split.max_length - corpus.SPECIAL_IN_ROW)
  inside = place < lengths[:, None]
  tokens = np.zeros(inside.shape, np.int32)
  tokens[inside] = split.tokens[(bounds[:, :1] + place)[inside]]
  if not 0 <= tokens.min(initial=0) <= tokens.max(initial=0) < vocab_size:
    raise InvalidDataError(
      f'tokens.npy: expected token ids below {vocab_size}, got '
      f'{tokens.min()} to {tokens.max()}; prepare the corpus again'
    )
  word = begins_word[tokens] & inside
  word[:, 0] = True
  sentence = np.zeros(inside.shape, bool)
  found = np.searchsorted(split.sentences, bounds + np.array([1, 0]))
  starts = bounds[:, 0]
  for row, start, (first, last) in zip(sentence, starts, found, strict=True):
    row[split.sentences[first:last] - start] = True
  return _Given(tokens, word, sentence, lengths)


def _segments(
  given: _Given, short_share: float, draws: Float64[np.ndarray, 'B D']
) -> tuple[Numbers, Numbers, Numbers]:
  """Returns the begin of each row, of its second segment, and its end.

  Share `short_share` of the rows is shortened to about a length uniform in [2,
  L], around the split. Each end of such a row moves towards the split to a
  sentence border, or if there is none, outwards to the border of its word.
  """
  _, word, sentence, lengths = given
  place, limit = np.arange(word.shape[1]), word.shape[1]
  inner = (place > 0) & (place < lengths[:, None])
  borders = np.where(
    sentence.any(axis=1, keepdims=True),
    sentence,
    np.where((word & inner).any(axis=1, keepdims=True), word & inner, inner),
  )
  chosen = (draws[:, 0] * borders.sum(axis=1)).astype(np.int64)
  middle = (np.cumsum(borders, axis=1) > chosen[:, None]).argmax(axis=1)
  wanted = corpus.MIN_ROW + (draws[:, 1] * (limit - corpus.MIN_ROW + 1)).astype(
    np.int64
  )
  is_short = draws[:, 2] < short_share
  wanted = np.where(is_short, np.minimum(wanted, lengths), lengths)
  lowest = np.maximum(0, middle + 1 - wanted)
  highest = np.minimum(middle - 1, lengths - wanted)
  start = lowest + (draws[:, 3] * (highest - lowest + 1)).astype(np.int64)
  stop = start + wanted

  first, split, last = start[:, None], middle[:, None], stop[:, None]
  near = (sentence | (place == 0)) & (place >= first) & (place < split)
  start = _first(near, _last(word & (place <= first), start))
  near = sentence & (place > split) & (place <= last)
  outer = _first(word & (place >= last), lengths)
  # The end of the row is the end of a sentence, or where it was cut.
  stop = np.where(stop == lengths, outer, _last(near, outer))
  return start, middle, stop


def _first(flags: Flags, default: Numbers) -> Numbers:
  return np.where(flags.any(axis=1), flags.argmax(axis=1), default)


def _last(flags: Flags, default: Numbers) -> Numbers:
  end = flags.shape[1] - 1
  return end - _first(flags[:, ::-1], end - default)


def _framed(
  given: _Given,
  spans: tuple[Numbers, Numbers, Numbers],
  swapped: Bool[np.ndarray, ' B'],
  length: int,
  special: tokenizer.Tokenizer,
) -> tuple[masking.Rows, Int32[np.ndarray, 'B L'], Int32[np.ndarray, ' B']]:
  """Returns framed and padded rows, their token types, and their lengths."""
  start, middle, stop = spans
  begins = np.where(swapped, [middle, start], [start, middle])[..., None]
  first = np.where(swapped, stop - middle, middle - start)[:, None]
  total = (stop - start)[:, None]
  column = np.arange(length)
  in_first = (column >= 1) & (column <= first)
  in_second = (column >= first + 2) & (column < total + 2)
  is_text = in_first | in_second
  # From a place in the framed row to one in the given row, of either segment.
  shift = np.where(in_first, begins[0] - 1, begins[1] - first - 2)
  places = np.where(is_text, column + shift, 0)
  is_sep = (column == first + 1) | (column == total + 2)
  framed = np.where(
    is_text,
    np.take_along_axis(given.tokens, places, axis=1),
    np.where(is_sep, special.sep_id, special.pad_id),
  ).astype(np.int32)
  framed[:, 0] = special.cls_id
  begins_segment = is_text & ((column == 1) | (column == first + 2))
  word = np.take_along_axis(given.begins_word, places, axis=1) & is_text
  types = (in_second | (column == total + 2)).astype(np.int32)
  rows = masking.Rows(framed, is_text, word | begins_segment, begins_segment)
  return rows, types, (total[:, 0] + 3).astype(np.int32)
