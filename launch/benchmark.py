"""Times models against each other.

  python -m launch.benchmark adatape --variant=B/16 --batch=8
  python -m launch.benchmark cost --table=1 --rounds=0
  python -m launch.benchmark albert --variant=small --batch=1,8
  python -m launch.benchmark eat_speed --variant=base --batch=1,16,32
  python -m launch.benchmark eat --workdir=/tmp/sst2_eat --dense=/tmp/sst2 \\
      --out=/tmp/report
  python -m launch.benchmark adaptivity --workdir=/tmp/sst2_eat \\
      --dense=/tmp/sst2 --out=/tmp/adaptivity
  python -m launch.benchmark serve --workdir=/tmp/sst2_eat --dense=/tmp/sst2
  python -m launch.benchmark input --root=DIRECTORY
  python -m launch.benchmark budgets --workdir=/tmp/digits --dense=/tmp/vit \\
      --thresholds=1,2 --max_steps=3,6 --bank_shares=0.5,1

Candidates take turns; values are `median [first quartile, third quartile]` of
the rounds, ratios are taken within each round. `limit` is the ratio of FLOPs.
`--out` also writes a CSV file and a picture. All cores are used: restrict them
with taskset. Begin with `adatape --variant=Ti/16 --batch=4` or
`eat_speed --variant=mini --depth=6`: large models take minutes on a CPU.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from core import files
from core.errors import ConfigError
from eval_lib import report
from eval_lib.report import Rows
from launch import command_line
from launch.benchmark_flags import FLAGS, Serve, Timing

BUSY_LOAD = 0.5  # average number of running threads
TOLERANCE = {'float32': 1e-4, 'bfloat16': 5e-2}  # of outputs of a group


def run(flags: Any) -> None:
  """Times the candidates, or writes a report."""
  # jax is imported only after the flags are checked.
  from serve_lib import process

  process.own_process()  # as launch.predict and launch.serve do
  if isinstance(flags, Timing):
    try:
      time_candidates(flags)
    except ConfigError as error:
      command_line.fail(f'--{error}')
    return
  if not isinstance(flags, Serve):  # whose --out is a file
    command_line.check_place('--out', flags.out or flags.workdir)
  with files.failing_late():
    importlib.import_module(flags.module).write(flags)


def time_candidates(flags: Timing) -> None:
  """Times the candidates of each case; prints, writes and draws the rows."""
  import jax

  from eval_lib import adaptive_plots, benchmark, plots

  if flags.rounds and (load := os.getloadavg()[0]) > BUSY_LOAD:
    print(f'busy machine: load {load:.1f}; results are not comparable')
  constants = {'device': jax.devices()[0].device_kind, 'jax': jax.__version__}
  for name, value in vars(flags).items():
    if isinstance(value, (int, float, str)) and value and name != 'out':
      constants[name] = value
  print(benchmark.label(constants))
  timing: Any = dict(rounds=flags.rounds, warmup=flags.warmup)
  timing['min_seconds'] = getattr(flags, 'min_seconds', 0.0)
  table: list[dict[str, Any]] = []
  bars: dict[str, dict[str, Any]] = {}
  module = importlib.import_module(flags.module)
  with benchmark.Hosts() as hosts:
    for case, candidates in module.cases(flags):
      title = benchmark.label(case)
      if flags.rounds:
        rows, _ = benchmark.run(candidates, case, hosts, **timing)
      else:
        rows = [case | {'candidate': c.name} | c.columns for c in candidates]
      _show(title, rows, TOLERANCE[flags.dtype], getattr(module, 'NOTE', ''))
      table += rows
      for row in rows:
        name, values = _bars(title, case, row)
        bars.setdefault(name, {}).update(values)
  if not flags.out:
    return
  report.write_csv(flags.out, table, constants)
  # Of the candidates that were timed in all cases.
  most = max(map(len, bars.values()))
  bars = {name: one for name, one in bars.items() if len(one) == most}
  with adaptive_plots.if_installed():
    panels = module.panels(table) if hasattr(module, 'panels') else []
    title = 'Speed-up over the baseline' if flags.rounds else 'Counted'
    if panels:
      size = 5.4 * len(panels), 4.2
      plots.draw_panels(flags.out, panels, size, len(panels))
    else:
      adaptive_plots.plot_bars(flags.out, bars, title)
  print(f'written: {flags.out}')


def _bars(
  title: str, case: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
  """Returns the name of a row's bars, and their values by panel."""
  name = row['candidate']
  if 'table' in case:  # its groups have other candidates and share a panel
    name, title = f'Table {case["table"]}: {name}', case['phase']
  if 'speedup' in row:
    return name, {title: row['speedup']}
  counted = {'parameters (M)': 'parameters', 'multiply-adds (G)': 'macs'}
  units = {'parameters': 1e6, 'macs': 1e9}
  return name, {k: row[v] / units[v] for k, v in counted.items()}


def _show(title: str, rows: Rows, tolerance: float, note: str) -> None:
  """Prints a table; warns if an output differs from the first of its group."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  columns = names[names.index('candidate') :]
  if 'baseline' in columns and len({row['baseline'] for row in rows}) == 1:
    columns.remove('baseline')
    title += f'; baseline: {rows[0]["baseline"]}'
  timed = 'median [quartiles] of the rounds' if 'seconds' in names else ''
  note = '; '.join(filter(None, (timed, note)))
  report.print_table(title, rows, note, columns)
  for row in rows:
    if not (row.get('difference') or 0.0) <= tolerance:
      found = f'{row["candidate"]}: output {row["difference"]:.2g} from that'
      print(f'WARNING: {found} of the same weights; expected <= {tolerance:g}')


main = command_line.Command('benchmark', __doc__, FLAGS, run)

if __name__ == '__main__':
  # Guard for spawned processes, which import this module again.
  sys.exit(main())
