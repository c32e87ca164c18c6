"""Pretraining as ALBERT's: masked n-grams, and the order of two segments.

Reads a corpus that `launch.prepare_corpus` wrote. A record is a row of
consecutive sentences of one document. Each time it is read it is

- shortened, with probability `short_share`, to about a random length;
- split in two segments at a random sentence border (at a word where there is
  none), swapped with probability 0.5 (label 1): the sentence-order prediction
  of Lan et al. (2020), section 3.1;
- framed as [CLS] a [SEP] b [SEP] and padded;
- masked, see `masking`.

All of this is a function of (seed, epoch, index) and computed for many rows at
once; the random numbers of a row come from a counter. One ordered pass is
epoch 0.
"""

import dataclasses
import pathlib
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Interval, Len
from jaxtyping import Bool, Float64, Int, Int32, UInt64

from dataset_lib import corpus, masking, source, tokenizer
from dataset_lib.corpus import Split
from dataset_lib.errors import ConfigError, InvalidDataError
from dataset_lib.masking import Rows
from dataset_lib.order import splitmix64
from dataset_lib.source import DatasetInfo

CLASS_NAMES = ('in_order', 'swapped')
DRAWS = 5  # random numbers that `segments` takes of a row
_FIRST = 2  # shortest row to shorten to: a token in each segment

Flags = Bool[np.ndarray, 'B L']
Numbers = Int[np.ndarray, ' B']
Uniform = Float64[np.ndarray, 'B D']


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
    folder, length = pathlib.Path(self.directory).expanduser(), self.max_length
    manifest = corpus.read_manifest(folder)
    if length != manifest['max_length']:
      expected = (
        f'{manifest["max_length"]}, for which {folder} was prepared; '
        f'launch.prepare_corpus --max_length={length} makes another'
      )
      raise ConfigError('dataset.max_length', length, expected)
    given = tokenizer.load(folder / corpus.TOKENIZER_FILE)
    self._rows = corpus.open_split(folder, manifest, self.split)
    self._name = f'{folder}, split {self.split}'
    self._slots = masking.slots(length, self.mask_share)
    vocab_size = manifest['vocab_size']
    if given.vocab_size != vocab_size or given.mask_id is None:
      raise InvalidDataError(
        f'{corpus.TOKENIZER_FILE} of the prepared corpus: expected '
        f'{vocab_size} tokens and [MASK], got {given.vocab_size} tokens; '
        'prepare it again'
      )
    self._tokenizer, self._begins_word = given, given.word_starts()
    ordinary = np.setdiff1d(np.arange(vocab_size), given.special_ids)
    self._vocabulary = masking.Vocabulary(
      given.mask_id, ordinary.astype(np.int32)
    )
    rows = len(self._rows.rows) - 1
    if rows > source.MAX_EXAMPLES:
      raise InvalidDataError(
        f'{self._name}: expected at most {source.MAX_EXAMPLES} rows, got '
        f'{rows}; prepare it in parts, or with a larger --max_length'
      )
    self.info = DatasetInfo(
      input_key='tokens',
      input_shape=(length,),
      input_dtype='int32',
      num_classes=len(CLASS_NAMES),
      class_names=CLASS_NAMES,
      num_examples=rows,
      vocab_size=given.vocab_size,
    )

  def __len__(self) -> int:
    return self.info.num_examples

  def draw(
    self,
    seed: int,
    epochs: Int[np.ndarray, ' B'],
    indices: Int[np.ndarray, ' B'],
  ) -> dict[str, np.ndarray]:
    """Returns rows as they are in the given epochs.

    Returns:
      {'tokens', 'token_types': int32 [B, L], masked and padded; 'length',
      'label': int32 [B], the tokens of each row and 1 where its segments are
      swapped; and the 'mlm_...' arrays of `masking.mask`, [B, P] with P =
      ceil(mask_share * max_length)}.
    """
    length, slots = self.max_length, self._slots
    keys = row_keys(seed, epochs, indices)
    given = segments(
      self._rows,
      indices,
      length - corpus.SPECIAL_IN_ROW,
      self.short_share,
      self._begins_word,
      uniform(keys, 0, DRAWS),
    )
    text, types, lengths = framed(given, length, self._tokenizer)
    first = DRAWS
    draws = masking.Draws(
      lengths=uniform(keys, first, length),
      order=uniform(keys, first + length, length),
      kinds=uniform(keys, first + 2 * length, slots),
      replacements=uniform(keys, first + 2 * length + slots, slots),
    )
    budget = masking.budget(lengths, self.mask_share)
    masked = masking.mask(text, budget, self.max_ngram, self._vocabulary, draws)
    return {
      **masked,
      'token_types': types,
      'length': lengths,
      'label': given.swapped.astype(np.int32),
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


def row_keys(
  seed: int, epochs: Int[np.ndarray, ' B'], indices: Int[np.ndarray, ' B']
) -> UInt64[np.ndarray, ' B']:
  """Returns counters at which the random numbers of rows begin."""
  key = splitmix64(np.array([seed], np.uint64))
  key = splitmix64(key + epochs.astype(np.uint64))
  return splitmix64(key + indices.astype(np.uint64))


def uniform(
  keys: UInt64[np.ndarray, ' B'], first: int, count: int
) -> Float64[np.ndarray, 'B C']:
  """Returns numbers `first` .. `first + count` of each row, in [0, 1)."""
  counters = keys[:, None] + np.arange(first, first + count, dtype=np.uint64)
  return (splitmix64(counters) >> np.uint64(11)) * 2.0**-53


class Segments(NamedTuple):
  """Rows in document order, each divided in two segments.

  The first segment is `start` to `split`, the second `split` to `stop`.
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
  begins_word: Bool[np.ndarray, ' V'],
  draws: Uniform,
) -> Segments:
  """Splits rows, and shortens some around the place of the split.

  A row is split at a sentence border; one that has none, at a word border. One
  that is shortened ends at sentence borders, or where none is near at words.
  Share `short_share` of the rows is shortened to about a length uniform in
  [2, limit]; a row no longer than that stays as it is. `draws` has `DRAWS`
  numbers for each row.
  """
  vocab_size = len(begins_word)
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
  word = begins_word[tokens] & inside
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
  """Marks the tokens that begin a sentence, except the first of a row."""
  first = np.searchsorted(split.sentences, bounds[:, 0], 'right')
  behind = np.searchsorted(split.sentences, bounds[:, 1], 'left')
  counts = np.maximum(behind - first, 0)
  row = np.repeat(np.arange(len(bounds)), counts)
  within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
  begins = np.zeros((len(bounds), limit), bool)
  begins[row, split.sentences[first[row] + within] - bounds[row, 0]] = True
  return begins


def _borders(sentence: Flags, word: Flags, inside: Flags) -> Flags:
  """Marks the sentence borders of rows, else word borders, else all."""
  word, inside = word.copy(), inside.copy()
  word[:, 0] = inside[:, 0] = False
  has_sentence = sentence.any(axis=1, keepdims=True)
  has_word = word.any(axis=1, keepdims=True)
  return np.where(has_sentence, sentence, np.where(has_word, word, inside))


def _pick(flags: Flags, draws: Float64[np.ndarray, ' B']) -> Numbers:
  """Draws one of the set places of each row, all equally likely."""
  wanted = (draws * flags.sum(axis=1)).astype(np.int64)
  return (np.cumsum(flags, axis=1) > wanted[:, None]).argmax(axis=1)


def _around(
  middle: Numbers,
  wanted: Numbers,
  lengths: Numbers,
  draws: Float64[np.ndarray, ' B'],
) -> Numbers:
  """Draws the begin of `wanted` tokens around the middle of each row."""
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

  Each end moves towards the middle to a sentence border if there is one on its
  side, else outwards to the border of the word it is in.
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
  """Returns the last set place of each row."""
  return flags.shape[1] - 1 - flags[:, ::-1].argmax(axis=1)


def framed(
  given: Segments, length: int, special: tokenizer.Tokenizer
) -> tuple[Rows, Int32[np.ndarray, 'B L'], Int32[np.ndarray, ' B']]:
  """Frames segments as [CLS] a [SEP] b [SEP] and pads them to `length`.

  Returns:
    (tokens and which of them may be masked; token types, 0 for the first
    segment with its [SEP] and padding, else 1; tokens of each row).
  """
  swapped = given.swapped
  first = np.where(swapped, given.stop - given.split, given.split - given.start)
  total = given.stop - given.start
  column = np.arange(length)
  in_first = (column >= 1) & (column <= first[:, None])
  second_begin = first[:, None] + 2
  in_second = (column >= second_begin) & (column < total[:, None] + 2)
  is_text = in_first | in_second
  # From a place in the framed row to one in the given row, of either segment.
  starts = np.where(swapped, given.split, given.start)[:, None] - 1
  others = np.where(swapped, given.start, given.split)[:, None] - second_begin
  places = np.where(is_text, column + np.where(in_first, starts, others), 0)
  is_sep = (column == second_begin - 1) | (column == total[:, None] + 2)
  tokens = np.where(
    is_text,
    np.take_along_axis(given.tokens, places, axis=1),
    np.where(is_sep, special.sep_id, special.pad_id),
  ).astype(np.int32)
  tokens[:, 0] = special.cls_id
  begins_segment = is_text & ((column == 1) | (column == second_begin))
  begins_word = np.take_along_axis(given.begins_word, places, axis=1) & is_text
  types = in_second | (column == total[:, None] + 2)
  rows = Rows(tokens, is_text, begins_word | begins_segment, begins_segment)
  return rows, types.astype(np.int32), (total + 3).astype(np.int32)
