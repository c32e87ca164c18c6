"""Pretraining as ALBERT's: masked n-grams, and the order of two segments.

A record is a row of consecutive sentences of one document. In each epoch it is
1. split in two segments at a border of sentences, else of words, and with
   probability `short_share` shortened,
2. framed as [CLS] a [SEP] b [SEP], the segments swapped with probability 0.5
   (Lan et al., 2020, section 3.1), and padded,
3. masked (section 4.1).
"""

import dataclasses
import math
import pathlib
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Interval, Len, Predicate
from jaxtyping import Bool, Float64, Int, Int32

from core.errors import ConfigError, InvalidDataError
from dataset_lib import tokenizer
from dataset_lib.corpus import preparation
from dataset_lib.corpus.packing import MIN_ROW, SPECIAL_IN_ROW
from dataset_lib.order import splitmix64
from dataset_lib.source import PART_WORDS, DatasetInfo, Drawn, parts, selected
from dataset_lib.text_rows import TextRows

MASKED, REPLACED, KEPT = 0, 1, 2  # the kinds of `mlm_kind`
_DRAWS = 5  # random numbers of a row, besides those for masking

Flags = Bool[np.ndarray, 'B L']
Counts = Int[np.ndarray, 'B L']
Numbers = Int[np.ndarray, ' B']
Uniform = Float64[np.ndarray, 'B U']  # independent numbers in [0, 1)
Spans = tuple[Numbers, Numbers, Numbers]  # begin, second segment, end


class Rows(NamedTuple):
  """Rows of tokens; `is_text` is False for special tokens and padding."""

  tokens: Int32[np.ndarray, 'B L']
  is_text: Flags
  begins_word: Flags
  borders: Flags  # between sentences, or where the segments begin


@dataclasses.dataclass(kw_only=True, eq=False)
class Pretraining(Drawn):
  """Rows of one split of a corpus that `launch.prepare_corpus` wrote."""

  split: Annotated[
    str,
    Predicate(lambda split: len(parts(split, 'train|validation')) == 1),
    f'train, validation, {PART_WORDS}; rows are in the order of documents',
  ]
  directory: Annotated[
    str, Len(1), 'a directory that launch.prepare_corpus wrote'
  ]
  max_length: Annotated[int, Interval(ge=8, le=65536)] = 128
  mask_share: Annotated[float, Interval(ge=0.01, le=0.9)] = 0.2
  max_ngram: Annotated[int, Interval(ge=1, le=16)] = 3
  short_share: Annotated[float, Interval(ge=0.0, le=1.0)] = 0.1

  @staticmethod
  def sketch(config: Any, classes: int, examples: int) -> Any:
    """See `Source`; also the arrays of `mask`."""
    info, rows = TextRows.sketch(config, 2, examples)
    slots = (math.ceil(config['mask_share'] * config['max_length']),)
    dtypes = dict.fromkeys(('positions', 'labels', 'kind'), 'int32')
    dtypes['weights'] = 'float32'
    return info, rows | {f'mlm_{k}': (slots, v) for k, v in dtypes.items()}

  def __post_init__(self) -> None:
    folder = pathlib.Path(self.directory).expanduser()
    [part] = parts(self.split)
    self._name = f'{folder}, split {part.name}'
    split = preparation.open_split(folder, part.name)
    [(*_, own)] = selected(self.split, lambda _: split.rows[1:])
    self._first = own.start
    self._rows = split._replace(rows=split.rows[own.start : own.stop + 1])
    length, vocab_size = self._rows.max_length, self._rows.vocab_size
    if length != self.max_length:
      expected = f'{length}, for which {folder} was prepared; another is made '
      expected += f'by launch.prepare_corpus --max_length={self.max_length}'
      raise ConfigError('dataset.max_length', self.max_length, expected)
    loaded: Any = tokenizer.load(folder / preparation.TOKENIZER_FILE)
    if loaded.vocab_size != vocab_size or loaded.mask_id is None:
      expected = f'expected {vocab_size} tokens and [MASK]'
      got = f'got {loaded.vocab_size} tokens; prepare it again'
      raise InvalidDataError(f'tokenizer.json of {folder}: {expected}, {got}')
    self._tokenizer, self._begins_word = loaded, loaded.word_starts()
    ordinary = np.setdiff1d(np.arange(vocab_size), loaded.special_ids)
    self._ordinary = ordinary.astype(np.int32)
    self.info = DatasetInfo(
      'tokens', (length,), 'int32', 2, ('in_order', 'swapped'),
      num_examples=len(self._rows.rows) - 1, vocab_size=vocab_size,
      label_kind='class', preprocessing=loaded.preprocessing(length),
      token_types=2,
    )  # fmt: skip

  def draw(
    self, seed: int, epochs: Numbers, indices: Numbers
  ) -> dict[str, np.ndarray]:
    """Returns the arrays of `mask`, P being ceil(mask_share * max_length).

    Also {'token_types': int32 [B, L]; 'length', 'label': int32 [B], the label 1
    where segments are swapped}.
    """
    slots = math.ceil(self.mask_share * self.max_length)
    count = _DRAWS + 2 * (self.max_length + slots)
    draws, more = np.split(uniform(seed, epochs, indices, count), [_DRAWS], 1)
    swapped = draws[:, 4] < 0.5
    gathered = self._gather(indices)
    spans = _segments(gathered, self.short_share, draws)
    rows, types, lengths = self._framed(gathered, spans, swapped)
    budgets = np.round(self.mask_share * lengths).astype(np.int64)
    masked = mask(
      rows, np.maximum(budgets, 1), self.max_ngram, self._tokenizer.mask_id,
      self._ordinary, more,
    )  # fmt: skip
    label = swapped.astype(np.int32)
    return masked | dict(token_types=types, length=lengths, label=label)

  def _gather(self, indices: Numbers) -> Rows:
    """Returns rows in document order; the first token begins a word."""
    split, vocab_size = self._rows, self._rows.vocab_size
    starts, stops = split.rows[indices], split.rows[indices + 1]
    column = np.arange(self.max_length - SPECIAL_IN_ROW)
    inside = column < (stops - starts)[:, None]
    places = np.where(inside, starts[:, None] + column, 0)
    tokens = np.where(inside, split.tokens[places], 0).astype(np.int32)
    least, most = tokens.min(initial=0), tokens.max(initial=0)
    if not 0 <= least <= most < vocab_size:
      expected = f'token ids below {vocab_size}, got {least} to {most}'
      raise InvalidDataError(f'tokens.bin: expected {expected}; prepare again')
    word = inside & (self._begins_word[tokens] | (column == 0))
    sentence = inside & split.sentences[places] & (column > 0)
    return Rows(tokens, inside, word, sentence)

  def _framed(
    self, given: Rows, spans: Spans, swapped: Bool[np.ndarray, ' B']
  ) -> tuple[Rows, Int32[np.ndarray, 'B L'], Int32[np.ndarray, ' B']]:
    """Returns framed and padded rows, their token types, and their lengths."""
    start, middle, stop = spans
    begins = np.where(swapped, [middle, start], [start, middle])[..., None]
    first = np.where(swapped, stop - middle, middle - start)[:, None]
    total = (stop - start)[:, None]
    column = np.arange(self.max_length)
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
      np.where(is_sep, self._tokenizer.sep_id, self._tokenizer.pad_id),
    ).astype(np.int32)
    framed[:, 0] = self._tokenizer.cls_id
    begins_segment = is_text & ((column == 1) | (column == first + 2))
    word = np.take_along_axis(given.begins_word, places, axis=1) & is_text
    types = (in_second | (column == total + 2)).astype(np.int32)
    rows = Rows(framed, is_text, word | begins_segment, begins_segment)
    return rows, types, (total[:, 0] + SPECIAL_IN_ROW).astype(np.int32)

  def record(self, index: int) -> dict[str, Any]:
    """Returns the tokens of a row in document order, int32 [M], and label 0."""
    start, stop = self._rows.rows[index : index + 2]
    tokens = self._rows.tokens[start:stop].astype(np.int32)
    return {'tokens': tokens, 'label': 0}

  def where(self, index: int) -> str:
    """Returns the place of a row."""
    return f'{self._name}, row {self._first + index}'


def uniform(seed: int, epochs: Numbers, rows: Numbers, count: int) -> Uniform:
  """Returns `count` numbers in [0, 1) for each row, by counters."""
  key = splitmix64(np.array([seed], np.uint64))
  key = splitmix64(key + epochs.astype(np.uint64))
  keys = splitmix64(key + rows.astype(np.uint64))
  counters = keys[:, None] + np.arange(count, dtype=np.uint64)
  return (splitmix64(counters) >> np.uint64(11)) * 2.0**-53


def _segments(given: Rows, short_share: float, draws: Uniform) -> Spans:
  """Splits rows; a share is shortened to about a length uniform in [2, L].

  Each end of a shortened row moves inwards to a sentence border, or, if there
  is none, outwards to the border of its word.
  """
  _, inside, word, sentence = given
  lengths, limit = inside.sum(axis=1), inside.shape[1]
  place = np.arange(limit)
  borders = inside & (place > 0)
  for better in (word & borders, sentence):
    borders = np.where(better.any(axis=1, keepdims=True), better, borders)
  chosen = (draws[:, 0] * borders.sum(axis=1)).astype(np.int64)
  middle = (np.cumsum(borders, axis=1) > chosen[:, None]).argmax(axis=1)
  wanted = MIN_ROW + (draws[:, 1] * (limit - MIN_ROW + 1)).astype(np.int64)
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
  # A row ends at the end of a sentence, or where preparation cut the row.
  stop = np.where(stop == lengths, outer, _last(near, outer))
  return start, middle, stop


def _first(flags: Flags, default: Numbers) -> Numbers:
  return np.where(flags.any(axis=1), flags.argmax(axis=1), default)


def _last(flags: Flags, default: Numbers) -> Numbers:
  end = flags.shape[1] - 1
  return end - _first(flags[:, ::-1], end - default)


def mask(
  rows: Rows,
  budgets: Numbers,
  max_ngram: int,
  mask_id: int,
  ordinary: Int32[np.ndarray, ' O'],  # ids that random tokens are drawn from
  uniform: Uniform,  # 2 (L + P) for each row
) -> dict[str, np.ndarray]:
  """Masks `budgets` tokens of each row, in n-grams of up to `max_ngram` words.

  N-grams of random lengths, p(n) proportional to 1 / n, are taken in random
  order up to the budget; single words fill the rest. 80 % of the tokens become
  [MASK], 10 % a random one, 10 % stay (BERT; Devlin et al., 2019, section 3.1).

  Returns:
    {'tokens': int32 [B, L]; 'mlm_positions', 'mlm_labels', 'mlm_kind': int32
    [B, P], places, ascending, ids before masking, and MASKED, REPLACED or KEPT;
    'mlm_weights': float32 [B, P], 0 for an unused slot, as its other values}.
  """
  length = rows.tokens.shape[1]
  size = uniform.shape[1] // 2 - length
  bounds = np.cumsum([length, length, size])
  lengths, order, kinds, replacements = np.split(uniform, bounds, axis=1)
  ngrams = cut_into_ngrams(rows, max_ngram, lengths)
  chosen = choose(rows, ngrams, budgets, order)
  positions = np.argsort(~chosen, axis=1, kind='stable')[:, :size]
  used = np.arange(size) < chosen.sum(axis=1)[:, None]
  labels = np.take_along_axis(rows.tokens, positions, axis=1)
  kind = np.digitize(kinds, [0.8, 0.9])
  random = ordinary[(replacements * len(ordinary)).astype(np.int64)]
  shown = np.choose(kind, [np.int32(mask_id), random, labels])
  tokens = rows.tokens.copy()
  tokens[np.nonzero(used)[0], positions[used]] = shown[used]
  picked = {'positions': positions, 'labels': labels, 'kind': kind}
  arrays = {k: np.where(used, x, 0).astype(np.int32) for k, x in picked.items()}
  arrays['weights'] = used.astype(np.float32)
  return {f'mlm_{k}': v for k, v in arrays.items()} | {'tokens': tokens}


def cut_into_ngrams(rows: Rows, max_ngram: int, uniform: Uniform) -> Counts:
  """Numbers the n-gram of each token; special tokens join the previous one."""
  size = rows.tokens.shape[1]
  weights = 1.0 / np.arange(1, max_ngram + 1)
  bounds = np.cumsum(weights / weights.sum())[:-1]
  lengths = 1 + np.digitize(uniform, bounds)
  first_words = np.cumsum(lengths, axis=1) - lengths
  # Whether the n-th word of a row begins an n-gram.
  begins = np.zeros((len(lengths), size), bool)
  row, number = np.nonzero(first_words < size)
  begins[row, first_words[row, number]] = True
  word = _number(rows.begins_word)
  begins_ngram = np.take_along_axis(begins, word, axis=1) | rows.borders
  return _number(rows.begins_word & begins_ngram)


def choose(
  rows: Rows, ngrams: Counts, budgets: Numbers, uniform: Uniform
) -> Flags:
  """Chooses whole words, at most `budgets` tokens of each row.

  If no word fits, a part of one is chosen, so that every row has a label.
  """
  keys = np.take_along_axis(uniform, ngrams, axis=1)
  keys[~rows.is_text] = 2.0  # after all others
  order = np.argsort(keys, axis=1, kind='stable')
  # From here on tokens are in the order in which they are taken.
  text = np.take_along_axis(rows.is_text, order, axis=1)
  begins = np.take_along_axis(rows.begins_word, order, axis=1)
  word = _number(begins)
  sizes = np.zeros(text.shape, np.int64)
  np.add.at(sizes, (np.nonzero(text)[0], word[text]), 1)
  size = np.take_along_axis(sizes, word, axis=1)
  place = np.arange(text.shape[1])
  # The first words whose ends are within the budget.
  end = np.maximum.accumulate(np.where(begins, place, 0), axis=1) + size
  taken = text & (end <= budgets[:, None])
  while True:  # takes single words that still fit, the first ones first
    left = budgets - taken.sum(axis=1)
    fitting = begins & text & ~taken & (size <= left[:, None])
    unfilled = np.flatnonzero(fitting.any(axis=1))
    if not len(unfilled):
      break
    first = fitting[unfilled].argmax(axis=1)
    same = word[unfilled] == word[unfilled, first][:, None]
    taken[unfilled] |= text[unfilled] & same
  nothing = ~taken.any(axis=1, keepdims=True)
  taken |= nothing & text & (place < budgets[:, None])
  chosen = np.zeros_like(taken)
  np.put_along_axis(chosen, order, taken, axis=1)
  return chosen


def _number(begins: Flags) -> Counts:
  """Numbers the words or n-grams; numbering starts at 0."""
  return np.maximum(np.cumsum(begins, axis=1) - 1, 0)
