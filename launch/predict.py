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
is measured against come from calibration.json in the workdir, which

  python -m launch.evaluate --workdir=/tmp/sst2 --evals=calibration

writes.
"""

import collections
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from launch import command_line

BATCHES = '1,2,4,8,16,32'
MAX_LINE = 2**24  # bytes


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
  add('--step', default='latest', metavar='STEP',
      help='latest (default), best, or a number')  # fmt: skip
  add('--serve', default='', metavar='KEY=VALUE,...',
      help='rule, tau, patience, tolerance, veto_margin, ensemble_margin, '
      'max_characters')  # fmt: skip
  add('--thresholds', default='', metavar='SOURCE=TAU,...')
  add('--minimum_retention', default='', metavar='SOURCE=SHARE,...')
  add('--lengths', default='', metavar='TOKENS,...',
      help="length buckets; default: the run's")  # fmt: skip
  add('--batches', default=BATCHES, metavar='ROWS,...',
      help=f'batch buckets (default: {BATCHES})')  # fmt: skip
  add('--compilation_cache', default='', metavar='DIRECTORY',
      help='keeps compiled programs for the next start')  # fmt: skip
  return result


def parse(argv: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
  """Returns (arguments, the run's config, options); touches no device."""
  arguments = command_line.parse_arguments(parser(), argv)
  options: dict[str, Any] = {
    'serve': _values('--serve', arguments.serve),
    'thresholds': _shares('--thresholds', arguments.thresholds),
    'minimum_retention': _shares(
      '--minimum_retention', arguments.minimum_retention
    ),
    'batches': _sizes('--batches', arguments.batches),
    'lengths': _sizes('--lengths', arguments.lengths),
  }
  if arguments.step not in ('latest', 'best') and (
    not arguments.step.isdecimal()
  ):
    raise command_line.UsageError(
      f'--step: expected latest, best or a number, got {arguments.step!r}'
    )
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


def _shares(flag: str, text: str) -> dict[str, float]:
  shares = _values(flag, text)
  for source, value in shares.items():
    if isinstance(value, str) or not 0 <= value <= 1:
      raise command_line.UsageError(
        f'{flag}: expected a number in [0, 1] for {source!r}, got {value!r}'
      )
  return {source: float(value) for source, value in shares.items()}


def _sizes(flag: str, text: str) -> tuple[int, ...]:
  sizes = text.split(',') if text else []
  if not all(size.isdecimal() and int(size) > 0 for size in sizes):
    raise command_line.UsageError(
      f'{flag}: expected positive integers such as 16,32, got {text!r}'
    )
  return tuple(sorted({int(size) for size in sizes}))


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
    lines = read_lines(sys.stdin.buffer)
    answer_all(engine, lines, lambda text: print(text, flush=True))
    print(json.dumps(engine.monitor.snapshot()), file=sys.stderr)
  return command_line.OK


def build_engine(arguments: Any, config: Any, options: dict[str, Any]) -> Any:
  """The engine of a run, compiled."""
  import jax

  from eat import service
  from serve_lib.engine import Engine
  from train_lib import loading, sharding

  step = {'latest': None, 'best': 'best'}.get(arguments.step, arguments.step)
  step = int(step) if step and step.isdecimal() else step
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
  )
  buckets = options['lengths'] or config.dataset.length_buckets
  longest = task.info.input_shape[0]
  lengths = sorted({*(size for size in buckets if size < longest), longest})
  engine = Engine(
    chain,
    policy,
    lengths,
    options['batches'],
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
    item = json.loads(line.decode('utf-8'))
  except (ValueError, RecursionError) as error:
    return number, _unreadable('one JSON value in UTF-8', str(error))
  if isinstance(item, dict):
    return item.pop('id', number), item
  return number, item


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
