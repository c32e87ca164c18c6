"""Times candidates against each other in interleaved rounds.

A benchmark is a list of cases (labels such as the batch size) and of
candidates. Machines drift, so candidates are timed in rounds, in alternating
directions (A B, then B A), after a warm-up that compiles; a ratio is taken
within each round, where both sides met the same machine.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from eval_lib import report
from eval_lib.hosts import Candidate, Case, Hosts, Timer
from eval_lib.report import Estimate

# Seconds of each call, a row for each round.
Samples = Mapping[str, Float[np.ndarray, 'R C']]

BUSY_LOAD = 0.5  # average number of running threads


def measure(
  timers: Mapping[str, Timer],
  *,
  rounds: int,
  warmup: int = 0,
  calls: int = 1,
  min_seconds: float = 0.0,
  advance: Callable[[float], None] = lambda share: None,
) -> dict[str, Float[np.ndarray, 'R C']]:
  """Times functions against each other, in interleaved rounds.

  Args:
    timers: by name; odd rounds take them in reversed order.
    rounds: rounds that count.
    warmup: rounds before them.
    calls: calls of each function in a round.
    min_seconds: more calls are made to take about as long in each round, by
      the last round of the warm-up.
    advance: called with the finished share of all rounds.

  Returns:
    Seconds of the calls, of the timers that never returned None.
  """
  seconds: dict[str, list[Any]] = {name: [] for name in timers}
  wanted = dict.fromkeys(timers, calls)
  for index in range(warmup + rounds):
    names = list(timers)
    for name in names if index % 2 == 0 else reversed(names):
      taken = timers[name](wanted[name])
      if taken is not None and index >= warmup:
        seconds[name].append(taken)
      elif taken is not None and index == warmup - 1:
        enough = np.ceil(min_seconds / max(taken.mean(), 1e-6))
        wanted[name] = max(calls, int(enough))
    advance((index + 1) / (warmup + rounds))
  return {
    name: np.array(values)
    for name, values in seconds.items()
    if len(values) == rounds
  }


def ratio(samples: Samples, slow: str, fast: str) -> Estimate:
  """Returns how many times as fast as `slow` `fast` is, round by round."""
  return Estimate.of(samples[slow].mean(1) / samples[fast].mean(1))


def run(
  candidates: Sequence[Candidate],
  cases: Sequence[Case],
  hosts: Hosts,
  over: Mapping[str, str] | None = None,
  **timing: Any,
) -> list[dict[str, Any]]:
  """Times all candidates in all cases, a case after the other.

  Args:
    candidates: in the order of the rows.
    cases: labels, which become columns.
    hosts: where they run.
    over: further columns: speed-ups over the candidates named.
    **timing: `rounds` and further arguments of `measure`.

  Returns:
    See `rows`.
  """
  table = []
  for case in cases:
    prepared, samples = time_case(candidates, case, hosts, **timing)
    table += rows(case, candidates, samples, prepared, over)
  return table


def time_case(
  candidates: Sequence[Candidate], case: Case, hosts: Hosts, **timing: Any
) -> tuple[dict[str, Any], dict[str, Float[np.ndarray, 'R C']]]:
  """Prepares and times all candidates in a case.

  Args:
    candidates: in the order of the first round.
    case: labels.
    hosts: where they run.
    **timing: `rounds` and further arguments of `measure`.

  Returns:
    (the answers of `Host.prepare` by name, see `measure`).
  """
  prepared = {one.name: hosts.prepare(one, case) for one in candidates}
  timers = {
    one.name: hosts.timer(one, case)
    for one in candidates
    if prepared[one.name] is not None
  }
  label = ', '.join(f'{name} {value}' for name, value in case.items())
  with _progress(label) as advance:
    samples = measure(timers, advance=advance, **timing)
  return prepared, samples


def rows(
  case: Case,
  candidates: Sequence[Candidate],
  samples: Samples,
  prepared: Mapping[str, Any],
  over: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
  """Returns a row for each candidate that was timed.

  Args:
    case: labels.
    candidates: in the order of the rows.
    samples: see `measure`.
    prepared: of `Host.prepare`, by name.
    over: see `run`.

  Returns:
    The columns of the case, `candidate`, its `baseline`, `seconds` of an
    example and `speedup` over the baseline as `Estimate`, `flops` that are
    computed, the `limit` of the speed-up by FLOPs and the reached `share` of
    it, those of `over`, the largest `difference` of the output to that of the
    first of the group, and those of the call.

  Raises:
    ValueError: no baseline was timed.
  """
  timed = [one for one in candidates if one.name in samples]
  seconds = {
    one.name: samples[one.name] / prepared[one.name]['rows'] for one in timed
  }
  best = _best([one for one in timed if one.is_baseline], seconds)
  flops = {
    one.name: prepared[one.name].get('flops') or one.flops for one in timed
  }
  first: dict[str, Any] = {}
  table = []
  for one in timed:
    baseline = one.baseline if one.baseline in seconds else best
    speedup = ratio(seconds, baseline, one.name)
    cost, other = flops[one.name], flops[baseline]
    limit = other[0] / cost[0] if cost and other else None
    row = {
      **case,
      'candidate': one.name,
      'baseline': baseline,
      'seconds': Estimate.of(seconds[one.name].mean(1)),
      'flops': cost[1] if cost else None,
      'speedup': speedup,
      'limit': limit,
      'share': speedup.median / limit if limit else None,
    }
    for column, name in (over or {}).items():
      known = name in seconds
      row[column] = ratio(seconds, name, one.name) if known else None
    output = prepared[one.name]['output']
    if one.group and output is not None:
      reference = first.setdefault(one.group, output)
      row['difference'] = float(np.abs(output - reference).max())
    table.append(row | prepared[one.name]['columns'])
  return table


def _best(baselines: Sequence[Candidate], seconds: Samples) -> str:
  if not baselines:
    raise ValueError('no baseline was timed; there is nothing to compare with')
  return min(
    (one.name for one in baselines),
    key=lambda name: np.median(seconds[name].mean(1)),
  )


def busy() -> str:
  """Returns a warning line if other programs load the machine, else ''."""
  load = os.getloadavg()[0]
  if load <= BUSY_LOAD:
    return ''
  return f'busy machine: load {load:.1f} before the start; compare nothing\n'


def show(table: report.Rows, tolerance: float) -> None:
  """Prints a table for each case, empty columns left out.

  Args:
    table: see `rows`.
    tolerance: larger differences of outputs within a group are reported.
  """
  cases: dict[str, list[Mapping[str, Any]]] = {}
  for row in table:
    cases.setdefault(_case(row), []).append(row)
  for case, same in cases.items():
    baselines = dict.fromkeys(row['baseline'] for row in same)
    names = list(dict.fromkeys(name for row in same for name in row))
    names = names[names.index('candidate') :]
    hidden = {'baseline'} if len(baselines) == 1 else set()
    names = [
      name
      for name in names
      if name not in hidden and any(row.get(name) is not None for row in same)
    ]
    report.print_table(
      f'{case}; baseline: {next(iter(baselines))}',
      [report.readable(row, names) for row in same],
      'median [quartiles] of the rounds',
    )
  for row in table:
    if not (row.get('difference') or 0.0) <= tolerance:
      print(
        f'WARNING: {row["candidate"]}: output {row["difference"]:.2g} from '
        f'that of the same weights; expected at most {tolerance:.2g}'
      )


def draw(path: str | os.PathLike[str], table: report.Rows) -> None:
  """Draws the speed-ups of the candidates that have a part in all cases."""
  from eval_lib import adaptive_plots

  bars: dict[str, dict[str, Any]] = {}
  for row in table:
    bars.setdefault(row['candidate'], {})[_case(row)] = row['speedup']
  panels = max(map(len, bars.values()))
  bars = {name: one for name, one in bars.items() if len(one) == panels}
  title = 'Speed-up over the baseline'
  try:
    adaptive_plots.plot_ablation(path, bars, title=title)
  except ImportError as error:
    print(f'no picture: {error}')


def _case(row: Mapping[str, Any]) -> str:
  """Returns the labels of a row: its columns before the candidate."""
  names = list(row)[: list(row).index('candidate')]
  return ', '.join(f'{name} {row[name]}' for name in names)


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[float], None]]:
  """Shows a bar on stderr."""
  import rich.console
  import rich.progress

  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(console=console) as bar:
    task = bar.add_task(label, total=1.0)
    yield lambda share: bar.update(task, completed=share)
