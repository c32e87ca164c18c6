"""Trains once for every line of a plain list of overrides.

  python -m launch.sweep --workdir=/tmp/grid --metric=dev/accuracy \\
      --config=configs/albert_act/glue.py:task=rte,checkpoint=/tmp/albert \\
      --overrides=configs/albert_act/grid.txt

A line holds overrides as on the command line of launch.train, without
`--config.`: `optimizer.lr=3e-5 batch_size=16  # comment`, and arguments of the
file after a colon: `:n=8,model=ut seed=1`. All lines are checked before the
first run. The same command continues where it was interrupted
(Ctrl-C and SIGTERM save the step) and skips finished runs. A run that fails is
reported; the others continue. Prints a table, best first; writes sweep.csv,
with all metrics of the last evaluations.

With --x it draws the metric against a field as sweep.png and .pdf: a line for
each value of --lines, the mean and range of its runs. Figure 2 of AdaTape:

  python -m launch.sweep --workdir=/tmp/figure2 --metric=test/accuracy \\
      --config=configs/adatape/parity.py --x=dataset.length \\
      --overrides=configs/adatape/figure2.txt \\
      --names='ParityModel=AdaTape;TokenTransformer=Transformer'
"""

import contextlib
import dataclasses
import hashlib
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from dataset_lib.errors import ConfigError
from dataset_lib.fields import ConfigLike, flag
from launch import command_line
from launch.command_line import UsageError, Workdir


class Run(NamedTuple):
  """A line of the list and the directory of its run."""

  name: str
  config: str  # the file with its argument
  overrides: list[str]
  workdir: pathlib.Path
  place: tuple[Any, Any]  # values of the fields `x` and `lines`

  def result(self) -> dict[str, Any] | None:
    """Reads result.json; None if the run has not finished."""
    from dataset_lib import text_files

    path = self.workdir / 'result.json'
    return text_files.loads(path.read_text()) if path.is_file() else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of a sweep."""

  config: str = flag('the experiment', metavar='FILE.py[:argument]')
  overrides: str = flag('one line per run', metavar='FILE')
  workdir: Workdir = flag('directory of all runs', metavar='DIRECTORY')
  metric: str = flag('metric that orders the runs', metavar='EVAL/METRIC')
  mode: Literal['max', 'min'] = flag('max or min: which is better', 'max')
  x: str = flag('draws the metric against this field', '', 'FIELD')
  lines: str = flag('with --x: a line for each value', 'model.name', 'FIELD')
  names: command_line.Names = flag('other names to show', '', 'GIVEN=SHOWN;...')


def read_runs(flags: Flags) -> list[Run]:
  """Returns the runs of a list; raises `UsageError` with the wrong line."""
  path = flags.overrides
  try:
    lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise UsageError(f'--overrides: {error}') from error
  runs: list[Run] = []
  numbers: dict[str, int] = {}
  for number, line in enumerate(lines, 1):
    try:
      words = shlex.split(line, comments=True)
      if not words:
        continue
      arguments = [word[1:] for word in words if word.startswith(':')]
      overrides = [word for word in words if not word.startswith(':')]
      file, *given = flags.config.split(':', 1)
      config = ':'.join(filter(None, [file, ','.join([*given, *arguments])]))
      digest, place = _read(flags, config, overrides)
      earlier = numbers.setdefault(digest, number)
      if earlier != number:
        raise UsageError(f'the same run as in line {earlier}')
    except ValueError as error:
      raise UsageError(f'{path}, line {number}: {error}') from error
    # `lr=3e-5,batch_size=16-1a2b3c4d`: readable, and unique per configuration.
    short = ','.join(re.sub(r'^:|^[\w.]*\.', '', word) for word in words)
    folder = f'{re.sub("[^a-zA-Z0-9_=,.-]", "_", short)[:80]}-{digest}'
    workdir = pathlib.Path(flags.workdir, folder)
    runs.append(Run(' '.join(words), config, overrides, workdir, place))
  if not runs:
    raise ConfigError('--overrides', path, 'a file with at least one line')
  return runs


def _read(
  flags: Flags, file: str, overrides: Sequence[str]
) -> tuple[str, tuple[Any, Any]]:
  """Returns a hash of a run's configuration and `Run.place`; checks both."""
  from dataset_lib import text_files

  config = command_line.load_config(file, overrides)
  name, _, metric = flags.metric.partition('/')
  if not metric or name not in config.evals:
    expected = f'EVAL/METRIC of one of {sorted(config.evals)}'
    raise ConfigError('--metric', flags.metric, expected)
  text = text_files.dumps(config.to_dict())
  digest = hashlib.sha256(text.encode()).hexdigest()[:8]
  if not flags.x:
    return digest, (None, None)
  x = _field(config, 'x', flags.x)
  line = _field(config, 'lines', flags.lines)
  if type(x) not in (int, float):
    raise ConfigError('--x', flags.x, f'a field with a number, not {x!r}')
  return digest, (x, str(line).rpartition(':')[2])


def _field(config: Any, flag_name: str, field: str) -> Any:
  """Returns a field of a configuration, such as 'dataset.length'."""
  value = config
  for name in field.split('.'):
    if not (isinstance(value, ConfigLike) and name in value):
      expected = f'a field of the configuration: {", ".join(sorted(config))}'
      raise ConfigError(f'--{flag_name}', field, expected)
    value = value[name]
  return value


def sweep(flags: Flags) -> int:
  """Trains all runs; returns the exit code of the first that fails, or 0."""
  command_line.check_place('--workdir', flags.workdir)
  runs = read_runs(flags)
  failure = command_line.OK
  for place, run in enumerate(runs, 1):
    if run.result() is not None:
      print(f'[{place}/{len(runs)}] finished before: {run.name}', flush=True)
      continue
    print(f'[{place}/{len(runs)}] {run.name}', flush=True)
    code = train([
      sys.executable, '-m', 'launch.train', f'--config={run.config}',
      f'--workdir={run.workdir}', *(f'--config.{o}' for o in run.overrides),
    ])  # fmt: skip
    if code in (command_line.PREEMPTED, command_line.INTERRUPTED):
      print('stopped; the same command continues', file=sys.stderr)
      return command_line.PREEMPTED
    if code:
      print(f'exit code {code}: {run.name}', file=sys.stderr, flush=True)
    failure = failure or code
    result = run.result()
    if result is not None and flags.metric not in result:
      break  # the results of other runs will not have it either
  _report(flags, runs)
  return failure


def train(command: Sequence[str]) -> int:
  """Runs a training; returns its exit code like a shell (128 + signal)."""
  asked = False

  def pass_on(number: int, frame: Any) -> None:
    nonlocal asked
    asked = True
    process.send_signal(number)

  with contextlib.ExitStack() as stack:
    # Own process group: otherwise the child gets Ctrl-C twice and stops before
    # it has saved its step.
    process = stack.enter_context(subprocess.Popen(command, process_group=0))
    for number in (signal.SIGTERM, signal.SIGINT):
      stack.callback(signal.signal, number, signal.signal(number, pass_on))
    code = process.wait()
  if asked:
    return command_line.PREEMPTED
  return code if code >= 0 else 128 - code


def _report(flags: Flags, runs: Sequence[Run]) -> None:
  """Prints the table, best first, and writes sweep.csv."""
  from eval_lib.report import print_table, write_csv

  metric, sign = flags.metric, -1 if flags.mode == 'max' else 1
  results = [run.result() or {} for run in runs]
  known = sorted({name for row in results for name in row if '/' in name})
  if known and metric not in known:
    command_line.fail(
      f'--metric: expected one of {", ".join(known)}, got {metric!r}; '
      'finished runs are kept, repeat the command with another'
    )
  rows: list[dict[str, Any]] = []
  for run, result in zip(runs, results, strict=True):
    row = {'run': run.name, metric: None, 'workdir': str(run.workdir)}
    # A value that is not finite is a string.
    finite = {k: v for k, v in result.items() if isinstance(v, float)}
    rows.append(row | {k: v for k, v in finite.items() if '/' in k})
  rows.sort(key=lambda row: (row[metric] is None, sign * (row[metric] or 0.0)))
  path = pathlib.Path(flags.workdir, 'sweep.csv')
  path.parent.mkdir(parents=True, exist_ok=True)
  write_csv(path, rows)
  print_table(f'best first, {path}', [
    {'run': row['run'], metric: row[metric] and round(row[metric], 4)}
    for row in rows
  ])  # fmt: skip
  if flags.x:
    values = (result.get(metric) for result in results)
    _draw(flags, zip(runs, values, strict=True))


def _draw(flags: Flags, results: Iterable[tuple[Run, Any]]) -> None:
  from eval_lib import adaptive_plots, report

  points: dict[str, dict[int | float, list[float]]] = {}
  names, metric = report.names(flags.names), flags.metric
  # A share is drawn in percent.
  unit, scale = (
    (' (%)', 100) if metric.endswith(('accuracy', 'shot')) else ('', 1)
  )
  for run, value in results:
    if isinstance(value, float):
      x, line = run.place
      line = names.get(line, line)
      points.setdefault(line, {}).setdefault(x, []).append(scale * value)
  path = pathlib.Path(flags.workdir, 'sweep.png')
  if not points:
    print('no picture: no run has the metric', file=sys.stderr)
    return
  with adaptive_plots.if_installed():
    labels = names.get(flags.x, flags.x), names.get(metric, metric) + unit
    adaptive_plots.plot_ranges(path, points, *labels)
    print(f'picture: {path}')


main = command_line.Command('sweep', __doc__, Flags, sweep)

if __name__ == '__main__':
  sys.exit(main())
