"""Hides n-grams of whole words, for masked language modelling.

ALBERT (Lan et al., 2020), section 4.1: n-grams with p(n) proportional to 1 / n
for n up to 3, 20 % of the tokens here. Of the chosen tokens 80 % become [MASK],
10 % a random token and 10 % stay (BERT; Devlin et al., 2019, section 3.1).

Each row is cut into n-grams of random lengths, and n-grams are taken in random
order until the row's number of tokens is reached. The last one is shortened to
the words that still fit, and single words fill what is then left. Everything is
computed for many rows at once from random numbers that the caller gives.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32

MASKED, REPLACED, KEPT = 0, 1, 2  # the kinds of `mlm_kind`
MASKED_SHARE, REPLACED_SHARE = 0.8, 0.1

Tokens = Int32[np.ndarray, 'B L']
Flags = Bool[np.ndarray, 'B L']
Uniform = Float64[np.ndarray, 'B L']


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """What masking must know of a tokenizer.

  Attributes:
    mask_id: id of [MASK].
    ordinary: ids that stand for text; random tokens are drawn from these.
  """

  mask_id: int
  ordinary: Int32[np.ndarray, ' O']


class Rows(NamedTuple):
  """Rows to be masked.

  Attributes:
    tokens: their token ids, special tokens and padding included.
    is_text: the tokens that may be chosen.
    begins_word: of them, those that begin a word.
    begins_segment: those where no n-gram may go on from the token before.
  """

  tokens: Tokens
  is_text: Flags
  begins_word: Flags
  begins_segment: Flags


class Draws(NamedTuple):
  """Independent uniform numbers in [0, 1), each used once.

  Attributes:
    lengths: of the n-grams.
    order: in which n-grams are taken.
    kinds: whether a chosen token is hidden, replaced or kept.
    replacements: which token replaces it.
  """

  lengths: Uniform
  order: Uniform
  kinds: Float64[np.ndarray, 'B P']
  replacements: Float64[np.ndarray, 'B P']


def budget(
  lengths: Int[np.ndarray, ' B'], share: float
) -> Int[np.ndarray, ' B']:
  """How many tokens to choose of rows: the share, rounded, at least one.

  Args:
    lengths: tokens of each row, special tokens included.
    share: of them.
  """
  return np.maximum(1, np.round(share * lengths).astype(np.int64))


def slots(max_length: int, share: float) -> int:
  """P, the tokens that the longest row may have chosen."""
  return math.ceil(share * max_length)


def mask(
  rows: Rows,
  budgets: Int[np.ndarray, ' B'],
  max_ngram: int,
  vocabulary: Vocabulary,
  draws: Draws,
) -> dict[str, np.ndarray]:
  """Masks rows.

  Args:
    rows: the rows.
    budgets: tokens to choose in each; at most P.
    max_ngram: the longest n-gram, in words.
    vocabulary: of the tokens.
    draws: random numbers.

  Returns:
    {'tokens': int32 [B, L], with the chosen tokens hidden or replaced;
    'mlm_positions', 'mlm_labels', 'mlm_kind': int32 [B, P], the place of each
    chosen token, ascending, the token that stood there, and MASKED, REPLACED
    or KEPT; 'mlm_weights': float32 [B, P], 1 for a chosen token and 0 for an
    unused slot, whose other values are 0}.
  """
  ngrams = cut_into_ngrams(rows, max_ngram, draws.lengths)
  chosen = choose(rows, ngrams, budgets, draws.order)
  positions, used = _slots(chosen, draws.kinds.shape[1])
  labels = np.take_along_axis(rows.tokens, positions, axis=1)
  kinds = np.digitize(
    draws.kinds, [MASKED_SHARE, MASKED_SHARE + REPLACED_SHARE]
  )
  count = len(vocabulary.ordinary)
  random = vocabulary.ordinary[(draws.replacements * count).astype(np.int64)]
  shown = np.choose(kinds, [np.int32(vocabulary.mask_id), random, labels])
  tokens = rows.tokens.copy()
  tokens[np.nonzero(used)[0], positions[used]] = shown[used]
  return {
    'tokens': tokens,
    'mlm_positions': _where_used(used, positions),
    'mlm_labels': _where_used(used, labels),
    'mlm_weights': used.astype(np.float32),
    'mlm_kind': _where_used(used, kinds),
  }


def cut_into_ngrams(
  rows: Rows, max_ngram: int, uniform: Uniform
) -> Int[np.ndarray, 'B L']:
  """The number of the n-gram that each token is in, counted from 0 in its row.

  A segment begins a new n-gram. Tokens that are no text belong to the n-gram
  before them and mean nothing.
  """
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
  begins_ngram = np.take_along_axis(begins, word, axis=1) | rows.begins_segment
  return _number(rows.begins_word & begins_ngram)


def choose(
  rows: Rows,
  ngrams: Int[np.ndarray, 'B L'],
  budgets: Int[np.ndarray, ' B'],
  uniform: Uniform,
) -> Flags:
  """The chosen tokens: whole words, at most `budgets` of them in each row.

  A row has fewer only where no other word fits in what is left. Where none fits
  at all, a part of a word is chosen, so that every row has something to learn.

  Args:
    rows: the rows.
    ngrams: from `cut_into_ngrams`.
    budgets: tokens to choose in each row.
    uniform: random numbers; the n-gram n of a row has the n-th one.
  """
  keys = np.take_along_axis(uniform, ngrams, axis=1)
  keys[~rows.is_text] = 2.0  # behind all others
  order = np.argsort(keys, axis=1, kind='stable')
  # From here on tokens stand in the order in which they are taken; those of an
  # n-gram, and so of a word, have stayed together.
  text, begins = (
    np.take_along_axis(flags, order, axis=1)
    for flags in (rows.is_text, rows.begins_word)
  )
  word = _number(begins)
  taken = _whole_words(text, begins, word, budgets)
  _fill(taken, text, begins, word, budgets)
  nothing = ~taken.any(axis=1)
  rank = np.arange(text.shape[1])
  taken[nothing] = (text & (rank < budgets[:, None]))[nothing]
  chosen = np.zeros_like(taken)
  np.put_along_axis(chosen, order, taken, axis=1)
  return chosen


def _whole_words(
  text: Flags,
  begins: Flags,
  word: Int[np.ndarray, 'B L'],
  budgets: Int[np.ndarray, ' B'],
) -> Flags:
  """The first tokens, without those of a word that the budget cuts."""
  rank = np.arange(text.shape[1])
  first_left = np.minimum(budgets, text.shape[1] - 1)[:, None]
  is_cut = np.take_along_axis(text & ~begins, first_left, axis=1)
  cut_word = np.take_along_axis(word, first_left, axis=1)
  whole = ~is_cut | (word != cut_word)
  return text & (rank < budgets[:, None]) & whole


def _fill(
  taken: Flags,
  text: Flags,
  begins: Flags,
  word: Int[np.ndarray, 'B L'],
  budgets: Int[np.ndarray, ' B'],
) -> None:
  """Takes single words that still fit, first come first served, in place."""
  sizes = np.zeros(text.shape, np.int64)
  row, _ = np.nonzero(text)
  np.add.at(sizes, (row, word[text]), 1)
  size = np.take_along_axis(sizes, word, axis=1)
  while True:
    left = budgets - taken.sum(axis=1)
    fitting = begins & text & ~taken & (size <= left[:, None])
    rows = np.flatnonzero(fitting.any(axis=1))
    if not len(rows):
      return
    first = fitting[rows].argmax(axis=1)
    same = word[rows] == word[rows, first][:, None]
    taken[rows] |= same & text[rows]


def _slots(
  chosen: Flags, slots: int
) -> tuple[Int[np.ndarray, 'B P'], Bool[np.ndarray, 'B P']]:
  """Places of the chosen tokens, ascending, and which slots are used."""
  positions = np.argsort(~chosen, axis=1, kind='stable')[:, :slots]
  used = np.arange(slots) < chosen.sum(axis=1)[:, None]
  return positions, used


def _where_used(
  used: Bool[np.ndarray, 'B P'], values: Int[np.ndarray, 'B P']
) -> Int32[np.ndarray, 'B P']:
  return np.where(used, values, 0).astype(np.int32)


def _number(begins: Flags) -> Int[np.ndarray, 'B L']:
  """How many have begun before each token; the first begins with number 0."""
  return np.maximum(np.cumsum(begins, axis=1) - 1, 0)
