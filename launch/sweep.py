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
run. With --x it draws the metric against a field, a line for each value of
--lines, as Figure 2 of AdaTape:

  python -m launch.sweep --workdir=/tmp/figure2 --metric=test/accuracy \\
      --config=configs/adatape/parity.py --x=dataset.length \\
      --overrides=configs/adatape/figure2.txt

A search, with optuna (extra [sweep]):

  python -m launch.sweep --workdir=/tmp/search --metric=test/accuracy \\
      --config=configs/adatape/parity.py --trials=12 --prune \\
      --vary='optimizer.lr=log(1e-4,1e-2)' --vary='model.depth=int(1,4)'

Ranges are uniform(a,b), log(a,b), int(a,b) and choice(x,y,...); a grid takes
the last two. --workers=N trains N at a time, each on its share of the GPUs or
cores, or on one TPU chip. Processes with the same command share a search: on
hosts with a common file system (`sbatch --array=0-7`, an indexed job), or with
--storage=postgresql://... A trial without a heartbeat for 40 s (clocks must
agree) is continued from its last checkpoint.

--config.KEY=VALUE holds for all runs. The same command continues where it was
stopped and skips finished runs. A run that fails is reported; the others
continue. Prints a table, best first; writes sweep.csv (metrics of the last
evaluations), seeds.csv (mean and deviation of runs that differ only in `seed`),
best.json (the best run's configuration and command), sweep.png and .pdf.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
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
        run, digest = _read_line(flags, parts, runs)
        if numbers.setdefault(digest, number) != number:
          raise UsageError(f'the same run as in line {numbers[digest]}')
        runs.append(run)
    except ValueError as error:
      raise UsageError(f'{path}, line {number}: {error}') from error
  if not runs:
    raise ConfigError('--overrides', path, 'a file with at least one line')
  return runs


def _read_line(
  flags: Flags, parts: Sequence[str], earlier: Sequence[Run]
) -> tuple[Run, str]:
  """Returns the run of a line, and what tells it from the others."""
  named = {f'@{run.workdir.name}': run for run in earlier if run.is_named}
  needs: list[Run] = []

  def directory(match: re.Match[str]) -> str:
    if match[0] not in named:
      raise UsageError(f'{match[0]} is not the name of an earlier line')
    needs.append(named[match[0]])
    return str(named[match[0]].workdir)

  label = parts[0] if parts[0].startswith('@') else ''
  if label in named:
    raise UsageError(f'{label} names an earlier line')
  if label and not re.fullmatch(r'@\w+', label):
    raise UsageError(f'expected a name of letters, digits and _, got {label}')
  resolved = [re.sub(r'(?<==)@\w+', directory, w) for w in parts[bool(label) :]]
  if needs and not label:
    raise UsageError('expected a name, such as @eat, before a line with @')
  files = [w.removeprefix(FILE) for w in resolved if w.startswith(FILE)]
  arguments = [word[1:] for word in resolved if word.startswith(':')]
  overrides = [w for w in resolved if not w.startswith((':', FILE))]
  overrides = [*flags.fixed, *overrides]
  file, *before = (*files, flags.config)[0].split(':', 1)
  config = ':'.join(filter(None, [file, ','.join([*before, *arguments])]))
  digest = label
  if all(run.result() is not None for run in needs):
    digest = sweep_runs.read_config(flags, config, overrides, label[1:])
  # `lr=3e-5,batch_size=16-1a2b3c4d`: readable, and unique per configuration.
  short = ','.join(re.sub(r'^:|^[\w.]*\.', '', word) for word in parts)
  folder = f'{re.sub("[^a-zA-Z0-9_=,.-]", "_", short)[:80]}-{digest}'
  workdir = pathlib.Path(flags.workdir, label[1:] or folder)
  return Run(' '.join(parts), config, overrides, workdir, (*needs,)), digest


def sweep(flags: Flags) -> int:
  """Trains all runs; returns the exit code of the first that fails, or 0."""
  command_line.check_place('--workdir', flags.workdir)
  if bool(flags.vary) == bool(flags.overrides):
    expected = 'a list, or else --vary with ranges'
    raise ConfigError('--overrides', flags.overrides, expected)
  other, kind = ('list', 'search') if flags.vary else ('search', 'list')
  names = [
    field.name for field in dataclasses.fields(Flags)
    if field.metadata['words'].startswith(f'{other}: ')
  ]  # fmt: skip
  command_line.refuse(flags, names, f'none with a {kind}: it is for a {other}')
  if flags.vary:
    from launch import search

    return search.search(flags)
  return train_list(flags, read_runs(flags))


def train_list(flags: Flags, runs: Sequence[Run]) -> int:
  """Trains the runs of a list in their order; see `sweep`."""
  failure = command_line.OK
  for place, run in enumerate(runs, 1):
    title = f'[{place}/{len(runs)}]'
    if run.result() is not None:
      print(f'{title} finished before: {run.name}', flush=True)
      continue
    if missing := [r.name for r in run.needs if r.result() is None]:
      print(f'not run, without {missing}: {run.name}', file=sys.stderr)
      continue
    print(f'{title} {run.name}', flush=True)
    code = train(run)
    if code in (command_line.PREEMPTED, command_line.INTERRUPTED):
      return sweep_runs.stopped()
    if code:
      print(f'exit code {code}: {run.name}', file=sys.stderr, flush=True)
    failure = failure or code
    result = run.result()
    if result is not None and flags.metric not in result and not run.is_named:
      break  # the results of other runs will not have it either
  _report(flags, runs)
  return failure


def train(run: Run) -> int:
  """Trains a run; returns the exit code like a shell (128 + signal)."""
  asked = []

  def pass_on(number: int, frame: Any) -> None:
    asked.append(number)
    process.send_signal(number)

  with run.start() as process, sweep_runs.on_signals(pass_on):
    code = process.wait()
  if asked:
    return command_line.PREEMPTED
  return code if code >= 0 else 128 - code


def _report(flags: Flags, runs: Sequence[Run]) -> None:
  """Prints the table, writes the files, draws the picture."""
  metric, results = flags.metric, [(run, run.result() or {}) for run in runs]
  names = sorted({name for _, row in results for name in row if '/' in name})
  if names and metric not in names:
    command_line.fail(
      f'--metric: expected one of {", ".join(names)}, got {metric!r}; '
      'finished runs are kept, repeat the command with another'
    )
  sweep_runs.report(flags, [(run, row, {}) for run, row in results])
  if not flags.x:
    return
  from eval_lib import plots, report, run_plots

  shown = report.names(flags.names)
  # A share is drawn in percent.
  is_share = metric.endswith(('accuracy', 'shot'))
  points: dict[str, dict[int | float, list[float]]] = {}
  for run, row in results:
    if isinstance(value := row.get(metric), float):
      config = command_line.load_config(run.config, run.overrides)
      x, line = sweep_runs.place_of(flags, config)
      values = points.setdefault(shown.get(line, line), {}).setdefault(x, [])
      values.append(100 * value if is_share else value)
  if not points:
    print('no picture: no run has the metric', file=sys.stderr)
    return
  path = pathlib.Path(flags.workdir, 'sweep.png')
  with plots.if_installed():
    label = shown.get(metric, metric) + ' (%)' * is_share
    run_plots.plot_ranges(path, points, shown.get(flags.x, flags.x), label)
    print(f'picture: {path}')


main = command_line.Command('sweep', __doc__, Flags, sweep)

if __name__ == '__main__':
  sys.exit(main())
