"""Readers of items with one fixed size: images, and rows of token ids.

A reader turns one item into arrays (`read`) and arrays into a batch (`pad`);
`serve_lib.text_items` has the one of texts.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from dataset_lib.errors import BadRecord
from serve_lib.chain import Encoded, InputError

MAX_FILE = 2**28  # bytes of an image file


def stacked(
  rows: Sequence[Mapping[str, Any]], size: int, example: Mapping[str, Any]
) -> dict[str, np.ndarray]:
  """Stacks rows of equal shapes to a batch; padding repeats the first row.

  A row of zeros could read a longer tape than all others, and a batch ends
  with its slowest row.

  Args:
    rows: arrays by name.
    size: rows of the batch.
    example: one row of zeros, the padding of an empty batch.
  """
  padded = [*rows, *([rows[0] if rows else example] * (size - len(rows)))]
  return {name: np.stack([row[name] for row in padded]) for name in example}


class ImageReader:
  """Reads images as in evaluation: resized, cropped, uint8.

  An item is the path of an image file, the bytes of one, a uint8 array
  `[Y, X, 1 or 3]`, or a mapping `{'image': one of these}`.

  Args:
    shape: of the model's input, `(Y, X, 3)`.
    prepare: frames bytes or pixels as the evaluation does.
    length: of every row, one of the engine's length buckets.
  """

  def __init__(
    self,
    shape: Sequence[int],
    prepare: Callable[[Any], UInt8[np.ndarray, 'Y X 3']],
    length: int = 1,
  ):
    self._prepare, self._length = prepare, length
    self._example = {'image': np.zeros(tuple(shape), np.uint8)}

  def read(self, item: Any, variant: str) -> Encoded:
    """Reads and frames an image.

    Raises:
      InputError: the item is no image, or its file cannot be read.
    """
    value = field_of(item, 'image')
    if isinstance(value, (str, os.PathLike)):
      value = _file(value)
    if not isinstance(value, (bytes, np.ndarray)):
      raise InputError(
        'image: expected a path, the bytes of a file or an array, got '
        f'{type(value).__name__}'
      )
    try:
      image = self._prepare(value)
    except BadRecord as error:
      raise InputError(f'image: {error.kind}: {error.message}') from error
    return Encoded({'image': image}, self._length, variant, {})

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> dict[str, np.ndarray]:
    """Returns a batch; see `stacked`."""
    return stacked(rows, size, self._example)


class TokenReader:
  """Reads rows of token ids of one length.

  An item is a list or an array of ids, or a mapping `{'tokens': ids}`.

  Args:
    count: ids in a row.
    vocab_size: ids are in [0, vocab_size).
    length: of every row, one of the engine's length buckets.
  """

  def __init__(self, count: int, vocab_size: int, length: int = 1):
    self._count, self._vocab_size, self._length = count, vocab_size, length
    self._example = {'tokens': np.zeros(count, np.int32)}

  def read(self, item: Any, variant: str) -> Encoded:
    """Checks the ids.

    Raises:
      InputError: the item is not a row of legal ids.
    """
    tokens = token_ids(field_of(item, 'tokens'), self._vocab_size)
    if len(tokens) != self._count:
      raise InputError(
        f'tokens: expected {self._count} token ids, got {len(tokens)}'
      )
    return Encoded({'tokens': tokens}, self._length, variant, {})

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> dict[str, np.ndarray]:
    """Returns a batch; see `stacked`."""
    return stacked(rows, size, self._example)


def field_of(item: Any, name: str) -> Any:
  """Returns the value of an item given as it is or as `{name: value}`.

  An item that is an `InputError` stands for one that could not be read.

  Raises:
    InputError: the item is a mapping with other keys.
  """
  if isinstance(item, InputError):
    raise item
  if not isinstance(item, Mapping):
    return item
  if set(item) != {name}:
    keys = ', '.join(sorted(map(str, item)))
    raise InputError(f'item: expected the key {name!r} alone, got {keys}')
  return item[name]


def token_ids(value: Any, vocab_size: int) -> Int[np.ndarray, ' T']:
  """Checks a row of token ids; returns it as int32.

  Args:
    value: a sequence or array of ids.
    vocab_size: ids are below it; 0 for any.

  Raises:
    InputError: the value is not one.
  """
  expected = f'integers in [0, {vocab_size})' if vocab_size else 'integers >= 0'
  try:
    array = np.asarray(value)
  except ValueError as error:
    raise InputError(f'tokens: expected {expected}, got {error}') from error
  if array.ndim != 1 or not array.size or array.dtype.kind not in 'iu':
    raise InputError(
      f'tokens: expected a row of {expected}, got {type(value).__name__} of '
      f'shape {array.shape} and dtype {array.dtype}'
    )
  if array.min() < 0 or (vocab_size and array.max() >= vocab_size):
    raise InputError(
      f'tokens: expected {expected}, got {array.min()} to {array.max()}'
    )
  return array.astype(np.int32)


def _file(path: str | os.PathLike[str]) -> bytes:
  try:
    if os.path.getsize(path) > MAX_FILE:
      raise InputError(f'image: expected a file of at most {MAX_FILE} bytes')
    with open(path, 'rb') as file:
      return file.read()
  except (OSError, ValueError) as error:
    raise InputError(f'image: expected a file, got {error}') from error
