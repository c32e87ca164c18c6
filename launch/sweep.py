"""Trains once for every line of a plain list of overrides.

  python -m launch.sweep --workdir=/tmp/grid --metric=dev/accuracy \\
      --config=configs/albert_act/glue.py:task=rte,checkpoint=/tmp/albert \\
      --overrides=configs/albert_act/grid.txt

A line holds overrides as on the command line of launch.train, without
`--config.`: `optimizer.lr=3e-5 batch_size=16`; what follows a # is a comment.
All lines are checked before the first run. Each run has a directory of its own
in --workdir, named after its line; the same command goes on where it was
interrupted and skips what has finished. A run that fails is named, and the
others go on. At the end a table, best first, and sweep.csv. Ctrl-C and SIGTERM
stop the run that is going on, which saves its step.
"""

import hashlib
import pathlib
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
  """One line of the list.

  Attributes:
    number: of the line in the file.
    overrides: 'key=value' each.
    workdir: of the run.
  """

  number: int
  overrides: tuple[str, ...]
  workdir: pathlib.Path

  @property
  def name(self) -> str:
    """The overrides of the line."""
    return ' '.join(self.overrides)

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
  from dataset_lib.errors import ConfigError

  arguments = command_line.parse_arguments(parser(), argv)
  runs = read_runs(arguments.overrides, pathlib.Path(arguments.workdir))
  command_line.check_workdir(arguments.workdir)
  lines: dict[str, int] = {}
  for run in runs:
    try:
      earlier = lines.setdefault(_checked(arguments, run), run.number)
      if earlier != run.number:
        raise UsageError(
          f'expected another run than in line {earlier}, got the same'
        )
    except (UsageError, ConfigError) as error:
      place = f'{arguments.overrides}, line {run.number}'
      raise UsageError(f'{place}: {error}') from error
  return arguments, runs


def read_runs(path: str, workdir: pathlib.Path) -> list[Run]:
  """Reads the list of overrides.

  Raises:
    UsageError: the file cannot be read or has no line.
  """
  try:
    lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise UsageError(f'--overrides: {error}') from error
  runs = []
  for number, line in enumerate(lines, 1):
    try:
      overrides = tuple(shlex.split(line, comments=True))
    except ValueError as error:
      raise UsageError(f'{path}, line {number}: {error}') from error
    if overrides:
      runs.append(Run(number, overrides, workdir / directory(overrides)))
  if not runs:
    raise UsageError(
      f'--overrides: expected at least one line in {path}, got none'
    )
  return runs


def directory(overrides: Sequence[str]) -> str:
  """Returns a readable, short and unique name of a run's directory."""
  words = []
  for override in overrides:
    key, separator, value = override.partition('=')
    words.append(key.rpartition('.')[2] + separator + value)
  text = ','.join(words)
  safe = ''.join(c if c.isalnum() or c in '=,.-_' else '_' for c in text)
  digest = hashlib.sha256('\n'.join(overrides).encode()).hexdigest()[:8]
  return f'{safe[:80]}-{digest}'


def _checked(arguments: Any, run: Run) -> str:
  """Returns the configuration of a run as text.

  Raises:
    ConfigError: it is not legal.
    UsageError: it lacks the metric, or a run in this directory has finished
      with another configuration.
  """
  from train_lib import run_directory, strict_json

  config = config_flags.load_config(arguments.config, run.overrides)
  name, _, metric = arguments.metric.partition('/')
  if not metric or name not in config.evals:
    raise UsageError(
      f'--metric: expected EVAL/METRIC of one of {sorted(config.evals)}, got '
      f'{arguments.metric!r}'
    )
  text = strict_json.dumps(config.to_dict())
  saved = run.workdir / 'config.json'
  if run.result() is not None and saved.is_file():
    changed = run_directory.changes(
      strict_json.loads(saved.read_text()), strict_json.loads(text)
    )
    if changed:
      raise UsageError(
        f'a run of another configuration has finished in {run.workdir} '
        f'({"; ".join(changed)}); use another --workdir'
      )
  return text


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return command_line.main(parse, sweep, argv)


def sweep(arguments: Any, runs: Sequence[Run]) -> int:
  """Trains all runs; returns the exit code of the first that fails, or 0."""
  failure = command_line.OK
  for place, run in enumerate(runs, 1):
    if run.result() is not None:
      print(f'[{place}/{len(runs)}] finished before: {run.name}', flush=True)
      continue
    print(f'[{place}/{len(runs)}] {run.name}', flush=True)
    code = train(train_command(arguments.config, run))
    if code in STOPPED:
      print('stopped; the same command goes on', file=sys.stderr)
      return command_line.PREEMPTED
    if code:
      print(f'exit code {code}: {run.name}', file=sys.stderr, flush=True)
    failure = failure or code
    result = run.result()
    if result is not None and arguments.metric not in result:
      break  # the results of other runs will not have it either
  report(arguments, runs)
  return failure


def train_command(config: str, run: Run) -> list[str]:
  """Returns the command line of one run."""
  return [
    sys.executable, '-m', 'launch.train', f'--config={config}',
    f'--workdir={run.workdir}',
    *(f'--config.{override}' for override in run.overrides),
  ]  # fmt: skip


def train(command: Sequence[str]) -> int:
  """Runs one training; returns its exit code as a shell would.

  Signals that ask to stop are passed on, and the training saves its step. It
  has its own process group: a Ctrl-C of the terminal would reach it a second
  time, which stops it at once.
  """
  asked = False
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


def report(arguments: Any, runs: Sequence[Run]) -> None:
  """Prints the table, best first, and writes sweep.csv."""
  from eval_lib.report import print_table, write_csv

  metric, sign = arguments.metric, -1 if arguments.mode == 'max' else 1
  results = [run.result() for run in runs]
  finished = [result for result in results if result is not None]
  # Numbers that are not finite are texts in result.json.
  values = [
    value if isinstance(value, (int, float)) else None
    for value in ((result or {}).get(metric) for result in results)
  ]
  if finished and not any(metric in result for result in finished):
    known = sorted(name for name in finished[0] if '/' in name)
    command_line.fail(
      f'--metric: expected one of {", ".join(known)}, got {metric!r}; what '
      'is finished stays, the same command with another goes on'
    )
  order = sorted(
    range(len(runs)),
    key=lambda i: (values[i] is None, sign * (values[i] or 0.0)),
  )
  rows = [
    {'run': runs[i].name, metric: values[i], 'workdir': str(runs[i].workdir)}
    for i in order
  ]
  workdir = pathlib.Path(arguments.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  write_csv(workdir / 'sweep.csv', rows)
  for row in rows:
    value = row[metric]
    row[metric] = '-' if value is None else f'{value:.4f}'
    del row['workdir']
  print_table(f'best first, {workdir}/sweep.csv', rows)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
