"""Which tokens begin a word."""

import numpy as np
import pytest

from dataset_lib import tokenizer, whole_words


@pytest.mark.parametrize(
  ('name', 'begins'),
  [
    ('▁play', True), ('▁', True), ('ing', False), ('84', False), ('s', False),
    ('é', False), ('мир', False), (',', True), ('."', True), ("'", True),
    ('▁9,', True), ('北', True), ('東京', True), ('の', True), ('ไทย', True),
    ('##ing', False), ('“', True),
  ],
)  # fmt: skip
def test_pieces_of_sentencepiece(name, begins):
  assert whole_words.begins_word(name, is_word_piece=False) == begins


@pytest.mark.parametrize(
  ('name', 'begins'),
  [('play', True), ('##ing', False), (',', True), ('▁', True), ('#', True)],
)
def test_pieces_of_wordpiece(name, begins):
  assert whole_words.begins_word(name, is_word_piece=True) == begins


def test_the_table_of_a_tokenizer(tmp_path):
  names = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', '##b', '.', '##c']
  (tmp_path / 'vocab.txt').write_text('\n'.join(names))
  given = tokenizer.load(tmp_path)
  expected = [not name.startswith('##') for name in names]
  np.testing.assert_array_equal(given.word_starts(), expected)
  assert given.special_ids == (0, 1, 2, 3, 4)
