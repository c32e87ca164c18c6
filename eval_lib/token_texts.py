"""Tokens as a person reads them, and where they stand in lines of a width.

In WordPiece a token that continues a word begins with '##'; in SentencePiece
one that begins a word has a '▁'.
"""

import re
from collections.abc import Sequence

_MARK = '▁'  # SentencePiece's space
_SPECIAL = re.compile(r'\[.+\]|<.+>')


def pieces(names: Sequence[str]) -> list[tuple[str, bool]]:
  """(text, whether it continues the token before it) of each token.

  Args:
    names: of the tokens of a row, which says which tokenizer they are of.
  """
  if any(name.startswith(_MARK) for name in names):
    return [_sentencepiece(name) for name in names]
  return [_wordpiece(name) for name in names]


def _wordpiece(name: str) -> tuple[str, bool]:
  glued = name.startswith('##') and len(name) > 2
  return (name[2:] if glued else name), glued


def _sentencepiece(name: str) -> tuple[str, bool]:
  glued = not (name.startswith(_MARK) or _SPECIAL.fullmatch(name))
  return ' ' if name == _MARK else name.removeprefix(_MARK), glued


def layout(
  texts: Sequence[tuple[str, bool]], width: int
) -> tuple[list[tuple[int, int]], int]:
  """(line and column of each token, number of lines).

  Args:
    texts: of `pieces`.
    width: letters of a line; a longer token stands alone in its line.
  """
  places, line, column = [], 0, 0
  for text, glued in texts:
    if column and not glued:
      column += 1
    if column and column + len(text) > width:
      line, column = line + 1, 0
    places.append((line, column))
    column += len(text)
  return places, line + 1
