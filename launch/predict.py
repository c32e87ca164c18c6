"""Answers texts with a trained model, one JSON object a line.

  python -m launch.predict --workdir=/tmp/sst2 < lines.jsonl > answers.jsonl

A line is {"text": ...} with optionally "pair", "source" and "id", or just a
string. There is one answer a line, in the order of the lines:

  {"id": 7, "label": "positive", "probabilities": {...}, "depth": 4,
   "retention": 0.7, "exit_reason": "confidence", "truncated": false}

or {"id": ..., "error": ...} for a line that cannot be answered; the others
are. Thresholds for single sources:

  --thresholds=forum=0.95,news=0.8 --minimum_retention=forum=0.9

Temperatures, the guaranteed threshold (--serve=tau=guaranteed) and what drift
is measured against come from calibration.json in the workdir, which training
writes at its end, and for another checkpoint or with a guarantee

  python -m launch.evaluate --workdir=/tmp/sst2 --evals=calibration \\
      --config.evals.calibration.epsilon=0.02

On stderr: warnings, a line when the traffic drifts and when that ends, and
running statistics as one JSON line, every --log_every seconds and at the end.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from launch import command_line, flag_types

BATCHES = '1,2,4,8,16,32'
MAX_LINE = 2**24  # bytes
LOG_EVERY = 60.0  # seconds


def _period(text: str) -> float:
  """A flag: seconds, or 0 for never."""
  value = float(text)
  if not 0.0 <= value <= 1e6:  # False for NaN
    raise ValueError(text)
  return value


_period.__name__ = 'number of seconds from 0 to 1e6'


def parser() -> command_line.Parser:
  """The command line."""
  result = command_line.Parser(
    prog='python -m launch.predict',
    description=__doc__,
    epilog=command_line.EXIT_CODES,
  )
  add = result.add_argument
  add('--workdir', required=True, metavar='DIRECTORY',
      help='directory of the run')  # fmt: skip
  add('--step', type=flag_types.checkpoint, default='latest', metavar='STEP',
      help='latest (default), best, or a number')  # fmt: skip
  add('--serve', default='', metavar='KEY=VALUE,...',
      help='rule, tau, patience, tolerance, veto_margin, ensemble_margin, '
      'max_characters')  # fmt: skip
  add('--thresholds', default='', metavar='SOURCE=TAU,...')
  add('--minimum_retention', default='', metavar='SOURCE=SHARE,...')
  add('--lengths', type=flag_types.sizes, metavar='TOKENS,...',
      help="length buckets; default: the run's")  # fmt: skip
  add('--batches', type=flag_types.sizes, default=BATCHES, metavar='ROWS,...',
      help=f'batch buckets (default: {BATCHES})')  # fmt: skip
  add('--compilation_cache', default='', metavar='DIRECTORY',
      help='keeps compiled programs for the next start')  # fmt: skip
  add('--log_every', type=_period, default=LOG_EVERY, metavar='SECONDS',
      help='running statistics on stderr; 0 for only at the end (default: '
      f'{LOG_EVERY:g})')  # fmt: skip
  return result


def parse(argv: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
  """Returns (arguments, the run's config, options); touches no device."""
  arguments = command_line.parse_arguments(parser(), argv)
  options: dict[str, Any] = {
    'serve': _values('--serve', arguments.serve),
    'thresholds': _numbers('--thresholds', arguments.thresholds),
    'minimum_retention': _shares(
      '--minimum_retention', arguments.minimum_retention
    ),
  }
  from train_lib import loading

  return arguments, loading.load_config(arguments.workdir), options


def _values(flag: str, text: str) -> dict[str, Any]:
  fields = command_line.parse_fields(flag, text) if text else {}
  return {name: _number(value) for name, value in fields.items()}


def _number(value: Any) -> Any:
  try:
    return value if isinstance(value, int) else float(value)
  except ValueError:
    return value


def _numbers(flag: str, text: str) -> dict[str, float]:
  values = _values(flag, text)
  for source, value in values.items():
    # Which numbers are legal depends on the rule, which says so itself.
    if isinstance(value, str) or math.isnan(value):
      raise command_line.UsageError(
        f'{flag}: expected a number for {source!r}, got {value!r}'
      )
  return {source: float(value) for source, value in values.items()}


def _shares(flag: str, text: str) -> dict[str, float]:
  shares = _numbers(flag, text)
  for source, value in shares.items():
    if not 0 <= value <= 1:
      raise command_line.UsageError(
        f'{flag}: expected a number in [0, 1] for {source!r}, got {value!r}'
      )
  return shares


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  from dataset_lib.errors import ConfigError

  try:
    arguments, config, options = parse(argv)
  except (command_line.UsageError, ConfigError) as error:
    command_line.fail(error)
  return command_line.run(lambda: run(arguments, config, options))


def run(arguments: Any, config: Any, options: dict[str, Any]) -> int:
  """Loads the model, compiles, answers stdin on stdout."""
  from serve_lib.host_memory import keep_freed_memory

  keep_freed_memory()
  with build_engine(arguments, config, options) as engine:

    def log_statistics():
      _log(json.dumps(engine.monitor.snapshot()))

    # Not `sys.stdin`, which Python locks at its end: interrupted, it would wait
    # for the thread that waits for the next line.
    lines = read_lines(os.fdopen(0, 'rb', closefd=False))
    with regularly(arguments.log_every, log_statistics):
      answer_all(engine, lines, lambda text: print(text, flush=True))
    log_statistics()
  return command_line.OK


def _log(line: str) -> None:
  # Nobody may be reading it any more; the answers are what counts.
  with contextlib.suppress(OSError):
    print(line, file=sys.stderr, flush=True)


def log_drift(drifted: bool, report: dict[str, Any]) -> None:
  """Says on stderr that fallback to full depth begins or ends."""
  what = (
    'the traffic differs from the calibration split; every row runs to full '
    'depth'
    if drifted
    else 'over; rows leave early again'
  )
  _log(f'drift: {what}: {json.dumps(report)}')


@contextlib.contextmanager
def regularly(
  seconds: float,
  action: Callable[[], None],
  done: threading.Event | None = None,
) -> Iterator[None]:
  """Calls the action every so many seconds, in a thread, meanwhile.

  Args:
    seconds: from one call to the next; 0 for never.
    action: what is called.
    done: set at the end; its `wait` is the clock.
  """
  done = done or threading.Event()

  def repeat():
    while not done.wait(seconds):
      action()

  if not seconds:
    yield
    return
  thread = threading.Thread(target=repeat, name='launch.predict statistics')
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


def build_engine(arguments: Any, config: Any, options: dict[str, Any]) -> Any:
  """The engine of a run, compiled."""
  import jax

  from eat import service
  from serve_lib.engine import Engine
  from train_lib import loading, sharding

  # A wrong option is answered before the model is read.
  service.settings_of(
    arguments.workdir,
    options['serve'],
    options['thresholds'],
    options['minimum_retention'],
  )
  step = arguments.step
  task = loading.load_task(arguments.workdir, config, step)
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    loaded = loading.load_params(arguments.workdir, task, mesh, step)
  chain, policy = service.build(
    task,
    jax.device_put(loaded.variables, jax.devices()[0]),
    arguments.workdir,
    options['serve'],
    options['thresholds'],
    options['minimum_retention'],
    step=loaded.step,
    on_drift=log_drift,
  )
  for warning in policy.warnings:
    _log(f'warning: {warning}')
  buckets = arguments.lengths or config.dataset.length_buckets
  longest = task.info.input_shape[0]
  lengths = sorted({*(size for size in buckets if size < longest), longest})
  engine = Engine(
    chain,
    policy,
    lengths,
    arguments.batches,
    monitor=policy.monitor,
    cache_directory=arguments.compilation_cache,
  )
  engine.warm_up(progress=True)
  return engine


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
    item = json.loads(
      line.decode('utf-8'), parse_constant=_finite, parse_float=_finite
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


def answer_all(engine: Any, lines: Iterator[tuple[Any, Any]], write) -> None:
  """Writes one answer a line, in the order of the lines.

  Args:
    engine: answers the items.
    lines: (id, item) pairs.
    write: is called with every answer's JSON.
  """
  from serve_lib.chain import Failure

  ids: collections.deque[Any] = collections.deque()

  def items():
    for name, item in lines:
      ids.append(name)
      yield item

  for answer in engine.stream(items()):
    if isinstance(answer, Failure):
      fields = {'error': str(answer.error)}
    else:
      fields = dataclasses.asdict(answer)
    write(json.dumps({'id': ids.popleft()} | fields, allow_nan=False))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
