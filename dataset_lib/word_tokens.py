"""Which tokens a word of a sentence became.

For what is said of words (dependency labels) and measured at tokens. Words are
encoded one by one, which gives the tokens of the text that has spaces between
all words, since tokenizers of this house split at spaces first; so a word's
tokens stand together, whatever they look like.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from dataset_lib.source import Encoded
from dataset_lib.tokenizer import MIN_LENGTH, Tokenizer

_FRAME = 2  # [CLS] and [SEP]


def encode_words(
  tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], max_length: int
) -> tuple[Encoded, list[Int32[np.ndarray, '_ 2']]]:
  """Token ids of sentences given as words.

  Args:
    tokenizer: of the model.
    sentences: the words of each sentence.
    max_length: longest row with [CLS] and [SEP].

  Returns:
    The rows, each `[CLS] words [SEP]`; and for each sentence where its words
    are in its row, (first token, one behind the last). A word of which the
    tokenizer leaves nothing has as many tokens, none. Words behind the first
    one that does not fit are left out: there are then fewer places than words.

  Raises:
    ValueError: a word cannot be encoded, or max_length is too small.
  """
  if max_length < MIN_LENGTH:
    raise ValueError(
      f'max_length: expected at least {MIN_LENGTH}, got {max_length}'
    )
  # A treebank has ten times as many words as different ones.
  known = sorted({word for words in sentences for word in words})
  # One more token than fits, so that a word that was cut is seen.
  encoded = tokenizer.encode(known, None, max_length + 1)
  bounds = zip(encoded.offsets[:-1], encoded.offsets[1:], strict=True)
  tokens = {
    word: encoded.tokens[start + 1 : stop - 1]
    for word, (start, stop) in zip(known, bounds, strict=True)
  }
  first, last = tokenizer.encode([''], None, max_length).tokens.reshape(_FRAME)
  rows, places = [], []
  for words in sentences:
    row, spans = _row([tokens[word] for word in words], max_length)
    rows.append(np.concatenate([[first], row, [last]]).astype(np.int32))
    places.append(spans)
  lengths = [len(row) for row in rows]
  offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
  flat = np.concatenate([np.zeros(0, np.int32), *rows])
  return Encoded(flat, np.zeros_like(flat), offsets), places


def _row(
  pieces: Sequence[np.ndarray], max_length: int
) -> tuple[Int32[np.ndarray, ' M'], Int32[np.ndarray, 'W 2']]:
  """The tokens of the words that fit, and their places behind [CLS]."""
  ends = 1 + np.cumsum([len(piece) for piece in pieces]).astype(np.int32)
  fitting = int(np.searchsorted(ends, max_length - 1, side='right'))
  kept = pieces[:fitting]
  row = np.concatenate([np.zeros(0, np.int32), *kept]).astype(np.int32)
  stops = ends[:fitting]
  starts = stops - np.array([len(piece) for piece in kept], np.int32)
  return row, np.stack([starts, stops], axis=1).reshape(-1, 2).astype(np.int32)
