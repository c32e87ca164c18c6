"""Runs launch.classify on texts of one's own, over several seeds.

  python -m benchmarks.own_texts --data=FOLDER --workdir=/tmp/own_texts \\
      --out=benchmarks/results/own_texts_runs.csv

The folder has CSV files, or folders with train.csv and maybe test.csv, with the
columns text and label, perhaps pair and group. A seed also chooses the splits
that are made. Accuracies are of test rows, in percent; minutes are of the whole
command, without what an earlier call had finished.
"""

import csv
import dataclasses
import pathlib
import statistics
import subprocess
import sys
import time
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
  out: str = flag('where to write the rows', metavar='FILE.csv')
  seeds: tuple[Count, ...] = flag('seeds of splits and trainings', (0, 1, 2))
  timed_rows: Count = flag('test rows that are timed; 0 for none', 0)
  pretrained: str = flag('see launch.classify', 'minilm')


def run(flags: Flags) -> None:
  paths = sorted(pathlib.Path(flags.data).iterdir())
  if not paths:
    raise ConfigError('--data', flags.data, 'a folder with data sets')
  rows, means = list[dict[str, Any]](), list[dict[str, Any]]()
  for path in paths:
    for seed in flags.seeds:
      rows.append(_row(path, seed, flags))
      report.write_csv(flags.out, rows)
    runs = rows[-len(flags.seeds) :]
    means.append({'set': path.stem} | {
      name: round(statistics.mean(row[name] for row in runs), 2)
      for name, value in runs[0].items()
      if isinstance(value, float) and name not in ('tau', 'epsilon')
    })  # fmt: skip
  report.print_table(f'mean of {len(flags.seeds)} seeds', means)


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
    **{k: made['certificate'].get(k) for k in ('epsilon', 'tau', 'saved')},
    'minutes': round(minutes, 2),
  }  # fmt: skip


main = command_line.Command('own_texts', __doc__, Flags, run, 'benchmarks')

if __name__ == '__main__':
  raise SystemExit(main())
