"""Texts as they are asked: read, checked, tokenised, padded.

An item is a text, a pair of texts, or a mapping with 'text' and optionally
'pair' and 'source'; texts may be UTF-8 bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from dataset_lib.tokenizer import Tokenizer
from serve_lib.chain import InputError

KEYS = ('text', 'pair', 'source')


class TextItem(NamedTuple):
  """An item as token ids.

  Attributes:
    tokens: with [CLS] and [SEP], int32 `[T]`.
    token_types: segment of each token, int32 `[T]`.
    source: who asks; '' if not said.
    truncated: whether the text was longer than the model takes.
  """

  tokens: Any
  token_types: Any
  source: str
  truncated: bool


class TextReader:
  """Turns items into token ids; threads may share it.

  Args:
    tokenizer: of the model.
    max_length: in tokens; longer texts are truncated.
    max_characters: of one text; a longer one is an error and not truncated.
    num_texts: texts that the task has, 1 or 2; None takes both.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    max_length: int,
    max_characters: int,
    num_texts: int | None = None,
  ):
    self._tokenizer = tokenizer
    self._max_length, self._max_characters = max_length, max_characters
    self._num_texts = num_texts

  def read(self, item: Any) -> TextItem:
    """Reads an item.

    Raises:
      InputError: it is no text, not UTF-8, empty, or too long, or one text
        where the task has two.
    """
    fields = item_fields(item)
    text = self._text(fields['text'], 'text')
    pair = fields.get('pair')
    self._check_number(pair)
    pairs = None if pair is None else [self._text(pair, 'pair')]
    tokens, types, truncated = self._tokens(text, pairs)
    return TextItem(tokens, types, fields.get('source', ''), truncated)

  def _check_number(self, pair: Any) -> None:
    if self._num_texts == 2 and pair is None:
      raise InputError(
        'pair: expected a second text, got none; the model was trained on '
        "pairs: {'text': ..., 'pair': ...}"
      )
    if self._num_texts == 1 and pair is not None:
      raise InputError(
        'pair: expected none, got a second text; the model was trained on '
        'single texts'
      )

  def _text(self, value: Any, key: str) -> str:
    if isinstance(value, bytes):
      try:
        value = value.decode('utf-8')
      except UnicodeDecodeError as error:
        raise InputError(f'{key}: expected UTF-8, got {error}') from error
    if not isinstance(value, str):
      raise InputError(f'{key}: expected a text, got {type(value).__name__}')
    if len(value) > self._max_characters:
      raise InputError(
        f'{key}: expected at most {self._max_characters} characters, '
        f'got {len(value)}'
      )
    return value

  def _tokens(
    self, text: str, pairs: list[str] | None
  ) -> tuple[Any, Any, bool]:
    # One more than fits, to see whether anything was cut off.
    try:
      encoded = self._tokenizer.encode([text], pairs, self._max_length + 1)
      truncated = len(encoded.tokens) > self._max_length
      if truncated:
        encoded = self._tokenizer.encode([text], pairs, self._max_length)
    except ValueError as error:
      raise InputError(f'text: {error}') from error
    _check_readable(encoded.tokens, pairs is not None)
    return encoded.tokens, encoded.token_types, truncated


def padded(
  rows: Sequence[Mapping[str, Any]], length: int, size: int, pad_id: int
) -> dict[str, Int[np.ndarray, '...']]:
  """Rows of tokens as one batch; padding rows have one token.

  Args:
    rows: `'tokens'` and `'token_types'`, 1-D, at most `length` long.
    length: of the bucket.
    size: rows of the batch.
    pad_id: token id of padding.

  Returns:
    {'tokens': int32 [size, length], 'token_types': the same, 'length': int32
    [size]}.
  """
  tokens = np.full((size, length), pad_id, np.int32)
  types = np.zeros((size, length), np.int32)
  lengths = np.ones(size, np.int32)
  for index, row in enumerate(rows):
    count = len(row['tokens'])
    tokens[index, :count] = row['tokens']
    types[index, :count] = row['token_types']
    lengths[index] = count
  return {'tokens': tokens, 'token_types': types, 'length': lengths}


def _check_readable(tokens: Int[np.ndarray, ' T'], has_pair: bool) -> None:
  """Raises InputError if a text has no tokens: [CLS] a [SEP] b [SEP]."""
  # Text is data: a "[SEP]" that somebody typed does not get the id of one.
  first = int((tokens == tokens[-1]).argmax())
  for key, empty in (
    ('text', first == 1),
    ('pair', has_pair and first == len(tokens) - 2),
  ):
    if empty:
      raise InputError(f'{key}: expected at least one readable token, got none')


def item_fields(item: Any) -> dict[str, Any]:
  """An item as a mapping with 'text' and optionally 'pair' and 'source'.

  An item that is an `InputError` is one that could not even be read.

  Raises:
    InputError: it is none of the forms that an item may have.
  """
  if isinstance(item, InputError):
    raise item
  if isinstance(item, (str, bytes)):
    return {'text': item}
  if isinstance(item, (tuple, list)) and len(item) == 2:
    return {'text': item[0], 'pair': item[1]}
  if not isinstance(item, Mapping) or 'text' not in item:
    raise InputError(
      "item: expected a text, a pair of texts, or a mapping with 'text' and "
      f"optionally 'pair' and 'source', got {type(item).__name__}"
    )
  unknown = sorted(str(key) for key in item if key not in KEYS)
  if unknown:
    raise InputError(f'item: expected the keys {KEYS}, got also {unknown}')
  source = item.get('source', '')
  if not isinstance(source, str):
    raise InputError(f'source: expected a name, got {type(source).__name__}')
  return dict(item)
