"""Readers of texts: checks, tokenises and pads them.

An item is a text, a pair of texts, or a mapping with 'text' and optionally
'pair' and 'source'; texts may be UTF-8 bytes. A mapping with 'tokens' and
optionally 'token_types' and 'source' is a text that is tokenised already.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from dataset_lib.tokenizer import Tokenizer
from serve_lib.chain import Encoded, InputError
from serve_lib.image_items import token_ids

KEYS = ('text', 'pair', 'source')
TOKEN_KEYS = ('tokens', 'token_types', 'source')


class TextReader:
  """Turns items into token ids; thread-safe.

  Args:
    tokenizer: of the model; None for a model that is served token ids only.
    max_length: in tokens; longer texts are truncated.
    max_characters: of one text; a longer one is an error and not truncated.
    num_texts: texts that the task has, 1 or 2; None takes both.
    vocab_size: of the model, for items of token ids; 0 to check nothing.
  """

  def __init__(
    self,
    tokenizer: Tokenizer | None,
    max_length: int,
    max_characters: int = 100_000,
    num_texts: int | None = None,
    vocab_size: int = 0,
  ):
    self.tokenizer = tokenizer
    self.pad_id = 0 if tokenizer is None else tokenizer.pad_id
    self._max_length, self._max_characters = max_length, max_characters
    self._num_texts, self._vocab_size = num_texts, vocab_size

  def read(self, item: Any, variant: str) -> Encoded:
    """Reads an item; the context has 'source' and 'truncated'.

    Raises:
      InputError: the item is no text, not UTF-8, empty, or too long, or one
        text where the task has two.
    """
    fields = item_fields(item)
    if 'tokens' in fields:
      tokens, types, truncated = self._given_tokens(fields)
    else:
      text = self._text(fields['text'], 'text')
      pair = fields.get('pair')
      self._check_number(pair is not None)
      pairs = None if pair is None else [self._text(pair, 'pair')]
      tokens, types, truncated = self._tokens(text, pairs)
    return Encoded(
      inputs={'tokens': tokens, 'token_types': types},
      length=len(tokens),
      variant=variant,
      context={'source': fields.get('source', ''), 'truncated': truncated},
    )

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> dict[str, Int[np.ndarray, '...']]:
    """Returns a batch; see `padded`."""
    return padded(rows, length, size, self.pad_id)

  def _check_number(self, has_pair: bool) -> None:
    if self._num_texts == 2 and not has_pair:
      raise InputError(
        'pair: expected a second text, got none; the model was trained on '
        "pairs: {'text': ..., 'pair': ...}"
      )
    if self._num_texts == 1 and has_pair:
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
    if self.tokenizer is None:
      raise InputError(
        "item: expected token ids, {'tokens': [...]}, got a text; the model "
        'has no tokenizer'
      )
    # One token more than the limit shows whether the text was cut off.
    try:
      encoded = self.tokenizer.encode([text], pairs, self._max_length + 1)
      truncated = len(encoded.tokens) > self._max_length
      if truncated:
        encoded = self.tokenizer.encode([text], pairs, self._max_length)
    except ValueError as error:
      raise InputError(f'text: {error}') from error
    _check_readable(encoded.tokens, pairs is not None)
    return encoded.tokens, encoded.token_types, truncated

  def _given_tokens(self, fields: Mapping[str, Any]) -> tuple[Any, Any, bool]:
    tokens = token_ids(fields['tokens'], self._vocab_size)
    types = np.zeros_like(tokens)
    if 'token_types' in fields:
      types = token_ids(fields['token_types'], 0)
    if len(types) != len(tokens):
      raise InputError(
        f'token_types: expected {len(tokens)}, one for each token, got '
        f'{len(types)}'
      )
    limit = self._max_length
    return tokens[:limit], types[:limit], len(tokens) > limit


def padded(
  rows: Sequence[Mapping[str, Any]], length: int, size: int, pad_id: int
) -> dict[str, Int[np.ndarray, '...']]:
  """Pads rows of tokens to one batch; padding rows have one token.

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
  # A "[SEP]" in the text itself is tokenised as plain characters.
  first = int((tokens == tokens[-1]).argmax())
  for key, empty in (
    ('text', first == 1),
    ('pair', has_pair and first == len(tokens) - 2),
  ):
    if empty:
      raise InputError(f'{key}: expected at least one readable token, got none')


def item_fields(item: Any) -> dict[str, Any]:
  """Returns an item as a mapping with some of `KEYS` or `TOKEN_KEYS`.

  An item that is an `InputError` stands for one that could not be read.

  Raises:
    InputError: the item has none of the legal forms.
  """
  if isinstance(item, InputError):
    raise item
  if isinstance(item, (str, bytes)):
    return {'text': item}
  if isinstance(item, (tuple, list)) and len(item) == 2:
    return {'text': item[0], 'pair': item[1]}
  if not isinstance(item, Mapping) or not {'text', 'tokens'} & set(item):
    raise InputError(
      "item: expected a text, a pair of texts, or a mapping with 'text' and "
      f"optionally 'pair' and 'source', got {type(item).__name__}"
    )
  legal = KEYS if 'text' in item else TOKEN_KEYS
  unknown = sorted(str(key) for key in item if key not in legal)
  if unknown:
    raise InputError(f'item: expected the keys {legal}, got also {unknown}')
  source = item.get('source', '')
  if not isinstance(source, str):
    raise InputError(f'source: expected a name, got {type(source).__name__}')
  return dict(item)
