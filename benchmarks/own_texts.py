"""Runs launch.classify on texts of one's own, over several seeds.

  python -m benchmarks.own_texts --data=/tmp/sets --workdir=/tmp/own_texts \\
      --out=benchmarks/results/own_texts_runs.csv \\
      --table=benchmarks/results/own_texts.csv

The folder, as `benchmarks.small_texts` makes one, has CSV files, or folders
with train.csv and maybe test.csv, with the columns text and label, perhaps pair
and group. A seed also chooses the splits that are made. Accuracies are of test
rows, in percent; minutes are of the whole command, without what an earlier call
had finished.
"""

import csv
import dataclasses
import itertools
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from core import files
from core.errors import ConfigError
from core.fields import flag
from eval_lib import report
from launch import command_line
from launch.command_line import Count

OPTIONAL = 'pair', 'group'  # columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  data: str = flag('a folder of data sets', metavar='FOLDER')
  workdir: str = flag('directory of all runs', metavar='DIRECTORY')
  out: str = flag('where to write the runs', metavar='FILE.csv')
  table: str = flag('where to write their means', '', metavar='FILE.csv')
  seeds: tuple[Count, ...] = flag('seeds of splits and trainings', (0, 1, 2))
  timed_rows: Count = flag('test rows that are timed; 0 for none', 0)
  pretrained: str = flag('see launch.classify', 'minilm')


def run(flags: Flags) -> None:
  paths = sorted(pathlib.Path(flags.data).iterdir())
  if not paths:
    raise ConfigError('--data', flags.data, 'a folder with data sets')
  rows = list[dict[str, Any]]()
  for path, seed in itertools.product(paths, flags.seeds):
    rows.append(_row(path, seed, flags))
    report.write_csv(flags.out, rows)
  table = summary(rows)
  report.print_table(f'mean (least to most) of {len(flags.seeds)} seeds', table)
  if flags.table:
    report.write_csv(flags.table, table)


def summary(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns a row for each set: the mean, least and most of its runs."""
  table = []
  for name, group in itertools.groupby(rows, lambda row: row['set']):
    runs = [*group]
    first = runs[0]
    line = {'texts': name.replace('_', ' ')}
    line['rows'] = first['rows'] - first['test_rows']
    for column in [key for key, v in first.items() if isinstance(v, float)]:
      values = [run[column] for run in runs]
      ends = f'({min(values):.3g} to {max(values):.3g})'
      line[column] = f'{statistics.mean(values):.3g} {ends}'
    table.append(line)
  return table


def _row(path: pathlib.Path, seed: int, flags: Flags) -> dict[str, Any]:
  """Runs the command; returns a row of the table."""
  out = pathlib.Path(flags.workdir, f'{path.stem}_{seed}')
  train = path / 'train.csv' if path.is_dir() else path
  with train.open(newline='', encoding='utf-8') as file:
    header = next(csv.reader(file))
  begin = time.monotonic()
  subprocess.run(
    [
      sys.executable, '-m', 'launch.classify', str(path), f'--out={out}',
      f'--seed={seed}', f'--config.dataset.split_seed={seed}',
      *(f'--{name}={name}' for name in OPTIONAL if name in header),
      f'--pretrained={flags.pretrained}', f'--timed_rows={flags.timed_rows}',
    ],
    check=True,
  )  # fmt: skip
  minutes = (time.monotonic() - begin) / 60
  made = files.read_object(out / 'report.json')
  return {
    'set': path.stem, 'seed': seed,
    'rows': sum(made['rows'].values()), 'test_rows': made['rows']['test'],
    **{name: round(100 * v, 2) for name, v in made['accuracy'].items()},
    'epsilon, %': 100 * made['certificate']['epsilon'],
    'FLOPs saved, %': round(100 * (made['certificate']['saved'] or 0), 2),
    'minutes': round(minutes, 2),
  }  # fmt: skip


main = command_line.Command('own_texts', __doc__, Flags, run, 'benchmarks')

if __name__ == '__main__':
  raise SystemExit(main())
