"""Masks n-grams of whole words, for masked language modelling.

ALBERT (Lan et al., 2020), section 4.1: n-grams of n words with p(n)
proportional to 1 / n. Of the chosen tokens 80 % become [MASK], 10 % a random
token and 10 % stay (BERT; Devlin et al., 2019, section 3.1).

Each row is cut into n-grams of random lengths, taken in random order until the
row's number of tokens is reached. The last one is shortened to the words that
still fit, and single words fill the rest.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32

MASKED, REPLACED, KEPT = 0, 1, 2  # the kinds of `mlm_kind`

Flags = Bool[np.ndarray, 'B L']
Numbers = Int[np.ndarray, 'B L']
Uniform = Float64[np.ndarray, 'B L']
Budgets = Int[np.ndarray, ' B']


class Rows(NamedTuple):
  """Rows to be masked, with special tokens and padding."""

  tokens: Int32[np.ndarray, 'B L']
  is_text: Flags  # only these are chosen
  begins_word: Flags
  begins_segment: Flags  # no n-gram goes on here


def mask(
  rows: Rows,
  budgets: Budgets,
  max_ngram: int,
  mask_id: int,
  ordinary: Int32[np.ndarray, ' O'],  # ids that random tokens are drawn from
  uniform: Float64[np.ndarray, 'B U'],
) -> dict[str, np.ndarray]:
  """Masks `budgets` tokens of each row, in n-grams of up to `max_ngram` words.

  `uniform` are independent numbers in [0, 1), 2 (L + P) for each row.

  Returns:
    {'tokens': int32 [B, L], with the chosen tokens masked or replaced;
    'mlm_positions', 'mlm_labels', 'mlm_kind': int32 [B, P], the place of each
    chosen token, ascending, its id before masking, and MASKED, REPLACED or
    KEPT; 'mlm_weights': float32 [B, P], 1 for a chosen token and 0 for an
    unused slot, whose other values are 0}.
  """
  length = rows.tokens.shape[1]
  size = uniform.shape[1] // 2 - length
  lengths, order, kinds, replacements = np.split(
    uniform, np.cumsum([length, length, size]), axis=1
  )
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
  return {
    'tokens': tokens,
    'mlm_positions': np.where(used, positions, 0).astype(np.int32),
    'mlm_labels': np.where(used, labels, 0).astype(np.int32),
    'mlm_weights': used.astype(np.float32),
    'mlm_kind': np.where(used, kind, 0).astype(np.int32),
  }


def cut_into_ngrams(rows: Rows, max_ngram: int, uniform: Uniform) -> Numbers:
  """Returns the number of each token's n-gram, counted from 0 in its row.

  Special tokens have the number of the n-gram before them.
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
  rows: Rows, ngrams: Numbers, budgets: Budgets, uniform: Uniform
) -> Flags:
  """Chooses whole words, at most `budgets` tokens of each row.

  Where no word fits, a part of one is chosen, so that every row has a label.
  N-gram n of a row is ordered by the n-th number of `uniform`.
  """
  keys = np.take_along_axis(uniform, ngrams, axis=1)
  keys[~rows.is_text] = 2.0  # after all others
  order = np.argsort(keys, axis=1, kind='stable')
  # From here on tokens are in the order in which they are taken; those of an
  # n-gram, and so of a word, have stayed together.
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
    some = np.flatnonzero(fitting.any(axis=1))
    if not len(some):
      break
    first = fitting[some].argmax(axis=1)
    taken[some] |= text[some] & (word[some] == word[some, first][:, None])
  nothing = ~taken.any(axis=1, keepdims=True)
  taken |= nothing & text & (place < budgets[:, None])
  chosen = np.zeros_like(taken)
  np.put_along_axis(chosen, order, taken, axis=1)
  return chosen


def _number(begins: Flags) -> Numbers:
  """Counts the begins before each token; the first begins with number 0."""
  return np.maximum(np.cumsum(begins, axis=1) - 1, 0)
