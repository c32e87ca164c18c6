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

from launch import command_line, config_flags, tables

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
    """What the line says."""
    return ' '.join(self.overrides)


def parser() -> command_line.Parser:
  """The command line."""
  result = command_line.Parser(
    prog='python -m launch.sweep',
    description=__doc__,
    epilog=command_line.EXIT_CODES,
  )
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
    UsageError: naming the line that is wrong.
  """
  arguments = command_line.parse_arguments(parser(), argv)
  runs = read_runs(arguments.overrides, pathlib.Path(arguments.workdir))
  command_line.check_workdir(arguments.workdir)
  lines: dict[str, int] = {}
  for run in runs:
    try:
      config = _config(arguments, run)
      earlier = lines.setdefault(config, run.number)
      if earlier != run.number:
        raise command_line.UsageError(
          f'expected another run than in line {earlier}, got the same'
        )
    except command_line.UsageError as error:
      raise command_line.UsageError(
        f'{arguments.overrides}, line {run.number}: {error}'
      ) from error
  return arguments, runs


def read_runs(path: str, workdir: pathlib.Path) -> list[Run]:
  """The runs that a list of overrides asks for.

  Raises:
    UsageError: the file cannot be read or has no line.
  """
  try:
    lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise command_line.UsageError(f'--overrides: {error}') from error
  runs = []
  for number, line in enumerate(lines, 1):
    try:
      overrides = tuple(shlex.split(line, comments=True))
    except ValueError as error:
      raise command_line.UsageError(
        f'{path}, line {number}: {error}'
      ) from error
    if overrides:
      runs.append(Run(number, overrides, workdir / directory(overrides)))
  if not runs:
    raise command_line.UsageError(
      f'--overrides: expected at least one line in {path}, got none'
    )
  return runs


def directory(overrides: Sequence[str]) -> str:
  """The name of a run's directory: readable, short, and its own."""
  words = []
  for override in overrides:
    key, separator, value = override.partition('=')
    words.append(key.rpartition('.')[2] + separator + value)
  text = ','.join(words)
  safe = ''.join(c if c.isalnum() or c in '=,.-_' else '_' for c in text)
  digest = hashlib.sha256('\n'.join(overrides).encode()).hexdigest()[:8]
  return f'{safe[:80]}-{digest}'


def _config(arguments: Any, run: Run) -> str:
  """The checked configuration of a run as text.

  Raises:
    UsageError: it is not legal, or not that of what has finished before.
  """
  from dataset_lib.errors import ConfigError
  from train_lib import strict_json

  try:
    config = config_flags.load_config(arguments.config, run.overrides)
  except ConfigError as error:
    raise command_line.UsageError(str(error)) from error
  name, _, metric = arguments.metric.partition('/')
  if not metric or name not in config.evals:
    raise command_line.UsageError(
      f'--metric: expected EVAL/METRIC of one of {sorted(config.evals)}, got '
      f'{arguments.metric!r}'
    )
  text = strict_json.dumps(config.to_dict())
  _check_finished(run, strict_json.loads(text))
  return text


def _check_finished(run: Run, config: Any) -> None:
  """Raises `UsageError` if the result is of another configuration."""
  from train_lib import run_directory, strict_json

  saved = run.workdir / 'config.json'
  if not (is_finished(run) and saved.is_file()):
    return
  changed = run_directory.changes(strict_json.loads(saved.read_text()), config)
  if changed:
    raise command_line.UsageError(
      f'a run of another configuration has finished in {run.workdir} '
      f'({"; ".join(changed)}); use another --workdir'
    )


def is_finished(run: Run) -> bool:
  """Whether there is a result."""
  return (run.workdir / 'result.json').is_file()


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return command_line.main(parse, sweep, argv)


def sweep(arguments: Any, runs: Sequence[Run]) -> int:
  """Trains all runs; the exit code of the first that fails, or 0."""
  failure = command_line.OK
  for place, run in enumerate(runs, 1):
    if is_finished(run):
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
    if is_finished(run) and arguments.metric not in _raw_result(run):
      break  # nor will the others have it
  report(arguments, runs)
  return failure


def train_command(config: str, run: Run) -> list[str]:
  """The command line of one run."""
  return [
    sys.executable, '-m', 'launch.train', f'--config={config}',
    f'--workdir={run.workdir}',
    *(f'--config.{override}' for override in run.overrides),
  ]  # fmt: skip


def train(command: Sequence[str]) -> int:
  """Runs one training to its end; returns its exit code as a shell says it.

  A signal that asks us to stop is passed on, and the training ends with its
  step saved. It has a process group of its own: a Ctrl-C of the terminal would
  reach it a second time, which means that it shall not wait for that.
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
  from eval_lib.report import write_csv

  metric = arguments.metric
  rows = results(runs, metric, arguments.mode)
  finished = [run for run in runs if is_finished(run)]
  if finished and all(row[metric] is None for row in rows):
    known = sorted(name for name in _read_result(finished[0]) if '/' in name)
    command_line.fail(
      f'--metric: expected one of {", ".join(known)}, got {metric!r}; what '
      'is finished stays, the same command with another goes on'
    )
  workdir = pathlib.Path(arguments.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  write_csv(workdir / 'sweep.csv', rows)
  shown = [{'run': row['run'], metric: _shown(row[metric])} for row in rows]
  tables.print_rows(f'best first, {workdir}/sweep.csv', shown)


def _shown(value: float | None) -> str:
  return '-' if value is None else f'{value:.4f}'


def results(
  runs: Sequence[Run], metric: str, mode: str
) -> list[dict[str, Any]]:
  """A row for each run, the best first; runs without the metric last."""
  rows = [
    {
      'run': run.name,
      metric: _read_result(run).get(metric),
      'workdir': str(run.workdir),
    }
    for run in runs
  ]
  sign = -1 if mode == 'max' else 1
  return sorted(
    rows,
    key=lambda row: (row[metric] is None, sign * (row[metric] or 0.0)),
  )


def _read_result(run: Run) -> dict[str, float]:
  """The numbers of result.json; none of a run that has not finished."""
  return {
    name: value
    for name, value in _raw_result(run).items()
    if isinstance(value, (int, float))
  }


def _raw_result(run: Run) -> dict[str, Any]:
  """result.json, in which numbers that are not finite are texts."""
  from train_lib import strict_json

  if not is_finished(run):
    return {}
  return strict_json.loads((run.workdir / 'result.json').read_text())


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
