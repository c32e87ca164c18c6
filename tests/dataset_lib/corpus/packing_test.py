"""Sentences, and rows of whole ones, by hand and as properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset_lib.corpus import packing


def pack(lengths, limit, joined=()):
  """Rows of sentences whose tokens are words, but for those in `joined`."""
  begins = np.ones(sum(lengths), bool)
  begins[list(joined)] = False
  return packing.pack(sentences_of(lengths), begins, limit)


def sentences_of(lengths):
  begins = np.zeros(sum(lengths), bool)
  begins[np.cumsum([0, *lengths], dtype=int)[:-1]] = True
  return begins


@pytest.mark.parametrize(
  ('lengths', 'joined', 'expected'),
  [
    # Whole sentences as long as they fit.
    ([3, 4, 3, 5, 5], [], [10, 20]), ([3, 4, 4, 5], [], [7, 16]),
    # One fits: the row takes the beginning of the next one.
    ([8, 9], [], [10, 17]),
    # It is cut at a word: tokens 9 and 10 go on with the word of token 8.
    ([8, 9], [9, 10], [8, 17]),
    # The rest of a sentence that was cut is a sentence.
    ([8, 4, 5, 4], [], [10, 17, 21]),
    # A long sentence is cut at words, or without any inside of one.
    ([25], [], [10, 20, 25]), ([25], [10, 20], [9, 19, 25]),
    ([25], range(1, 25), [10, 20, 25]),
    # No single token is left at the end.
    ([10, 1], [], [9, 11]), ([5, 5, 1], [], [9, 11]), ([21], [], [10, 19, 21]),
    ([21], [18, 19, 20], [10, 17, 21]), ([1], [], []), ([], [], []),
    ([2], [], [2]), ([1, 1], [], [2]),
  ],
)  # fmt: skip
def test_by_hand(lengths, joined, expected):
  assert pack(lengths, 10, joined) == expected


@given(
  st.lists(st.integers(1, 30), min_size=1, max_size=20),
  st.integers(3, 25),
  st.integers(0, 2**32 - 1),
)
def test_rows_fit_and_follow_each_other(lengths, limit, seed):
  total = sum(lengths)
  begins = np.random.default_rng(seed).random(total) < 0.6
  begins |= sentences_of(lengths)
  ends = packing.pack(sentences_of(lengths), begins, limit)
  sizes = np.diff(ends, prepend=0)
  assert all(2 <= size <= limit for size in sizes)
  assert (ends[-1] if ends else 0) == total - (total == 1)
  borders = {0, *np.cumsum(lengths).tolist()}
  for start, stop in zip([0, *ends], ends, strict=False):
    if stop in borders:
      continue
    inside = [b for b in borders if start < b < stop]
    # Only a row that would have at most one border cuts a sentence.
    assert len(inside) <= 1
    assert begins[stop] or not begins[start + 2 : stop + 1].any()


@pytest.mark.parametrize(
  'marked',
  [
    'It rained. | He went out.  | Why? | Who knows!',
    '“What is it?” he said. | “Go.” | She went.',
    '"Go away." | "No! | I stay," he said. | (He did.) | Then…and then… | So.',
    'Mr. Smith met Dr. J. R. Jones at No. 5, St. James. | No. | He did not.',
    'It was I. | You, e.g. Anna, i.e. Bob, live in the U.S. Army camp.',
    'Pi is 3.14 or so. | 42 is not. | Go to p. 7 now.',
    'He said ... | "Well." | - Then he left.',
    'He asked: why? and left. or so',
    '「北京。」|上海！|東京',  # noqa: RUF001
    '¿Qué? | ¡Sí! | Ärger. | Über.',
    'one.two three.Four',
    'Model 3b. | Then 4_a. | X1. | Mr. Y.',
    '',
    '   ',
  ],
)
def test_sentences_by_hand(marked):
  parts = [part.strip() for part in marked.split('|') if part]
  text = marked.replace('| ', '').replace('|', '')
  got = packing.split_sentences(text)
  assert [part.strip() for part in got] == parts
  assert ''.join(got) == text


@given(st.text(alphabet='aB1 .!?…"”()。I\n\u00a0', max_size=60))
def test_no_character_is_lost(text):
  got = packing.split_sentences(text)
  assert ''.join(got) == text
  assert all(got)


@pytest.mark.parametrize(
  'unit', ['.', '. ', '"', '.”', '!? ', '。', 'a.', '. "', ' ']
)
def test_long_runs_take_linear_time(unit):
  text = unit * (200_000 // len(unit))
  # A quadratic search would take minutes.
  assert ''.join(packing.split_sentences(text)) == text
