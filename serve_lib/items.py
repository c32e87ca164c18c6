"""Readers of items: texts, images, rows of token ids.

A reader turns an item into arrays, or raises InputError (`read`), and pads rows
of arrays to a batch (`pad`). An `InputError` passed as an item is raised.
"""

import abc
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Interval
from jaxtyping import Int

from core import fields, files, registry
from core.errors import BadRecord
from dataset_lib.source import pad_rows
from dataset_lib.tokenizer import Tokenizer
from serve_lib.chain import Encoded, InputError, kind_of

# By the number of texts that the model was trained on.
_WRONG = {
  1: 'none, got a second text; the model was trained on single texts',
  2: 'a second text, got none; the model was trained on pairs: '
  "{'text': ..., 'pair': ...}",
}
PIXELS = 64  # decoded in the time in which a character is tokenized
_TEXT_KEYS = ('text', 'pair', 'source')
_TOKEN_KEYS = ('tokens', 'token_types', 'source')

Count = Annotated[int, Interval(ge=0, le=2**31 - 1)]
Size = Annotated[int, Interval(ge=1, le=2**31 - 1)]
Pixels = Annotated[int, Interval(ge=1, le=8192)]


class Reader(abc.ABC):
  """Base of readers: dataclasses whose fields a bundle stores as JSON.

  A reader of a family is stored by its 'module:Class', and an open field by the
  class and the fields of its value.
  """

  KIND: ClassVar[str] = ''  # a name of `KINDS`
  WORK: ClassVar[int] = 0  # of reading an item over its length, in characters

  @abc.abstractmethod
  def read(self, item: Any, variant: str) -> Encoded:
    """Reads an item; raises InputError."""

  @property
  def recipe(self) -> dict[str, Any]:
    """All fields but the tokenizer, and the kind, from which it is built."""
    kind: Any = type(self)
    hints, stored = fields.hints(kind), {}
    for name in {field.name for field in dataclasses.fields(kind)}:
      value = getattr(self, name)
      is_open = fields.is_open(hints[name])
      stored[name] = registry.described(value) if is_open else value
    stored.pop('tokenizer', None)
    return stored | {'kind': self.KIND or registry.name_of(kind)}


@dataclasses.dataclass(frozen=True)
class ItemReader(Reader):
  """Reads `value` or `{NAME: value}` to one array."""

  NAME: ClassVar[str]
  length: Size  # the length bucket of all rows

  @abc.abstractmethod
  def convert(self, value: Any) -> np.ndarray:
    """Returns the array of a value; raises InputError."""

  @property
  @abc.abstractmethod
  def example(self) -> np.ndarray:
    """An array of zeros."""

  def read(self, item: Any, variant: str) -> Encoded:
    """Reads an item."""
    if isinstance(item, InputError):
      raise item
    if isinstance(item, Mapping):
      if set(item) != {self.NAME}:
        keys = ', '.join(sorted(map(str, item)))
        message = f'item: expected only the key {self.NAME!r}, got {keys}'
        raise InputError(message)
      item = item[self.NAME]
    inputs = {self.NAME: self.convert(item)}
    return Encoded(inputs, self.length, variant, {})

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> dict[str, np.ndarray]:
    """Stacks rows; padding repeats the first, as zeros might run longer."""
    arrays = [row[self.NAME] for row in rows] or [self.example]
    arrays += arrays[:1] * (size - len(arrays))
    return {self.NAME: np.stack(arrays)}


@dataclasses.dataclass(frozen=True)
class ImageReader(ItemReader):
  """Reads images: paths, bytes of files, or uint8 `[Y, X, 1|3]`.

  They are resized and cropped; see `dataset_lib.image_ops.ImageOptions`.
  """

  KIND, NAME = 'images', 'image'
  image_size: Pixels
  resize_small: Pixels
  max_pixels: Size = files.MAX_PIXELS

  def __post_init__(self):
    from dataset_lib import image_ops  # OpenCV, which texts do not need

    sizes: Any = {k: v for k, v in vars(self).items() if k != 'length'}
    prepare = image_ops.Preparation(**sizes).transform
    object.__setattr__(self, '_prepare', prepare)

  def convert(self, value: Any) -> np.ndarray:
    """Returns uint8 `[image_size, image_size, 3]`; see `ItemReader`."""
    try:
      if isinstance(value, (str, os.PathLike)):
        value = files.read_record(value)
      if not isinstance(value, (bytes, np.ndarray)):
        raise ValueError(type(value).__name__)
      return vars(self)['_prepare'](value)
    except BadRecord as error:
      raise InputError(f'image: {error.kind}: {error.message}') from error
    except (OSError, ValueError) as error:
      legal = 'the path of a file, its bytes or an array'
      raise InputError(f'image: expected {legal}, got {error}') from error

  @property
  def example(self) -> np.ndarray:
    """A black image."""
    return np.zeros((self.image_size, self.image_size, 3), np.uint8)


@dataclasses.dataclass(frozen=True)
class TokenReader(ItemReader):
  """Reads rows of `count` token ids in [0, vocab_size)."""

  KIND, NAME = 'tokens', 'tokens'
  count: Size
  vocab_size: Count

  def convert(self, value: Any) -> np.ndarray:
    """Returns int32 `[count]`; see `ItemReader`."""
    tokens = _token_ids('tokens', value, self.vocab_size)
    if len(tokens) != self.count:
      raise InputError(f'tokens: expected {self.count} ids, got {len(tokens)}')
    return tokens

  @property
  def example(self) -> np.ndarray:
    """A row of zeros."""
    return np.zeros(self.count, np.int32)


def pixels(item: Any) -> int:
  """Returns the pixels to decode of an image; 0 for any other item."""
  data = item.get('image') if isinstance(item, Mapping) else None
  if not isinstance(data, bytes):
    return 0
  from dataset_lib import image_header

  try:
    return image_header.count_pixels(data)
  except BadRecord:  # which `read` reports
    return 0


def work(item: Any, pixels: int) -> int:
  """Returns the work of reading an item of `pixels` pixels, in characters."""
  values = item.values() if isinstance(item, Mapping) else ()
  texts = (len(one) for one in values if isinstance(one, (str, list)))
  return pixels // PIXELS + sum(texts)


def _token_ids(name: str, value: Any, vocab_size: int) -> Int[np.ndarray, ' T']:
  """Returns ids below `vocab_size`, 0 for any, as int32; `name` for errors."""
  limit = vocab_size or 2**31
  try:
    # Before NumPy, which pads texts to the longest and takes True for 1.
    for kind in {*map(type, value)} if isinstance(value, (list, tuple)) else ():
      if kind is bool or not issubclass(kind, (int, np.integer)):
        raise ValueError(f'values of type {kind_of(kind)}')
    array = np.asarray(value)
    if array.ndim != 1 or not array.size or array.dtype.kind not in 'iu':
      raise ValueError(f'shape {array.shape} and dtype {array.dtype}')
    if array.min() < 0 or array.max() >= limit:
      raise ValueError(f'{array.min()} to {array.max()}')
  except (ValueError, OverflowError) as error:
    expected = f'{name}: expected a row of integers in [0, {limit})'
    raise InputError(f'{expected}, got {error}') from error
  return array.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class TextOptions:
  """Options of serving any model of texts."""

  # Limit per text; longer texts are rejected, not truncated.
  max_characters: Annotated[int, Interval(ge=1, le=2**31 - 1)] = 100_000


@dataclasses.dataclass(frozen=True)
class TextReader(Reader):
  """Turns texts into token ids; thread-safe.

  An item is a text, a pair of texts, or a mapping with 'text' or 'tokens', and
  optionally 'pair' or 'token_types', and 'source'; texts may be UTF-8 bytes.
  """

  KIND = 'texts'
  tokenizer: Tokenizer | None  # None if only token ids are served
  max_length: Size  # in tokens; longer texts are truncated
  max_characters: Size = TextOptions.max_characters
  num_texts: Literal[1, 2] | None = None  # of the task; None takes both
  vocab_size: Count = 0  # for items of token ids; 0 to check nothing
  padding_tokens: Count = 1  # of rows of padding
  num_types: Size = 2  # token types that the model has

  @property
  def pad_id(self) -> int:
    """Token id of padding."""
    return 0 if self.tokenizer is None else self.tokenizer.pad_id

  def read(self, item: Any, variant: str) -> Encoded:
    """Reads an item; the context has 'source' and 'truncated'."""
    fields, limit = _item_fields(item), self.max_length
    if 'tokens' in fields:
      tokens, types = self._given(fields)
    else:
      texts = self._texts(fields)
      if self.tokenizer:
        shorten = self.tokenizer.shortened
        texts = {key: shorten(one, limit + 1) for key, one in texts.items()}
      tokens, types = self._encode(texts, limit + 1)
      if len(tokens) > limit:  # encode again, so that [SEP] is last
        tokens[:limit], types[:limit] = self._encode(texts, limit)
    inputs = {'tokens': tokens[:limit], 'token_types': types[:limit]}
    truncated, source = len(tokens) > limit, fields.get('source', '')
    context = {'source': source, 'truncated': truncated}
    return Encoded(inputs, min(len(tokens), limit), variant, context)

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> dict[str, Int[np.ndarray, '...']]:
    """Pads 'tokens', 'token_types' to `[size, length]`; 'length' `[size]`."""
    lengths = np.full(size, self.padding_tokens, np.int32)
    lengths[: len(rows)] = [len(row['tokens']) for row in rows]
    batch = {
      name: pad_rows([row[name] for row in rows], (size, length), fill)
      for name, fill in (('tokens', self.pad_id), ('token_types', 0))
    }
    return batch | {'length': lengths}

  def _texts(self, fields: Mapping[str, Any]) -> dict[str, str]:
    keys = ('text',) if fields.get('pair') is None else ('text', 'pair')
    texts = {key: fields[key] for key in keys}
    for key, value in texts.items():
      if not isinstance(value, (str, bytes)):
        raise InputError(f'{key}: expected a text, got {kind_of(type(value))}')
      try:
        texts[key] = value.decode() if isinstance(value, bytes) else value
        texts[key].encode()  # JSON may have a lone surrogate
      except UnicodeError as error:
        raise InputError(f'{key}: expected UTF-8, got {error}') from error
      if len(texts[key]) > self.max_characters:
        expected = f'at most {self.max_characters} characters'
        raise InputError(f'{key}: expected {expected}, got {len(texts[key])}')
    if self.num_texts not in (None, len(texts)):
      raise InputError(f'pair: expected {_WRONG[self.num_texts]}')
    return texts

  def _encode(self, texts: Mapping[str, str], limit: int) -> Any:
    if self.tokenizer is None:
      legal = "token ids, {'tokens': [...]}, as the model has no tokenizer"
      raise InputError(f'item: expected {legal}, got a text')
    pairs = [texts['pair']] if 'pair' in texts else None
    try:
      encoded = self.tokenizer.encode([texts['text']], pairs, limit)
    except ValueError as error:
      raise InputError(f'text: {error}') from error
    # Positions of [SEP] in [CLS] a [SEP] b [SEP]; RoBERTa has two in the
    # middle. No text encodes to [SEP].
    ends = np.flatnonzero(encoded.tokens == encoded.tokens[-1])
    lengths = np.diff(ends, prepend=0)[:: max(len(ends) - 1, 1)]
    for key, length in zip(texts, lengths, strict=False):
      if length == 1:
        raise InputError(f'{key}: expected at least one readable token')
    return encoded.tokens, encoded.token_types

  def _given(self, fields: Mapping[str, Any]) -> Any:
    tokens = _token_ids('tokens', fields['tokens'], self.vocab_size)
    types = fields.get('token_types', 0 * tokens)
    types = _token_ids('token_types', types, self.num_types)
    if len(types) != len(tokens):
      counts = f'expected {len(tokens)}, got {len(types)}'
      raise InputError(f'token_types: {counts}')
    return tokens, types


TOKEN_IDS = TextReader(None, 512)  # of rows of token ids
KINDS: Mapping[str, Any] = {
  kind.KIND: kind for kind in (ImageReader, TextReader, TokenReader)
}


def reader_class(name: Any, field: str) -> type[Reader]:
  """Returns the class of a name of `KINDS`, or of 'module:Class'."""
  if isinstance(name, str) and name in KINDS:
    return KINDS[name]
  legal = "'module:Class' of a Reader of an installed package"
  expected = f'one of {", ".join(KINDS)}, or {legal}'
  return registry.locate(name, field, Reader, expected)


def _item_fields(item: Any) -> dict[str, Any]:
  """Returns an item as a mapping with legal keys."""
  if isinstance(item, InputError):
    raise item
  if isinstance(item, (str, bytes)):
    return {'text': item}
  if isinstance(item, (tuple, list)) and len(item) == 2:
    return {'text': item[0], 'pair': item[1]}
  if not isinstance(item, Mapping) or not {'text', 'tokens'} & set(item):
    got = kind_of(type(item))
    if isinstance(item, Mapping):
      got = f'the keys {", ".join(sorted(map(str, item)))}'
    raise InputError(
      "item: expected a text, a pair of texts, or a mapping with 'text' and "
      f"optionally 'pair' and 'source', got {got}"
    )
  legal = _TEXT_KEYS if 'text' in item else _TOKEN_KEYS
  unknown = sorted(str(key) for key in item if key not in legal)
  if unknown:
    expected = f'item: expected the keys {", ".join(legal)}'
    raise InputError(f'{expected}, got also {", ".join(unknown)}')
  source = item.get('source', '')
  if not isinstance(source, str):
    raise InputError(f'source: expected a name, got {kind_of(type(source))}')
  return dict(item)
