"""Bodies of requests: JSON to items that the engine takes, and their work."""

import base64
import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Interval, MinLen
from starlette.exceptions import HTTPException

from core import fields, files
from core.errors import ConfigError
from serve_lib import items
from serve_lib.chain import ILLEGAL_ID, InputError, kind_of, take_id

# Values, containers and strings of a body: 256 rows of 512 tokens with types.
MAX_VALUES = 300_000
_MARKS = '",[{'  # a value has one or two of them


@dataclasses.dataclass
class _Batch:
  items: Annotated[tuple[Any, ...], MinLen(1), 'a list of one item or more']
  deadline_ms: Annotated[float, Interval(gt=0.0, le=3.6e6)] = math.inf


class Body(NamedTuple):
  """The content of a request."""

  items: list[Any]  # as the engine takes them
  ids: list[dict[str, Any]]  # of each, see `take_id`
  work: list[int]  # of reading each, see `items.work`
  seconds: float  # that they may take
  is_batch: bool


def read(body: bytearray, limits: Any) -> Body:
  """Reads a request within the `limits` of `Service`.

  An illegal item becomes an InputError; other errors raise HTTPException.
  """
  if has_too_many_values(body):
    raise HTTPException(413, f'body: expected at most {MAX_VALUES} values')
  try:
    value = files.loads(body.decode(), int)
  except ValueError as error:
    expected = f'body: expected one JSON value in UTF-8, got {error}'
    raise HTTPException(400, expected) from error
  is_batch = isinstance(value, dict) and 'items' in value
  if not is_batch:
    value = {'items': [value]}
    if isinstance(item := value['items'][0], dict) and 'deadline_ms' in item:
      value['deadline_ms'] = item.pop('deadline_ms')
  content, most = value['items'], limits.max_pending
  if isinstance(content, list) and len(content) > most:
    message = f'items: expected at most {most}, got {len(content)}'
    raise HTTPException(413, message)
  try:
    content, milliseconds = fields.check(_Batch, value, '').values()
  except ConfigError as error:
    raise HTTPException(422, str(error)) from error
  ids, rows = [*map(take_id, content)], [*map(read_item, content)]
  pixels = [*map(items.pixels, rows)]
  if (total := sum(pixels)) > limits.max_pixels:
    legal = f'at most {limits.max_pixels} pixels in a request'
    raise HTTPException(413, f'image: expected {legal}, got {total}')
  return Body(
    rows, ids, [*map(items.work, rows, pixels)], milliseconds / 1e3, is_batch
  )


def has_too_many_values(body: bytes | bytearray) -> bool:
  """Returns True for JSON of more than `MAX_VALUES`, without parsing it."""
  # NumPy lets the event loop run meanwhile, which JSON's parser does not.
  codes = np.frombuffer(body, np.uint8)
  marks = np.zeros(len(codes), bool)
  for mark in _MARKS:
    marks |= codes == ord(mark)
  if np.count_nonzero(marks) <= MAX_VALUES:
    return False
  if b'\\' in body:  # quotes that end no string
    body = body.replace(rb'\\', b'  ').replace(rb'\"', b'  ')
  quotes = np.frombuffer(body, np.uint8) == ord('"')
  # A string counts at its end.
  outside = ~np.logical_xor.accumulate(quotes)
  return bool(np.count_nonzero(marks & outside) > MAX_VALUES)


def read_item(value: Any) -> Any:
  """Returns an item as the engine takes it, an InputError for an illegal one.

  No string reaches a reader of images, which would open it as a path.
  """
  if isinstance(value, str):
    return {'text': value}
  if not isinstance(value, dict):
    legal = 'an object such as {"text": ...} or {"image": ...}'
    return InputError(f'item: expected {legal}, got {kind_of(type(value))}')
  if 'id' in value:  # which `take_id` has left
    return InputError(f'item: {ILLEGAL_ID}')
  if 'image' not in value:
    return value
  try:
    return value | {'image': base64.b64decode(value['image'], validate=True)}
  except (TypeError, ValueError) as error:
    legal = "the bytes of a file in base64, no path and no 'data:' URL"
    return InputError(f'image: expected {legal}, got {error}')
