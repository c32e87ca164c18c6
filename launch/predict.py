"""Answers texts or images with a trained model, one JSON object per line.

  python -m launch.predict --workdir=/tmp/sst2 < lines.jsonl > answers.jsonl
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
import dataclasses
import functools
import json
import math
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, BinaryIO

from annotated_types import Interval

from dataset_lib.fields import flag
from launch import command_line
from launch.command_line import Count, Sizes

MAX_LINE = 2**24  # bytes, without the newline
CACHE = 'programs'  # in the user's cache folder
MAX_THREADS = 16  # programs compiled at a time; each takes memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command_line.RunFlags):
  """Flags of serving."""

  serve: str = flag(
    'such as tau=0.8 of an EAT, iterations=6 of an ALBERT', '', 'KEY=VALUE,...'
  )
  thresholds: str = flag('of an EAT, instead of tau', '', 'SOURCE=TAU,...')
  minimum_retention: str = flag('of an EAT', '', 'SOURCE=SHARE,...')
  lengths: Sizes | None = flag(
    "length buckets, cut at the last (default: the run's)", None, 'TOKENS,...'
  )
  batches: Sizes = flag('batch buckets', (1, 2, 4, 8, 16, 32), 'ROWS,...')
  max_pending: Annotated[int, Interval(ge=1, le=10**7)] = flag(
    'lines read ahead; best a multiple of the largest batch', 256, 'LINES'
  )
  max_pool_bytes: Count = flag(
    'device memory of rows between stages; 0 (default) for no limit', 0, 'BYTES'
  )
  compilation_cache: str = flag(
    'compiled programs, which the next start runs: keep it private; or none '
    '(default: in the cache folder of the user)',
    '',
    'DIRECTORY',
  )
  log_every: Annotated[float, Interval(ge=0.0, le=1e6)] = flag(
    'running statistics on stderr; 0 for only at the end', 60.0, 'SECONDS'
  )


def run(flags: Flags) -> int:
  """Loads the model, compiles it, answers the lines of stdin on stdout."""
  from serve_lib.programs import keep_freed_memory

  keep_freed_memory()
  with build_engine(flags) as engine:

    def log_statistics() -> None:
      _log(json.dumps(engine.monitor.snapshot()))

    # Not `sys.stdin`: at exit Python takes its lock, which a thread that is
    # blocked in `readline` holds.
    lines = read_lines(os.fdopen(0, 'rb', closefd=False))
    with regularly(flags.log_every, log_statistics):
      answer_all(engine, lines, write_line, flags.max_pending)
    log_statistics()
  return command_line.OK


def build_engine(flags: Flags) -> Any:
  """Returns the engine of a run, compiled."""
  options: dict[str, Any] = {}
  for name in ('serve', 'thresholds', 'minimum_retention'):
    if text := getattr(flags, name):
      values = command_line.parse_fields(f'--{name}', text)
      options |= values if name == 'serve' else {name: values}
  from dataset_lib.builder import default_num_threads
  from serve_lib.engine import Engine
  from train_lib import loading

  lengths = flags.lengths and sorted(set(flags.lengths))
  given: dict[str, Any] = dict(lengths=lengths, options=options)
  chain, policy, buckets = loading.serve(
    flags.workdir, step=flags.step, on_drift=log_drift, **given
  )
  for warning in policy.warnings:
    _log(f'warning: {warning}')
  cache = cache_directory(flags.compilation_cache)
  engine = Engine(
    chain,
    policy,
    buckets,
    sorted(set(flags.batches)),
    max_pending=flags.max_pending,
    max_pool_bytes=flags.max_pool_bytes,
    cache_directory=cache,
  )
  threads = min(default_num_threads(), MAX_THREADS)
  done = engine.warm_up(progress=True, threads=threads)
  kept = f'kept in {cache}' if cache else 'not kept for the next start'
  _log(f'compiled {done.programs} programs in {done.seconds:.1f} s, {kept}')
  return engine


def cache_directory(flag: str) -> str:
  """Returns the directory of the compiled programs; '' for none.

  Its content is executed. So it is not in the workdir, which may come from
  others, and the default is used only if no other user can write to it.
  """
  from dataset_lib import data_files

  if flag:
    return '' if flag == 'none' else flag
  path = data_files.cache_folder(CACHE)
  try:
    os.makedirs(path.parent, 0o700, exist_ok=True)
    os.makedirs(path, 0o700, exist_ok=True)
    # Who can write to the parent can put another folder in its place.
    is_private = all(map(_is_private, (path, path.parent)))
  except OSError:
    return ''
  return str(path) if is_private else ''


def _is_private(path: Any) -> bool:
  """Returns True for a folder that this user alone can write to."""
  found = os.lstat(path)
  others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  is_own = found.st_uid == os.getuid() and os.access(path, os.W_OK | os.X_OK)
  return stat.S_ISDIR(found.st_mode) and not others_write and is_own


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
    item = json.loads(text, parse_constant=_finite, parse_float=_finite)
  except (ValueError, RecursionError) as error:
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


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f'{text}, which is no finite number')
  return value


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


def _log(line: str) -> None:
  with contextlib.suppress(OSError):  # stderr may be closed
    print(line, file=sys.stderr, flush=True)


def log_drift(drifted: bool, report: dict[str, Any]) -> None:
  """Logs that drift begins or ends."""
  now = 'over; rows leave early again'
  if drifted:
    now = 'the traffic is not as calibrated; every row runs to full depth'
  _log(f'drift: {now}: {json.dumps(report)}')


@contextlib.contextmanager
def regularly(seconds: float, action: Callable[[], None]) -> Iterator[None]:
  """Calls `action` every `seconds` seconds within the context; 0 for never."""
  done = threading.Event()

  def repeat():
    while not done.wait(seconds or None):
      action()

  thread = threading.Thread(target=repeat, name='launch.predict statistics')
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


main = command_line.Command('predict', __doc__, Flags, run)

if __name__ == '__main__':
  sys.exit(main())
