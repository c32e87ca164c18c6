"""What the commands share: their flags, candidates in turns, reports."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import jax
from annotated_types import Interval, Predicate

from benchmarks import pictures, timing
from core import files
from core.errors import ConfigError
from core.fields import flag
from eval_lib import plots, report
from eval_lib.report import Rows
from launch import command_line
from launch.command_line import Count, Positive, Sizes
from serve_lib import process

TURNS = """
Candidates take turns; values are `median [first quartile, third quartile]` of
the rounds, ratios are taken within each round. `limit` is the ratio of FLOPs.
`--out` also writes a CSV file and a picture. All cores are used: restrict them
with taskset.
"""
ROUNDS = '--rounds --repeats'
BUSY_LOAD = 0.5  # average number of running threads
TOLERANCE = {'float32': 1e-4, 'bfloat16': 5e-2}  # of outputs of a group


def _is_writable(text: str) -> bool:
  path = pathlib.Path(text).absolute()
  can_write = path.parent.is_dir() and os.access(path.parent, os.W_OK)
  return not text or (not path.is_dir() and can_write)


Share = Annotated[float, Interval(gt=0.0, lt=1.0)]
# 1 is certified where probabilities are rounded to it.
Confidence = Annotated[float, Interval(gt=0.0, le=1.0)]
Length = Annotated[int, Interval(ge=1, le=512)]  # tokens of a BERT
File = Annotated[
  str, Predicate(_is_writable), 'file in a directory that is writable'
]
Seconds = Annotated[float, Interval(gt=0, lt=1e9)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
  rounds: Positive = flag('timed rounds', 10, names=ROUNDS)
  warmup: Count = flag('rounds before the timed ones', 2)
  dtype: Literal['float32', 'bfloat16'] = flag('compute dtype', 'float32')
  out: File = flag('writes the rows here, a picture beside it', '', 'FILE.csv')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(command_line.RunFlags):
  out: str = flag('where to write', metavar='DIRECTORY')
  split: str = flag("split; default: that of the run's evaluation", '')
  rows: Positive = flag('most rows, spread evenly over the split', 2000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """Flags of trained EATs in the engine beside other libraries."""

  tau: Confidence = flag('confidence threshold of the EAT', 0.9)
  batch_size: Positive = flag('rows of a full batch', 32)
  lengths: Sizes | None = flag(
    "length buckets of batches (default: the run's)", None, 'TOKENS,...'
  )
  peers: tuple[Literal['torch', 'onnx', 'none'], ...] = flag(
    'installed libraries that also run the dense models; or none',
    ('torch', 'onnx'),
  )


def reporting(
  name: str, text: str | None, flags: Any, write: Callable[[Any], None]
) -> command_line.Command:
  """Returns a command that writes a report into a new file or a folder."""

  def run(flags: Any) -> None:
    process.own_process()  # as launch.predict and launch.serve do
    if isinstance(flags, Run):
      command_line.check_place('--out', flags.out or flags.workdir)
    with files.failing_late():
      write(flags)

  return command_line.Command(name, text, flags, run, 'benchmarks')


def timed(
  name: str,
  text: str | None,
  flags: Any,
  cases: Callable[[Any], Iterable[tuple[Any, Any]]],
  panels: Callable[[Rows], list[plots.Panel]] = lambda table: [],
  note: str = '',
  documented: Callable[[Any], dict[str, Any]] | None = None,
) -> command_line.Command:
  """Returns a command that times the candidates of `cases(flags)` in turns.

  A case is its labels and candidates. `panels` of all rows are drawn, bars
  where there are none. `--results` gets the `documented` form of each row.
  """

  def run(flags: Any) -> None:
    process.own_process()
    try:
      table = _measure(flags, cases(flags), note)
    except ConfigError as error:
      command_line.fail(f'--{error}')
    if flags.out:
      with plots.if_installed():
        _draw(flags, table, panels(table))
      print(f'written: {flags.out}')
    if documented and flags.results:
      report.write_csv(flags.results, [*map(documented, table)])

  return command_line.Command(name, f'{text}{TURNS}', flags, run, 'benchmarks')


def write_tables(folder: pathlib.Path, tables: Iterable[report.Table]) -> None:
  """Writes tables as CSV files, and prints the ones that have a title."""
  for table in tables:
    report.write_csv(folder / f'{table.name}.csv', table.rows)
    if table.title:
      report.print_table(*table[1:])


def _measure(
  flags: Any, cases: Iterable[tuple[Any, Any]], note: str
) -> list[dict[str, Any]]:
  if flags.rounds and (load := os.getloadavg()[0]) > BUSY_LOAD:
    print(f'busy machine: load {load:.1f}; results are not comparable')
  constants = {'device': jax.devices()[0].device_kind, 'jax': jax.__version__}
  for name, value in vars(flags).items():
    if isinstance(value, (int, float, str)) and value and name != 'out':
      constants[name] = value
  print(timing.label(constants))
  lengths = 'rounds', 'warmup', 'min_seconds'
  length = {k: v for k, v in vars(flags).items() if k in lengths}
  table: list[dict[str, Any]] = []
  with timing.Hosts() as hosts:
    for case, candidates in cases:
      if flags.rounds:
        rows, _ = timing.run(candidates, case, hosts, **length)
      else:
        rows = [case | {'candidate': c.name} | c.columns for c in candidates]
      _show(timing.label(case), rows, TOLERANCE[flags.dtype], note)
      table += rows
  if flags.out:
    report.write_csv(flags.out, table, constants)
  return table


def _draw(flags: Any, table: Rows, panels: list[plots.Panel]) -> None:
  if panels:
    size = 4.5 * len(panels), 3.8
    plots.draw_panels(flags.out, panels, size, len(panels))
    return
  bars: dict[str, dict[str, Any]] = {}
  for row in table:
    names, name = [*row], row['candidate']
    case = {key: row[key] for key in names[: names.index('candidate')]}
    title = timing.label(case)
    if 'table' in case:  # its groups have other candidates and share a panel
      name, title = f'Table {case["table"]}: {name}', case['phase']
    bar = bars.setdefault(name, {})
    if 'speedup' in row:
      bar[title] = row['speedup']
    else:
      bar['parameters (M)'] = row['parameters'] / 1e6
      bar['multiply-adds (G)'] = row['macs'] / 1e9
  # Of the candidates that were timed in all cases.
  most = max(map(len, bars.values()))
  bars = {name: bar for name, bar in bars.items() if len(bar) == most}
  title = 'Speed-up over the baseline' if flags.rounds else 'Counted'
  pictures.plot_bars(flags.out, bars, title)


def _show(title: str, rows: Rows, tolerance: float, note: str) -> None:
  """Prints a table; warns if an output differs from the first of its group."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  columns = names[names.index('candidate') :]
  if 'baseline' in columns and len({row['baseline'] for row in rows}) == 1:
    columns.remove('baseline')
    title += f'; baseline: {rows[0]["baseline"]}'
  median = 'median [quartiles] of the rounds' if 'seconds' in names else ''
  note = '; '.join(filter(None, (median, note)))
  report.print_table(title, rows, note, columns)
  for row in rows:
    if not (row.get('difference') or 0.0) <= tolerance:
      print(
        f'WARNING: {row["candidate"]}: output {row["difference"]:.2g} from '
        f'that of the same weights; expected <= {tolerance:g}'
      )
