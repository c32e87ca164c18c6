"""Trains once for every line of a list of overrides, or searches ranges.

A list:

  python -m launch.sweep --workdir=/tmp/grid --metric=dev/accuracy \\
      --config=configs/albert_act/glue.py:task=rte,checkpoint=/tmp/albert \\
      --overrides=configs/albert_act/grid.txt

A line holds overrides as on the command line of launch.train, without
`--config.`: `optimizer.lr=3e-5 batch_size=16  # comment`, and arguments of the
file after a colon: `:n=8,model=ut seed=1`. A line may have a --config of its
own, and a name: `@dense :model=dense`. Later lines write @dense for its
directory: `@eat :teacher=@dense`. $VARIABLES of the environment are replaced.
All lines but those that wait for such a directory are checked before the first
run. With --x it draws the metric against a field as sweep.png and .pdf, a line
for each value of --lines, as Figure 2 of AdaTape:

  python -m launch.sweep --workdir=/tmp/figure2 --metric=test/accuracy \\
      --config=configs/adatape/parity.py --x=dataset.length \\
      --overrides=configs/adatape/figure2.txt

A search, with optuna (extra [sweep]):

  python -m launch.sweep --workdir=/tmp/search --metric=test/accuracy \\
      --config=configs/adatape/parity.py --trials=12 --prune \\
      --vary='optimizer.lr=log(1e-4,1e-2)' --vary='model.depth=int(1,4)'

Ranges are uniform(a,b), log(a,b), int(a,b) and choice(x,y,...); a grid takes
the last two. It draws the metric over trials and over each field. --workers=N
trains N at a time, each on its share of the GPUs or cores, or on one TPU chip.
Processes with the same command share a search: on hosts with a common file
system (`sbatch --array=0-7`, an indexed job), or with --storage=postgresql://...
A trial without a heartbeat for 40 s (clocks must agree) is continued from its
last checkpoint.

--config.KEY=VALUE holds for all runs. The same command continues where it was
interrupted (Ctrl-C and SIGTERM save the step) and skips finished runs. A run
that fails is reported; the others continue. Prints a table, best first; writes
sweep.csv, with all metrics of the last evaluations, seeds.csv, with mean and
deviation of runs that differ only in `seed`, and best.json, the complete
configuration of the best run and the command that repeats it.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from core.errors import ConfigError
from launch import command_line, sweep_runs
from launch.command_line import UsageError
from launch.sweep_runs import Flags, Run

FILE = '--config='  # of a line


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
      parts = shlex.split(os.path.expandvars(line), comments=True)
      if unset := re.search(r'\$(\w+|\{\w+\})', ' '.join(parts)):
        raise UsageError(f'{unset[0]} is not set in the environment')
      if parts:
        runs.append(_read_line(flags, parts, runs, numbers, number))
    except ValueError as error:
      raise UsageError(f'{path}, line {number}: {error}') from error
  if not runs:
    raise ConfigError('--overrides', path, 'a file with at least one line')
  return runs


def _read_line(
  flags: Flags,
  parts: Sequence[str],
  earlier: Sequence[Run],
  numbers: dict[str, int],
  number: int,
) -> Run:
  """Returns the run of a line; `numbers` are the line numbers, by run."""
  named = {f'@{run.workdir.name}': run for run in earlier if run.is_named}
  needs: list[Run] = []

  def directory(match: re.Match[str]) -> str:
    if match[0] not in named:
      raise UsageError(f'{match[0]} is not the name of an earlier line')
    needs.append(named[match[0]])
    return str(named[match[0]].workdir)

  own = parts[0] if parts[0].startswith('@') else ''
  if own in named:
    raise UsageError(f'{own} names an earlier line')
  if own and not re.fullmatch(r'@\w+', own):
    raise UsageError(f'expected a name of letters, digits and _, got {own}')
  resolved = [re.sub(r'(?<==)@\w+', directory, w) for w in parts[bool(own) :]]
  files = [w.removeprefix(FILE) for w in resolved if w.startswith(FILE)]
  arguments = [word[1:] for word in resolved if word.startswith(':')]
  overrides = [w for w in resolved if not w.startswith((':', FILE))]
  overrides = [*flags.fixed, *overrides]
  file, *before = (*files, flags.config)[0].split(':', 1)
  config = ':'.join(filter(None, [file, ','.join([*before, *arguments])]))
  if needs and not own:
    raise UsageError('expected a name, such as @eat, before a line with @')
  digest, place = own, (None, None)
  if all(run.result() is not None for run in needs):
    digest, place = sweep_runs.read_config(flags, config, overrides, own[1:])
  if numbers.setdefault(digest, number) != number:
    raise UsageError(f'the same run as in line {numbers[digest]}')
  # `lr=3e-5,batch_size=16-1a2b3c4d`: readable, and unique per configuration.
  short = ','.join(re.sub(r'^:|^[\w.]*\.', '', word) for word in parts)
  folder = f'{re.sub("[^a-zA-Z0-9_=,.-]", "_", short)[:80]}-{digest}'
  workdir = pathlib.Path(flags.workdir, own[1:] or folder)
  return Run(' '.join(parts), config, overrides, workdir, place, (*needs,))


def sweep(flags: Flags) -> int:
  """Trains all runs; returns the exit code of the first that fails, or 0."""
  command_line.check_place('--workdir', flags.workdir)
  if bool(flags.vary) == bool(flags.overrides):
    expected = 'a list, or else --vary with ranges'
    raise ConfigError('--overrides', flags.overrides, expected)
  for field in dataclasses.fields(Flags):
    value = getattr(flags, field.name)
    kind, _, _ = field.metadata['words'].partition(': ')
    if kind == ('list' if flags.vary else 'search') and value != field.default:
      raise ConfigError(f'--{field.name}', value, f'it only with a {kind}')
  if flags.vary:
    from launch import search

    return search.search(flags)
  runs = read_runs(flags)
  failure = command_line.OK
  for place, run in enumerate(runs, 1):
    if run.result() is not None:
      print(f'[{place}/{len(runs)}] finished before: {run.name}', flush=True)
      continue
    if missing := [r.name for r in run.needs if r.result() is None]:
      print(f'not run, without {missing}: {run.name}', file=sys.stderr)
      continue
    print(f'[{place}/{len(runs)}] {run.name}', flush=True)
    code = train([sys.executable, *run.command()])
    if code in (command_line.PREEMPTED, command_line.INTERRUPTED):
      print('stopped; the same command continues', file=sys.stderr)
      return command_line.PREEMPTED
    if code:
      print(f'exit code {code}: {run.name}', file=sys.stderr, flush=True)
    failure = failure or code
    result = run.result()
    if result is not None and flags.metric not in result and not run.is_named:
      break  # the results of other runs will not have it either
  _report(flags, runs)
  return failure


def train(command: Sequence[str]) -> int:
  """Runs a training; returns its exit code like a shell (128 + signal)."""
  asked = []
  # Own process group: otherwise the child gets Ctrl-C twice and stops before
  # it has saved its step.
  process = subprocess.Popen(command, process_group=0)

  def pass_on(number: int, frame: Any) -> None:
    asked.append(number)
    process.send_signal(number)

  with process, sweep_runs.on_signals(pass_on):
    code = process.wait()
  if asked:
    return command_line.PREEMPTED
  return code if code >= 0 else 128 - code


def _report(flags: Flags, runs: Sequence[Run]) -> None:
  """Prints the table, writes the files, draws the picture."""
  metric, results = flags.metric, [run.result() or {} for run in runs]
  names = sorted({name for row in results for name in row if '/' in name})
  if names and metric not in names:
    command_line.fail(
      f'--metric: expected one of {", ".join(names)}, got {metric!r}; '
      'finished runs are kept, repeat the command with another'
    )
  sweep_runs.report(
    flags, [(run, row, {}) for run, row in zip(runs, results, strict=True)]
  )
  if flags.x:
    values = (result.get(metric) for result in results)
    _draw(flags, zip(runs, values, strict=True))


def _draw(flags: Flags, results: Iterable[tuple[Run, Any]]) -> None:
  from eval_lib import plots, report, sweep_plots

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
  with plots.if_installed():
    labels = names.get(flags.x, flags.x), names.get(metric, metric) + unit
    sweep_plots.plot_ranges(path, points, *labels)
    print(f'picture: {path}')


main = command_line.Command('sweep', __doc__, Flags, sweep)

if __name__ == '__main__':
  sys.exit(main())
