"""The runs of a sweep: flags, directories, the table and the best run."""

import collections
import contextlib
import dataclasses
import glob
import hashlib
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from core import files, machine
from core.errors import ConfigError
from core.fields import flag
from launch import command_line
from launch.command_line import Count, Positive, Workdir

DEVICES = {  # files by the variable that selects of them
  'CUDA_VISIBLE_DEVICES': ('nvidia',),
  'TPU_VISIBLE_CHIPS': ('accel', 'vfio/'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Flags of a sweep."""

  config: str = flag('the experiment', metavar='FILE.py[:argument]')
  fixed: tuple[str, ...] = command_line.overrides_flag()
  overrides: str = flag('a list: one line per run', '', 'FILE')
  workdir: Workdir = flag('directory of all runs', metavar='DIRECTORY')
  metric: str = flag('metric that orders the runs', metavar='EVAL/METRIC')
  mode: Literal['max', 'min'] = flag('max or min: which is better', 'max')
  x: str = flag('list: draws the metric against this field', '', 'FIELD')
  lines: str = flag(
    'list: with --x: a line for each value', 'model.name', 'FIELD'
  )
  names: command_line.Names = flag('other names to show', '', 'GIVEN=SHOWN;...')
  vary: tuple[str, ...] = flag(
    'a search: a range, any number of times', (), 'KEY=RANGE', many=True
  )
  sampler: Literal['tpe', 'random', 'grid'] = flag(
    'search: tpe (Bayesian), random or grid', 'tpe'
  )
  trials: Positive | None = flag('search: how many (grid: all)', None, 'COUNT')
  seed: Count = flag('search: seed of the sampler', 0, 'NUMBER')
  workers: Positive = flag('search: trainings at a time', 1, 'COUNT')
  prune: bool = flag('search: stop trials below the median', False)
  storage: str = flag(
    'search: a database instead of WORKDIR/search.db', '', 'URL'
  )


class Run(NamedTuple):
  """A training of a sweep and its directory."""

  name: str
  config: str  # the file with its argument
  overrides: list[str]
  workdir: pathlib.Path
  needs: tuple['Run', ...] = ()  # runs whose directories it reads

  @property
  def is_named(self) -> bool:
    """True if its line begins with a name; others may read its directory."""
    return self.name.startswith('@')

  def result(self) -> dict[str, Any] | None:
    """Reads result.json; None if the run has not finished."""
    from eval_lib import report

    return report.read_result(self.workdir)

  def start(self, **options: Any) -> subprocess.Popen:
    """Starts its training."""
    # Own process group: otherwise the child gets Ctrl-C twice and stops before
    # it has saved its step.
    command = [sys.executable, *self.command()]
    return subprocess.Popen(command, process_group=0, **options)

  def command(self) -> list[str]:
    """Returns the arguments of `python` that train it."""
    return command_line.training(self.config, self.workdir, self.overrides)

  def recipe(self) -> str:
    """Returns what determines the run but for its seed."""
    fields = (o for o in self.overrides if not o.startswith('seed='))
    text = ' '.join([self.config, *fields])
    for run in sorted(self.needs, key=lambda run: -len(str(run.workdir))):
      text = text.replace(str(run.workdir), f'({run.recipe()})')
    return text

  def seed(self) -> tuple[str, ...]:
    """Returns its overrides of the seed."""
    return tuple(o for o in self.overrides if o.startswith('seed='))


def read_config(
  flags: Flags, file: str, overrides: Sequence[str], named: str = ''
) -> str:
  """Returns a hash of a run's configuration, which has the fields of the flags.

  Raises UsageError if the directory `named` has a run of another configuration.
  """
  from train_lib import run_directory

  config = command_line.load_config(file, overrides)
  plain = config.to_dict()
  saved = pathlib.Path(flags.workdir, named, run_directory.CONFIG)
  if named and saved.is_file():
    before = files.read_object(saved)
    if changed := run_directory.changes(before, plain):
      raise command_line.UsageError(
        f'@{named} was run with another configuration, give this one another '
        f'name: {"; ".join(changed)}'
      )
  name, _, metric = flags.metric.partition('/')
  if not metric or name not in config.evals:
    expected = f'EVAL/METRIC of one of {sorted(config.evals)}'
    raise ConfigError('--metric', flags.metric, expected)
  if flags.x:
    place_of(flags, config)
  return hashlib.sha256(files.dumps(plain).encode()).hexdigest()[:8]


def place_of(flags: Flags, config: Any) -> tuple[float, str]:
  """Returns the values of --x and --lines in a configuration."""
  plain = files.loads(files.dumps(config.to_dict()))  # phases as dicts
  x, line = (_field(plain, flags, name) for name in ('x', 'lines'))
  if type(x) not in (int, float):
    raise ConfigError('--x', flags.x, f'a field with a number, not {x!r}')
  return x, str(line).rpartition(':')[2]


def _field(config: Any, flags: Flags, name: str) -> Any:
  """Returns the field that a flag names, such as 'dataset.length'."""
  value, field = config, getattr(flags, name)
  for key in field.split('.'):
    try:
      value = value[int(key) if isinstance(value, list) else key]
    except (LookupError, TypeError, ValueError):
      expected = f'a field of the configuration: {", ".join(sorted(config))}'
      raise ConfigError(f'--{name}', field, expected) from None
  return value


def devices(slot: int, slots: int) -> tuple[dict[str, str], Sequence[int]]:
  """Returns the environment of a slot, with its GPUs or TPU chip, and cores.

  Raises ConfigError for more slots than devices.
  """
  environment = dict(os.environ)
  if slots == 1:
    return environment, ()
  for name, kinds in DEVICES.items():
    paths = [f for kind in kinds for f in glob.glob(f'/dev/{kind}[0-9]*')]
    every = environment.get(name, ','.join(map(str, range(len(paths)))))
    if not every:
      continue
    share = every.split(',')[slot::slots]
    if not share:
      raise ConfigError('--workers', slots, f'at most one for each of {name}')
    environment[name] = ','.join(share)
    if name.startswith('TPU'):  # libtpu wants the shape of several chips
      shapes = 'TPU_PROCESS_BOUNDS', 'TPU_CHIPS_PER_PROCESS_BOUNDS'
      environment |= {name: share[0]} | dict.fromkeys(shapes, '1,1,1')
    return environment, ()
  cores = machine.affinity()
  return environment, cores[slot::slots] or cores


@contextlib.contextmanager
def on_signals(act: Callable[[int, Any], object]) -> Iterator[None]:
  """Calls `act` on SIGTERM and SIGINT."""
  with contextlib.ExitStack() as stack:
    for number in (signal.SIGTERM, signal.SIGINT):
      stack.callback(signal.signal, number, signal.signal(number, act))
    yield


def stopped() -> int:
  """Returns the exit code of a sweep that was stopped, and says so."""
  print('stopped; the same command continues', file=sys.stderr)
  return command_line.PREEMPTED


def report(
  flags: Flags, results: Iterable[tuple[Run, dict[str, Any], dict[str, Any]]]
) -> list[dict[str, Any]]:
  """Prints and returns the table, best first; writes sweep.csv and best.json.

  `results`: for each run its metrics and other columns.
  """
  from eval_lib.report import print_table, write_csv

  metric, sign = flags.metric, -1 if flags.mode == 'max' else 1
  ranked: list[tuple[Run, dict[str, Any]]] = []
  for run, result, others in results:
    row = {'run': run.name, metric: None, 'workdir': str(run.workdir)} | others
    # A value that is not finite is a string.
    finite = {k: v for k, v in result.items() if isinstance(v, float)}
    ranked.append((run, row | {k: v for k, v in finite.items() if '/' in k}))
  ranked.sort(key=lambda r: (r[1][metric] is None, sign * (r[1][metric] or 0)))
  rows = [row for _, row in ranked]
  path = pathlib.Path(flags.workdir, 'sweep.csv')
  write_csv(path, rows)
  print_table(f'best first, {path}', [
    {'run': row['run'], metric: row[metric] and round(row[metric], 4)}
    | {name: row[name] for name in ('trial', 'state') if name in row}
    for row in rows
  ])  # fmt: skip
  write_seeds(path.parent / 'seeds.csv', ranked, metric)
  if rows and rows[0][metric] is not None:
    run = ranked[0][0]
    config = command_line.load_config(run.config, run.overrides).to_dict()
    again = run._replace(workdir=path.parent / 'best').command()
    best = rows[0] | {'command': shlex.join(['python', *again])}
    files.write_json(path.parent / 'best.json', best | {'config': config})
    print(f'the best, with its command: {path.parent}/best.json')
  return rows


def write_seeds(
  path: pathlib.Path,
  ranked: Iterable[tuple[Run, dict[str, Any]]],
  metric: str,
) -> None:
  """Writes mean and standard deviation of runs that differ only in the seed.

  So may the runs that they read. Writes nothing if no two runs do. The
  deviation is the sample's (n - 1).
  """
  from eval_lib.report import print_table, write_csv

  groups = collections.defaultdict[str, Any](list)
  for run, row in ranked:
    if any('/' in key and value is not None for key, value in row.items()):
      groups[run.recipe()].append((run, row))
  table: list[dict[str, Any]] = []
  for group in groups.values():
    differ = len({run.seed() for run, _ in group}) == len(group)
    rows = [row for _, row in group]
    table += map(_summary, [rows] if differ else [[row] for row in rows])
  if any(row['seeds'] > 1 for row in table):
    write_csv(path, table)
    ends = 'mean', 'deviation', 'seeds'
    columns = ['run', 'seeds', *(f'{metric} {end}' for end in ends)]
    print_table(f'over seeds, {path}', table, columns=columns)


def _summary(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
  run = group[0]['run']
  if len(group) > 1:
    run = re.sub(r'(?<!\S)seed=\S+\s*', '', run).strip()
    run = re.sub(r'(@[A-Za-z_]\w*?)(_?\d+)+\b', r'\1', run)
  means: dict[str, Any] = {'run': run, 'seeds': len(group)}
  for key in dict.fromkeys(k for row in group for k in row if '/' in k):
    values = [row[key] for row in group if row.get(key) is not None]
    if values and len(values) < len(group):
      means[f'{key} seeds'] = len(values)
    if values:
      means[f'{key} mean'] = statistics.mean(values)
      spread = statistics.stdev(values) if len(values) > 1 else None
      means[f'{key} deviation'] = spread
  return means
