"""Sentences by hand, and that no character is lost."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset_lib import sentences


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
def test_by_hand(marked):
  parts = [part.strip() for part in marked.split('|') if part]
  text = marked.replace('| ', '').replace('|', '')
  got = sentences.split(text)
  assert [part.strip() for part in got] == parts
  assert ''.join(got) == text


@given(st.text(alphabet='aB1 .!?…"”()。I\n\u00a0', max_size=60))
def test_no_character_is_lost(text):
  got = sentences.split(text)
  assert ''.join(got) == text
  assert all(got)


@pytest.mark.parametrize(
  'unit', ['.', '. ', '"', '.”', '!? ', '。', 'a.', '. "', ' ']
)
def test_long_runs_take_linear_time(unit):
  text = unit * (200_000 // len(unit))
  start = time.process_time()
  assert ''.join(sentences.split(text)) == text
  # A quadratic search would take minutes.
  assert time.process_time() - start < 2.0
