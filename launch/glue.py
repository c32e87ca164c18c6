"""Averages the results of runs on GLUE, and zips answers for its server.

  python -m launch.glue average --runs=/tmp/cola,/tmp/sst2 --out=/tmp/glue.csv
  python -m launch.glue zip --answers=/tmp/answers --out=/tmp/submission.zip

`average` takes the first evaluation of each whole validation split: that of
result.json, else of the newest step of evaluation.json. The average is the
leaderboard's; it names absent tasks. `zip` checks the format, indices and
number of rows of the files of all tasks, which launch.predict --glue writes.
"""

import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterator

from core.errors import ConfigError
from core.fields import flag
from launch import command_line, evaluate

_WHOLE = re.compile('(validation|dev)(_matched|_mismatched)?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average:
  """Averages results of runs, one for each task."""

  runs: str = flag('directories of runs', metavar='DIRECTORY,...')
  out: str = flag('a table', metavar='FILE.csv')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zip:
  """Checks the files of all tasks and zips them."""

  answers: str = flag('their folder', metavar='DIRECTORY')
  out: str = flag('the archive', metavar='FILE.zip')


def run(flags: Average | Zip) -> None:
  """Writes the file of --out."""
  out = pathlib.Path(flags.out)
  command_line.check_place('--out', str(out.parent))
  if isinstance(flags, Average):
    average(flags.runs.split(','), out)
  else:
    from eval_lib import submission

    submission.zip_files(flags.answers, out)
  print(f'written: {out}')


def average(workdirs: list[str], out: pathlib.Path) -> None:
  """Prints and writes the table of the runs."""
  from eval_lib import glue, report

  scores: dict[str, dict[str, float]] = {}
  for workdir in workdirs:
    scored = dict(results(workdir))
    if not scored:
      expected = "runs with GLUE's metrics on a whole validation split, in "
      expected += 'result.json or evaluation.json; run launch.evaluate'
      raise ConfigError('--runs', workdir, expected)
    for name in scored.keys() & scores.keys():
      raise ConfigError('--runs', workdir, f'one run with {name}')
    scores |= scored
  rows = glue.average(scores)
  report.write_csv(out, rows)
  report.print_table('GLUE', [
    {k: f'{100 * v:.1f}' if isinstance(v, float) else v for k, v in row.items()}
    for row in rows
  ])  # fmt: skip


def results(workdir: str) -> Iterator[tuple[str, dict[str, float]]]:
  """Yields `glue.name_of` and metrics of the evaluations, the first last."""
  from eval_lib import glue, report
  from train_lib import loading

  config, place = loading.load_config(workdir), pathlib.Path(workdir)
  rows = evaluate.read_rows(place / 'evaluation.json')
  tables = [
    (rows[step], rows[step].get('datasets', {})) for step in sorted(rows)
  ]
  if result := report.read_result(workdir):
    tables.append((result, evaluate.data_of(config, [*config.evals])))
  for values, datasets in tables:
    for entry, dataset in datasets.items():
      task, split = glue.task_of('', dataset), dataset.get('split', '')
      if task and f'{entry}/score' in values and _WHOLE.fullmatch(split):
        metrics = {m: values[f'{entry}/{m}'] for m in glue.TASK_METRICS[task]}
        yield glue.name_of(task, split), metrics


main = command_line.Command(
  'glue', __doc__, {'average': Average, 'zip': Zip}, run
)

if __name__ == '__main__':
  sys.exit(main())
