"""Items of one fixed size: images, and rows of token ids.

A reader turns one item into arrays (`read`) and rows of arrays into a batch
(`pad`); `serve_lib.text_items` has the reader of texts.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from dataset_lib.errors import BadRecord
from serve_lib.chain import Encoded, InputError

MAX_FILE = 2**28  # bytes of an image file


class ItemReader:
  """Reads items that become one array each; see `images` and `token_rows`.

  Args:
    name: of the array; an item is a value or `{name: value}`.
    convert: turns a value into an array; raises InputError.
    example: an array of zeros.
    length: of every row, one of the engine's length buckets.
  """

  def __init__(
    self,
    name: str,
    convert: Callable[[Any], np.ndarray],
    example: np.ndarray,
    length: int,
  ):
    self._name, self._convert = name, convert
    self._example, self._length = example, length

  def read(self, item: Any, variant: str) -> Encoded:
    """Reads an item; raises InputError if it is illegal."""
    if isinstance(item, InputError):  # of a line that could not be read
      raise item
    if isinstance(item, Mapping):
      if set(item) != {self._name}:
        keys = ', '.join(sorted(map(str, item)))
        raise InputError(f'item: expected the key {self._name!r}, got {keys}')
      item = item[self._name]
    array = self._convert(item)
    return Encoded({self._name: array}, self._length, variant, {})

  def pad(
    self, rows: Sequence[Mapping[str, Any]], length: int, size: int
  ) -> dict[str, np.ndarray]:
    """Stacks rows to a batch; padding repeats the first row.

    A row of zeros could read a longer tape than all others, and a batch ends
    with its slowest row.
    """
    arrays = [row[self._name] for row in rows] or [self._example]
    arrays += arrays[:1] * (size - len(arrays))
    return {self._name: np.stack(arrays)}


def images(
  shape: Sequence[int],
  prepare: Callable[[Any], UInt8[np.ndarray, 'Y X 3']],
  length: int,
) -> ItemReader:
  """Returns a reader of images: paths, bytes of files, or uint8 `[Y, X, 1|3]`.

  Args:
    shape: of the model's input, `(Y, X, 3)`.
    prepare: frames bytes or pixels as the evaluation does.
    length: of every row.
  """

  def convert(value: Any) -> np.ndarray:
    if isinstance(value, (str, os.PathLike)):
      value = _contents(value)
    if not isinstance(value, (bytes, np.ndarray)):
      raise InputError(
        'image: expected a path, the bytes of a file or an array, got '
        f'{type(value).__name__}'
      )
    try:
      return prepare(value)
    except BadRecord as error:
      raise InputError(f'image: {error.kind}: {error.message}') from error

  return ItemReader('image', convert, np.zeros(tuple(shape), np.uint8), length)


def token_rows(count: int, vocab_size: int, length: int) -> ItemReader:
  """Returns a reader of rows of `count` token ids in [0, vocab_size)."""

  def convert(value: Any) -> np.ndarray:
    tokens = token_ids(value, vocab_size)
    if len(tokens) != count:
      raise InputError(f'tokens: expected {count} ids, got {len(tokens)}')
    return tokens

  return ItemReader('tokens', convert, np.zeros(count, np.int32), length)


def token_ids(value: Any, vocab_size: int) -> Int[np.ndarray, ' T']:
  """Checks a row of token ids; returns it as int32.

  Args:
    value: a sequence or array of ids.
    vocab_size: ids are below it; 0 for no limit.

  Raises:
    InputError: it is empty or not one row of legal ids.
  """
  legal = f'integers in [0, {vocab_size})' if vocab_size else 'integers >= 0'
  try:
    array = np.asarray(value)
  except ValueError as error:
    raise InputError(f'tokens: expected {legal}, got {error}') from error
  if array.ndim != 1 or not array.size or array.dtype.kind not in 'iu':
    raise InputError(
      f'tokens: expected a row of {legal}, got shape {array.shape} and dtype '
      f'{array.dtype}'
    )
  if array.min() < 0 or (vocab_size and array.max() >= vocab_size):
    raise InputError(
      f'tokens: expected {legal}, got {array.min()} to {array.max()}'
    )
  return array.astype(np.int32)


def _contents(path: str | os.PathLike[str]) -> bytes:
  try:
    if os.path.getsize(path) > MAX_FILE:
      raise InputError(f'image: expected a file of at most {MAX_FILE} bytes')
    with open(path, 'rb') as file:
      return file.read()
  except (OSError, ValueError) as error:
    raise InputError(f'image: expected a file, got {error}') from error
