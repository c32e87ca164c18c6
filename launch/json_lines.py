"""Items and answers as JSON, one a line.

An item is {"text": ...} with optionally "pair", "source" and "id", or just a
string. A line that cannot be read becomes an error in its place.
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
  """(id, item) of every line; the item is an `InputError` if unreadable."""
  for number in itertools.count(1):
    line = file.readline(MAX_LINE)
    if not line:
      return
    if len(line) == MAX_LINE and not line.endswith(b'\n'):
      while line and not line.endswith(b'\n'):
        line = file.readline(MAX_LINE)
      line = b''
      yield number, _unreadable(f'at most {MAX_LINE} bytes', 'more')
      continue
    yield _read_line(line, number)


def _read_line(line: bytes, number: int) -> tuple[Any, Any]:
  """The line's own id or else its number, and what is to be answered."""
  try:
    # Editors on Windows put a byte order mark in front of the first line.
    encoding = 'utf-8-sig' if number == 1 else 'utf-8'
    item = json.loads(
      line.decode(encoding), parse_constant=_finite, parse_float=_finite
    )
  except (ValueError, RecursionError) as error:
    return number, _unreadable('one JSON value in UTF-8', str(error))
  if not isinstance(item, dict):
    return number, item
  name = item.pop('id', number)
  # The answer repeats it; a nested one may be too deep to write.
  if isinstance(name, (dict, list)):
    kind = type(name).__name__
    return number, _unreadable('an id that is a text or a number', kind)
  return name, item


def _finite(text: str) -> float:
  """The number; JSON has no NaN and no infinity, and no answer could."""
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
  """Writes one answer a line, in the order of the lines.

  Args:
    engine: answers the items.
    lines: (id, item) pairs.
    write: is called with every answer's JSON.
    window: lines that are read ahead of the answer that is written.
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
    SystemExit: nobody reads stdout any more, as behind `| head`; quietly, with
      the exit code of Unix tools.
  """
  try:
    print(text, flush=True)
  except BrokenPipeError:
    # Python flushes it once more when it ends, which would be told on stderr.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(command_line.OUTPUT_CLOSED) from None
