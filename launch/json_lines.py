"""Items and answers of a service as JSON, one per line.

An item is an object with optionally "id", or another value. A line that cannot
be read is answered with an error in its place.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from launch import command_line

MAX_LINE = 2**24  # bytes


def read_lines(file: BinaryIO) -> Iterator[tuple[Any, Any]]:
  """Yields (id, item) of every line; an `InputError` for an illegal line."""
  for number in itertools.count(1):
    line = file.readline(MAX_LINE)
    if not line:
      return
    if len(line) == MAX_LINE and not line.endswith(b'\n'):
      while line and not line.endswith(b'\n'):
        line = file.readline(MAX_LINE)
      yield number, _unreadable(f'at most {MAX_LINE} bytes', 'more')
      continue
    yield _read_line(line, number)


def _read_line(line: bytes, number: int) -> tuple[Any, Any]:
  """Returns the line's id, by default its number, and its item."""
  try:
    # Editors on Windows write a byte order mark first.
    encoding = 'utf-8-sig' if number == 1 else 'utf-8'
    item = json.loads(
      line.decode(encoding), parse_constant=_finite, parse_float=_finite
    )
  except (ValueError, RecursionError) as error:
    return number, _unreadable('one JSON value in UTF-8', str(error))
  if not isinstance(item, dict):
    return number, item
  name = item.pop('id', number)
  # The answer repeats it; nested ids could be too deep to write.
  if isinstance(name, (dict, list)):
    kind = type(name).__name__
    return number, _unreadable('an id that is a text or a number', kind)
  return name, item


def _finite(text: str) -> float:
  """Returns a number; JSON has no NaN and no infinity."""
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f'{text}, which is no finite number')
  return value


def _unreadable(expected: str, given: str) -> Exception:
  from serve_lib.chain import InputError

  return InputError(f'line: expected {expected}, got {given}')


def answer_all(
  engine: Any,
  lines: Iterator[tuple[Any, Any]],
  write: Callable[[str], None],
  window: int,
) -> None:
  """Writes one answer per line, in the order of the lines.

  Args:
    engine: answers the items.
    lines: (id, item) pairs.
    write: called with every answer's JSON.
    window: lines read ahead of the answer that is written.
  """
  from serve_lib.chain import Failure

  ids: collections.deque[Any] = collections.deque()

  def items():
    for name, item in lines:
      ids.append(name)
      yield item

  with contextlib.closing(engine.stream(items(), window)) as answers:
    for answer in answers:
      if isinstance(answer, Failure):
        fields = {'error': str(answer.error)}
      else:
        fields = answer.as_dict()
      write(json.dumps({'id': ids.popleft()} | fields, allow_nan=False))


def write_line(text: str) -> None:
  """Prints a line on stdout at once.

  Raises:
    SystemExit: stdout is closed, as by `| head`; without a message.
  """
  try:
    print(text, flush=True)
  except BrokenPipeError:
    # Python flushes stdout once more at its end, which would print an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(command_line.OUTPUT_CLOSED) from None
