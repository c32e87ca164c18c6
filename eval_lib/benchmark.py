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

from eval_lib.hosts import Candidate, Case, Hosts, Timer
from eval_lib.report import Estimate

Samples = Mapping[str, Float[np.ndarray, ' R']]

BUSY_LOAD = 0.5  # average number of running threads


def measure(
  timers: Mapping[str, Timer],
  *,
  rounds: int,
  warmup: int = 0,
  min_seconds: float = 0.0,
  advance: Callable[[float], None] = lambda share: None,
) -> dict[str, Float[np.ndarray, ' R']]:
  """Times functions against each other, in interleaved rounds.

  Args:
    timers: by name; odd rounds take them in reversed order.
    rounds: rounds that count.
    warmup: rounds before them, of one call each.
    min_seconds: calls are repeated to take about as long in each round, by
      their time in the last round of the warm-up.
    advance: called with the finished share of all rounds.

  Returns:
    Seconds per call `[rounds]`, of the timers that never returned None.
  """
  seconds: dict[str, list[float]] = {name: [] for name in timers}
  calls = dict.fromkeys(timers, 1)
  for index in range(warmup + rounds):
    names = list(timers)
    for name in names if index % 2 == 0 else reversed(names):
      taken = timers[name](calls[name])
      if taken is not None and index >= warmup:
        seconds[name].append(taken / calls[name])
      elif taken is not None and index == warmup - 1:
        calls[name] = max(1, int(np.ceil(min_seconds / max(taken, 1e-6))))
    advance((index + 1) / (warmup + rounds))
  return {
    name: np.array(values)
    for name, values in seconds.items()
    if len(values) == rounds
  }


def ratio(samples: Samples, slow: str, fast: str) -> Estimate:
  """Returns how many times as fast as `slow` `fast` is, round by round."""
  return Estimate.of(samples[slow] / samples[fast])


def run(
  candidates: Sequence[Candidate],
  cases: Sequence[Case],
  hosts: Hosts,
  *,
  rounds: int,
  warmup: int = 2,
  min_seconds: float = 0.0,
  over: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
  """Times all candidates in all cases, a case after the other.

  Args:
    candidates: in the order of the rows.
    cases: labels, which become columns.
    hosts: where they run.
    rounds: see `measure`.
    warmup: see `measure`.
    min_seconds: see `measure`.
    over: further columns: speed-ups over the candidates named.

  Returns:
    See `rows`.
  """
  table = []
  with _progress() as advance:
    for case in cases:
      prepared = {one.name: hosts.prepare(one, case) for one in candidates}
      present = [one for one in candidates if prepared[one.name] is not None]
      label = ', '.join(f'{name} {value}' for name, value in case.items())
      samples = measure(
        {one.name: hosts.timer(one, case) for one in present},
        rounds=rounds,
        warmup=warmup,
        min_seconds=min_seconds,
        advance=lambda share, label=label: advance(label, share),
      )
      table += rows(case, present, samples, prepared, over)
  return table


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
    samples: seconds per call, see `measure`.
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
  flops = {one.name: one.flops(case) for one in timed if one.flops}
  first: dict[str, Any] = {}
  table = []
  for one in timed:
    baseline = one.baseline if one.baseline in seconds else best
    speedup = ratio(seconds, baseline, one.name)
    row = {
      **case,
      'candidate': one.name,
      'baseline': baseline,
      'seconds': Estimate.of(seconds[one.name]),
      'flops': None,
      'speedup': speedup,
      'limit': None,
      'share': None,
    }
    if one.name in flops and baseline in flops:
      limit = flops[baseline][0] / flops[one.name][0]
      row |= {
        'flops': flops[one.name][1],
        'limit': limit,
        'share': speedup.median / limit,
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
    (one.name for one in baselines), key=lambda name: np.median(seconds[name])
  )


def busy() -> str:
  """Returns a warning if other programs load the machine, else ''."""
  load = os.getloadavg()[0]
  if load <= BUSY_LOAD:
    return ''
  return f'busy machine: load {load:.1f} before the start; compare nothing'


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
  """Shows a bar for each case on stderr."""
  import rich.console
  import rich.progress

  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(console=console) as bar:
    tasks: dict[str, Any] = {}

    def advance(label: str, share: float) -> None:
      if label not in tasks:
        tasks[label] = bar.add_task(label, total=1.0)
      bar.update(tasks[label], completed=share)

    yield advance
