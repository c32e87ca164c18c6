"""Tokens as texts, and their places in lines."""

import pytest

from eval_lib import token_texts


@pytest.mark.parametrize(
  ('names', 'texts'),
  [
    (('[CLS]', 'un', '##do', '##', '#', '[SEP]'),
     ('[CLS]', 'un', '+do', '##', '#', '[SEP]')),
    (('[CLS]', '▁un', 'do', '.', '▁', '##x', '[MASK]', '[', '<', '[SEP]'),
     ('[CLS]', 'un', '+do', '+.', ' ', '+##x', '[MASK]', '+[', '+<', '[SEP]')),
    (('<unk>', '▁▁a', '<pad>', ''), ('<unk>', '▁a', '<pad>', '+')),
    ((), ()),
  ],
)  # fmt: skip
def test_pieces_of_both_tokenizers(names, texts):
  """A plus says that a token continues the one before."""
  found = token_texts.pieces(names)
  assert [('+' if glued else '') + text for text, glued in found] == [*texts]


def test_lines_break_where_the_next_token_does_not_fit():
  texts = [('abc', False), ('de', True), ('fg', False), ('hi', False),
           ('jklmnopqrst', False), ('u', True), ('v', False)]  # fmt: skip
  # abcde fg / hi / jklmnopqrst / u v
  places, lines = token_texts.layout(texts, 8)
  assert places == [(0, 0), (0, 3), (0, 6), (1, 0), (2, 0), (3, 0), (3, 2)]
  assert lines == 4
  assert token_texts.layout([], 8) == ([], 1)
