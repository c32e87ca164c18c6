"""Answers texts or images with a trained model, one JSON object per line.

  python -m launch.predict --workdir=/tmp/sst2 < lines.jsonl > answers.jsonl
  python -m launch.predict --bundle=/tmp/sst2.bundle < lines.jsonl
  python -m launch.predict --workdir=/tmp/sst2 --serve=tau=0.8 \\
      --thresholds=forum=0.95,news=0.8 --minimum_retention=forum=0.9

A line is a string or {"text": ...} with optionally "pair", "source" and "id",
for a run on images {"image": PATH}, for one on token ids {"tokens": [...]}.
Every line has one answer, in the order of the lines: {"id": 7, "label":
"positive", "probabilities": {...}, ...}, or {"id": 7, "error": ...}. Warnings,
drift and statistics as JSON go to stderr. docs/serving.md lists the fields of
answers and the options of each family.
"""

import collections
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from dataset_lib import text_files
from launch import command_line, serving

MAX_LINE = 2**24  # bytes, without the newline


def run(flags: serving.Flags) -> int:
  """Loads the model, compiles it, answers the lines of stdin on stdout."""
  from serve_lib.process import own_process

  own_process()
  with serving.build_engine(flags) as engine:
    # Not `sys.stdin`: at exit Python takes its lock, which a thread that is
    # blocked in `readline` holds.
    lines = read_lines(os.fdopen(0, 'rb', closefd=False))
    with serving.statistics(engine, flags.log_every):
      answer_all(engine, lines, write_line, flags.max_pending)
  return command_line.OK


def read_lines(file: BinaryIO) -> Iterator[tuple[Any, Any]]:
  """Yields (id, item) of every line; an `InputError` for an illegal line."""
  from serve_lib.chain import InputError

  read = functools.partial(file.readline, MAX_LINE + 1)  # with its newline
  for number, line in enumerate(iter(read, b''), 1):
    try:
      if len(line) > MAX_LINE and not line.endswith(b'\n'):
        while line and not line.endswith(b'\n'):
          line = read()
        raise ValueError(f'expected at most {MAX_LINE} bytes, got more')
      yield _read_line(line, number)
    except ValueError as error:
      yield number, InputError(f'line: {error}')


def _read_line(line: bytes, number: int) -> tuple[Any, Any]:
  """Returns the line's id, by default its number, and its item."""
  try:
    # Editors on Windows write a byte order mark first.
    text = line.decode('utf-8-sig')
    item = text_files.loads(text)
  except ValueError as error:
    message = f'expected one JSON value in UTF-8, got {error}'
    raise ValueError(message) from error
  if not isinstance(item, dict):
    return number, item
  name = item.pop('id', number)
  # The answer repeats the id; a nested one could be too deep to write.
  if isinstance(name, (dict, list)):
    kind = type(name).__name__
    raise ValueError(f'expected an id that is a text or a number, got {kind}')
  return name, item


def answer_all(
  engine: Any,
  lines: Iterator[tuple[Any, Any]],
  write: Callable[[str], None],
  window: int,
) -> None:
  """Writes the JSON of one answer for each (id, item), in their order."""
  from serve_lib.chain import Failure

  ids: collections.deque[Any] = collections.deque()

  def items():
    for name, item in lines:
      ids.append(name)
      yield item

  with contextlib.closing(engine.stream(items(), window)) as answers:
    for answer in answers:
      is_bad = isinstance(answer, Failure)
      fields = {'error': str(answer.error)} if is_bad else answer.as_dict()
      write(json.dumps({'id': ids.popleft()} | fields, allow_nan=False))


def write_line(text: str) -> None:
  """Prints a line on stdout at once; exits if it is closed, as by `| head`."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    # Python flushes stdout once more at exit, which would print an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(command_line.OUTPUT_CLOSED) from None


main = command_line.Command('predict', __doc__, serving.Flags, run)

if __name__ == '__main__':
  sys.exit(main())
