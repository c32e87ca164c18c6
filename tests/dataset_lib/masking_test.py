"""What is masked: by hand, as properties, and its statistics."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_lib import pretraining
from dataset_lib.pretraining import KEPT, MASKED, REPLACED, Rows

SIZE, MASK = 1000, 4
ORDINARY = np.arange(5, SIZE, dtype=np.int32)


def rows_of(words):
  """Rows [CLS] a [SEP] b [SEP]: `words` are lengths, by row and segment."""
  size = max(sum(map(sum, row)) for row in words) + 3
  shape = len(words), size
  tokens = np.zeros(shape, np.int32)
  text, begins, segment = (np.zeros(shape, bool) for _ in range(3))
  rng = np.random.default_rng(1)
  for row, parts in enumerate(words):
    place = 0
    tokens[row, 0] = 2
    for lengths in parts:
      place += 1
      segment[row, place] = True
      for length in lengths:
        begins[row, place] = True
        text[row, place : place + length] = True
        place += length
      tokens[row, place] = 3
  tokens[text] = rng.integers(5, SIZE, text.sum())
  return Rows(tokens, text, begins, segment)


def draws_of(shape, slots, seed=0):
  rng = np.random.default_rng(seed)
  sizes = [shape, shape, (shape[0], slots), (shape[0], slots)]
  return [rng.random(size) for size in sizes]


def masked(words, share=0.2, max_ngram=3, seed=0):
  rows = rows_of(words)
  lengths = np.array([sum(map(sum, row)) + 3 for row in words], np.int32)
  slots = math.ceil(share * rows.tokens.shape[1])
  budgets = np.maximum(1, np.round(share * lengths).astype(int))
  draws = draws_of(rows.tokens.shape, slots, seed)
  return rows, budgets, pretraining.mask(
    rows, budgets, max_ngram, MASK, ORDINARY, np.concatenate(draws, axis=1)
  )  # fmt: skip


def test_whole_words_that_fit_by_hand():
  rows = rows_of([[[2, 3, 1], [1, 1]]])
  ngrams = pretraining.cut_into_ngrams(rows, 1, np.zeros((1, 11)))

  def choose(budget, *order):
    """Places of the words taken in this order, of tokens 1-2, 3-5, 6, 8, 9."""
    keys = np.ones((1, 11))
    keys[0, : len(order)] = np.argsort(order) / 10
    chosen = pretraining.choose(rows, ngrams, np.array([budget]), keys)
    return np.flatnonzero(chosen).tolist()

  assert choose(3, 1, 0, 2, 3, 4) == [3, 4, 5]
  assert choose(5, 1, 0, 2, 3, 4) == [1, 2, 3, 4, 5]
  # The second word does not fit, two later ones do.
  assert choose(4, 0, 1, 2, 3, 4) == [1, 2, 6, 8]
  assert choose(1, 0, 1, 4, 3, 2) == [9]
  assert choose(9, 0, 1, 4, 3, 2) == [1, 2, 3, 4, 5, 6, 8, 9]


def test_a_part_of_a_word_where_no_word_fits():
  _, budgets, got = masked([[[9], [8]]] * 50, share=0.1)
  assert budgets.tolist() == [2] * 50
  assert got['mlm_weights'].sum(axis=1).tolist() == [2.0] * 50


word_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(
  st.lists(st.tuples(word_lengths, word_lengths), min_size=1, max_size=4),
  st.sampled_from([0.05, 0.2, 0.6]),
  st.integers(1, 4),
  st.integers(0, 1000),
)
def test_unmasking_gives_the_tokens(words, share, max_ngram, seed):
  rows, budgets, got = masked(words, share, max_ngram, seed)
  back = got['tokens'].copy()
  for row, budget in enumerate(budgets):
    used = got['mlm_weights'][row] == 1
    places = got['mlm_positions'][row][used]
    assert (np.diff(places) > 0).all()
    assert rows.is_text[row, places].all()
    text = rows.is_text[row].sum()
    assert 1 <= len(places) <= min(budget, text)
    for name in ('mlm_positions', 'mlm_labels', 'mlm_kind', 'mlm_weights'):
      assert not got[name][row][~used].any()
      assert not used[len(places) :].any()
    shown, labels = back[row, places], got['mlm_labels'][row][used]
    kinds = got['mlm_kind'][row][used]
    assert (shown[kinds == MASKED] == MASK).all()
    assert (shown[kinds == REPLACED] >= 5).all()
    assert (shown == labels)[kinds == KEPT].all()
    back[row, places] = labels
  np.testing.assert_array_equal(back, rows.tokens)


def test_tokens_and_kinds_are_drawn_with_their_shares():
  rows, budgets, got = masked([[[1] * 40, [1] * 40]] * 4000)
  used = got['mlm_weights'] == 1
  row, place = np.nonzero(used)[0], got['mlm_positions'][used]
  counts = np.bincount(place, minlength=rows.tokens.shape[1])[rows.is_text[0]]
  expected = budgets.sum() / len(counts)
  # 4.5 standard deviations of independent choices of 21 % of the tokens.
  assert abs(counts - expected).max() < 4.5 * np.sqrt(0.79 * expected)
  kinds = got['mlm_kind'][used]
  for kind, share in enumerate((0.8, 0.1, 0.1)):
    spread = np.sqrt(len(kinds) * share * (1 - share))
    assert abs((kinds == kind).sum() - len(kinds) * share) < 4 * spread
  # Random tokens are uniform over the ordinary ones.
  random = got['tokens'][row, place][kinds == REPLACED]
  assert 5 <= random.min() <= random.max() < SIZE
  spread = (SIZE - 5) / np.sqrt(12 * len(random))
  assert abs(random.mean() - (5 + SIZE - 1) / 2) < 4 * spread


@pytest.mark.parametrize('max_ngram', [1, 3, 5])
def test_the_lengths_of_chosen_ngrams(max_ngram):
  # One segment of many words: few n-grams are shortened by an end.
  rows = rows_of([[[1] * 600, [1]]] * 300)
  draws = draws_of(rows.tokens.shape, 1, seed=4)
  ngrams = pretraining.cut_into_ngrams(rows, max_ngram, draws[0])
  chosen = pretraining.choose(rows, ngrams, np.full(300, 120), draws[1])
  assert chosen.sum(axis=1).tolist() == [120] * 300
  sizes = np.concatenate(
    [np.bincount(ngrams[row][chosen[row]]) for row in range(300)]
  )
  counts = np.bincount(sizes[sizes > 0], minlength=max_ngram + 1)[1:]
  weights = 1 / np.arange(1, max_ngram + 1)
  # The last n-gram of a row may be shortened: 1 of about 120 / mean length.
  slack = 300 / counts.sum() + 4 * np.sqrt(0.25 / counts.sum())
  shares = counts / counts.sum()
  np.testing.assert_allclose(shares, weights / weights.sum(), atol=slack)


def test_ngrams_do_not_reach_over_the_border_of_segments():
  rows = rows_of([[[1] * 20, [1] * 20]] * 100)
  draws = draws_of(rows.tokens.shape, 1, seed=5)
  numbers = pretraining.cut_into_ngrams(rows, 3, draws[0])
  assert (numbers[:, 20] != numbers[:, 22]).all()
  assert (np.diff(numbers, axis=1) >= 0).all()
