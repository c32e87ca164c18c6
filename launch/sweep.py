"""Trains once for every line of a plain list of overrides.

  python -m launch.sweep --workdir=/tmp/grid --metric=dev/accuracy \\
      --config=configs/albert_act/glue.py:task=rte,checkpoint=/tmp/albert \\
      --overrides=configs/albert_act/grid.txt

A line holds overrides as on the command line of launch.train, without
`--config.`: `optimizer.lr=3e-5 batch_size=16`; what follows a # is a comment.
All lines are checked before the first run. Each run has a directory of its own
in --workdir, named after its line and configuration; the same command goes on
where it was interrupted and skips what has finished. A run that fails is named,
and the others go on. At the end a table, best first, and sweep.csv. Ctrl-C and
SIGTERM stop the run that is going on, which saves its step.
"""

import functools
import hashlib
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from launch import command_line, config_flags
from launch.command_line import UsageError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOPPED = (command_line.PREEMPTED, command_line.INTERRUPTED)


class Run(NamedTuple):
  """A line of the list and the directory of its run."""

  name: str
  overrides: list[str]
  workdir: pathlib.Path

  def result(self) -> dict[str, Any] | None:
    """Reads result.json; None if the run has not finished."""
    from train_lib import strict_json

    path = self.workdir / 'result.json'
    return strict_json.loads(path.read_text()) if path.is_file() else None


def parser() -> command_line.Parser:
  """The command line."""
  result = command_line.Parser('python -m launch.sweep', __doc__)
  add = result.add_argument
  add('--config', required=True, metavar='FILE.py[:argument]',
      help='the experiment')  # fmt: skip
  add('--overrides', required=True, metavar='FILE',
      help='a line for each run')  # fmt: skip
  add('--workdir', required=True, metavar='DIRECTORY',
      help='holds the directories of the runs')  # fmt: skip
  add('--metric', required=True, metavar='EVAL/METRIC',
      help='of result.json, to order the runs by')  # fmt: skip
  add('--mode', choices=('max', 'min'), default='max',
      help='which is better (default: max)')  # fmt: skip
  return result


def parse(argv: Sequence[str]) -> tuple[Any, list[Run]]:
  """Returns (arguments, runs); every configuration has been checked.

  Raises:
    UsageError: with the number of the wrong line.
  """
  arguments = command_line.parse_arguments(parser(), argv)
  command_line.check_workdir(arguments.workdir)
  path = arguments.overrides
  try:
    lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise UsageError(f'--overrides: {error}') from error
  runs: list[Run] = []
  numbers: dict[str, int] = {}
  for number, line in enumerate(lines, 1):
    try:
      overrides = shlex.split(line, comments=True)
      if not overrides:
        continue
      digest = _digest(arguments, overrides)
      earlier = numbers.setdefault(digest, number)
      if earlier != number:
        raise UsageError(
          f'expected another run than in line {earlier}, got the same'
        )
    except ValueError as error:
      raise UsageError(f'{path}, line {number}: {error}') from error
    workdir = pathlib.Path(arguments.workdir, _directory(overrides, digest))
    runs.append(Run(' '.join(overrides), overrides, workdir))
  if not runs:
    raise UsageError(
      f'--overrides: expected at least one line in {path}, got none'
    )
  return arguments, runs


def _digest(arguments: Any, overrides: Sequence[str]) -> str:
  """Returns a short hash of a run's configuration; checks it."""
  from train_lib import strict_json

  config = config_flags.load_config(arguments.config, overrides)
  name, _, metric = arguments.metric.partition('/')
  if not metric or name not in config.evals:
    raise UsageError(
      f'--metric: expected EVAL/METRIC of one of {sorted(config.evals)}, got '
      f'{arguments.metric!r}'
    )
  text = strict_json.dumps(config.to_dict())
  return hashlib.sha256(text.encode()).hexdigest()[:8]


def _directory(overrides: Sequence[str], digest: str) -> str:
  """Returns `lr=3e-5,batch_size=16-1a2b3c4d`: readable, and of one config."""
  words = ','.join(re.sub(r'^[\w.]*\.', '', word) for word in overrides)
  return f'{re.sub("[^a-zA-Z0-9_=,.-]", "_", words)[:80]}-{digest}'


def sweep(arguments: Any, runs: Sequence[Run]) -> int:
  """Trains all runs; returns the exit code of the first that fails, or 0."""
  failure = command_line.OK
  for place, run in enumerate(runs, 1):
    if run.result() is not None:
      print(f'[{place}/{len(runs)}] finished before: {run.name}', flush=True)
      continue
    print(f'[{place}/{len(runs)}] {run.name}', flush=True)
    code = train([
      sys.executable, '-m', 'launch.train', f'--config={arguments.config}',
      f'--workdir={run.workdir}', *(f'--config.{o}' for o in run.overrides),
    ])  # fmt: skip
    if code in STOPPED:
      print('stopped; the same command goes on', file=sys.stderr)
      return command_line.PREEMPTED
    if code:
      print(f'exit code {code}: {run.name}', file=sys.stderr, flush=True)
    failure = failure or code
    result = run.result()
    if result is not None and arguments.metric not in result:
      break  # the results of other runs will not have it either
  _report(arguments, runs)
  return failure


def train(command: Sequence[str]) -> int:
  """Runs one training, passes signals on; returns its exit code as a shell."""
  asked = False
  # A group of its own: a Ctrl-C of the terminal would reach it a second time,
  # which stops it before it has saved its step.
  with subprocess.Popen(command, process_group=0) as process:

    def pass_on(number: int, frame: Any) -> None:
      nonlocal asked
      asked = True
      process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
      code = process.wait()
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
  if asked:
    return command_line.PREEMPTED
  return code if code >= 0 else 128 - code


def _report(arguments: Any, runs: Sequence[Run]) -> None:
  """Prints the table, best first, and writes sweep.csv."""
  from eval_lib.report import print_table, write_csv

  metric, sign = arguments.metric, -1 if arguments.mode == 'max' else 1
  results = [run.result() or {} for run in runs]
  known = sorted({name for row in results for name in row if '/' in name})
  if known and metric not in known:
    command_line.fail(
      f'--metric: expected one of {", ".join(known)}, got {metric!r}; what '
      'is finished stays, the same command with another goes on'
    )
  rows = []
  for run, result in zip(runs, results, strict=True):
    value = result.get(metric)
    if isinstance(value, str):  # a number that is not finite
      value = None
    rows.append({'run': run.name, metric: value, 'workdir': str(run.workdir)})
  rows.sort(key=lambda row: (row[metric] is None, sign * (row[metric] or 0.0)))
  workdir = pathlib.Path(arguments.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  write_csv(workdir / 'sweep.csv', rows)
  shown = [
    {'run': row['run'], metric: '-' if row[metric] is None
     else f'{row[metric]:.4f}'} for row in rows
  ]  # fmt: skip
  print_table(f'best first, {workdir}/sweep.csv', shown)


main = functools.partial(command_line.main, parse, sweep)

if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
