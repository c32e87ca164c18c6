"""Cuts documents into rows: whole sentences, as many as fit.

A row is a stretch of one document and becomes two segments. Rows follow each
other without a gap, so that every token of a document is in exactly one row:

- A row takes whole sentences as long as they fit.
- Where only one whole sentence fits, the row is filled with the beginning of
  the next, cut at a word, so that there is a sentence border to split it at;
  the rest of that sentence begins the next row.
- A sentence that is longer than a row is cut at words. Such a row, and the row
  of a document of one sentence, has no sentence border inside; it is split at
  a word (and where one word fills it, inside of the word).
- A single token cannot be two segments. Where one would be left at the end of a
  document, the row before ends earlier. A document of one token is left out,
  and counted.
"""

import bisect
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

MIN_ROW = 2  # tokens: one in each segment


def pack(
  sentence_lengths: Int[np.ndarray, ' S'],
  begins_word: Bool[np.ndarray, ' M'],
  limit: int,
) -> list[int]:
  """Where the rows of a stretch of a document end.

  Args:
    sentence_lengths: tokens of each sentence, at least 1.
    begins_word: of each token.
    limit: tokens that a row may have, at least `MIN_ROW`.

  Returns:
    The end of each row, ascending; a row begins where the one before ends. The
    last end is the number of tokens. [] where there is at most one token, and
    where `limit` is 2 a single token may be left.
  """
  ends = np.cumsum(sentence_lengths).tolist()
  words = np.flatnonzero(begins_word).tolist()
  total = len(begins_word)
  rows: list[int] = []
  start = 0
  while total - start >= MIN_ROW:
    end = _row_end(ends, words, start, min(start + limit, total))
    if end == total - 1 and end - start > MIN_ROW:
      end = _row_end(ends, words, start, total - MIN_ROW)
    rows.append(end)
    start = end
  return rows


def _row_end(
  ends: Sequence[int], words: Sequence[int], start: int, furthest: int
) -> int:
  """The end of the row that begins at `start`.

  Args:
    ends: where sentences end.
    words: where words begin.
    start: where the row begins.
    furthest: where it ends at the latest.
  """
  first = bisect.bisect_right(ends, start)
  behind = bisect.bisect_right(ends, furthest)
  whole_sentences = behind - first
  if whole_sentences >= 2 or furthest == ends[-1]:
    return furthest if furthest == ends[-1] else ends[behind - 1]
  cut = words[bisect.bisect_right(words, furthest) - 1]
  # No word may begin there; and two tokens are the least.
  return cut if cut >= start + MIN_ROW else furthest
