"""Which tokens begin a word, told by their names.

A word of WordPiece is a token and the "##" tokens behind it. A word of
SentencePiece is a token that begins with a space and those behind it with
letters or digits; as in ALBERT's data generator, punctuation begins a word of
its own, and so does text of a script that puts no spaces between words.
"""

import unicodedata

CONTINUES = '##'
SPACE = '▁'  # U+2581, SentencePiece's space before a word
_WITHOUT_SPACES = (
  'CJK',
  'HIRAGANA',
  'KATAKANA',
  'KHMER',
  'LAO',
  'MYANMAR',
  'THAI',
  'TIBETAN',
)


def begins_word(name: str, is_word_piece: bool) -> bool:
  """Whether a token begins a word.

  Args:
    name: the token's name, like '##ing' or '▁play'.
    is_word_piece: True for WordPiece, False for SentencePiece.
  """
  if is_word_piece:
    return not name.startswith(CONTINUES)
  if name.startswith(SPACE) or not any(map(str.isalnum, name)):
    return True
  return any(map(_stands_alone, name))


def _stands_alone(character: str) -> bool:
  return unicodedata.name(character, '').startswith(_WITHOUT_SPACES)
