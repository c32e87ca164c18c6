"""Times candidates against each other in interleaved rounds.

Machines drift, so candidates take turns, in alternating directions (A B, then
B A), after a warm-up that compiles; a ratio is taken within each round. In its
own process a library cannot slow down another, and a process that dies or
hangs loses its own results only. jax is not imported here, because its settings
in the environment of such a process are read at its import.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from eval_lib.report import Estimate

# Seconds `[calls]` of each of `calls` calls; None if they could not be timed.
Timer = Callable[[int], Float[np.ndarray, ' C'] | None]
# Seconds of each call, a row for each round.
Samples = Mapping[str, Float[np.ndarray, 'R C']]

SETTLE_SECONDS = 0.02  # thread pools spin for some milliseconds after work
_ERROR_LINES = 12


@dataclasses.dataclass(frozen=True)
class Call:
  """A prepared candidate."""

  run: Any  # is timed; arrays of jax that it returns are waited for
  rows: int = 1  # examples that one call processes; seconds are divided by it
  output: Any = None  # compared with those of the group, or None
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Candidate:
  """Something to time.

  `flops` are (every block once and in full, computed) per example by formula;
  the first gives the limit of the speed-up. None without a formula.
  """

  name: str  # unique in the benchmark
  make: Callable[[], Call]  # can be pickled where `process` is given
  process: str = ''  # to run in, which candidates may share; '' for this one
  is_baseline: bool = False  # of several, the one with the smallest median is
  baseline: str = ''  # name of the candidate to compare with instead
  flops: tuple[float, float] | None = None
  group: str = ''  # of candidates that compute the same output; '' for none


# -- processes -----------------------------------------------------------------

_calls: dict[str, Call] = {}  # prepared in this process, by candidate


def _prepare(name: str, make: Callable[[], Call]) -> Call:
  """Makes a call and runs it once; returns it without its function."""
  call = _calls[name] = make()
  _take(name, 1)
  output = None if call.output is None else np.asarray(call.output)
  return dataclasses.replace(call, run=None, output=output)


def _take(name: str, calls: int) -> Float[np.ndarray, ' C']:
  time.sleep(SETTLE_SECONDS)
  seconds = []
  for _ in range(calls):
    started = time.perf_counter()
    result = _calls[name].run()
    if 'jax' in sys.modules:
      sys.modules['jax'].block_until_ready(result)
    seconds.append(time.perf_counter() - started)
  return np.array(seconds)


def _start(log: pathlib.Path, environment: Mapping[str, str]) -> None:
  """Begins a process: its output goes to a file, it ends with its parent."""
  os.environ.update(environment)
  with log.open('wb') as file:
    for stream in (1, 2):
      os.dup2(file.fileno(), stream)
  parent: Any = multiprocessing.parent_process()
  end = threading.Thread(target=lambda: os._exit(parent.join() or 1))
  end.daemon = True
  end.start()


class Hosts:
  """The processes of a benchmark by name; a context that ends them.

  Each answer must come within `timeout` seconds. `environment` are variables of
  the processes.
  """

  def __init__(
    self, timeout: float = 1800.0, environment: Mapping[str, str] | None = None
  ):
    self._timeout, self._environment = timeout, dict(environment or {})
    self._pools: dict[str, concurrent.futures.ProcessPoolExecutor] = {}
    self._pids: dict[str, int] = {}
    self._lost: set[str] = set()

  def __enter__(self) -> 'Hosts':
    self._folder = tempfile.TemporaryDirectory(prefix='benchmark_')
    return self

  def __exit__(self, *error: object) -> None:
    for pool in self._pools.values():
      pool.shutdown()
    self._folder.cleanup()

  def ask(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
    """Calls a function in a process; returns None once the process is lost."""
    if not name:
      return function(*given)
    if name in self._lost:
      return None
    log = pathlib.Path(self._folder.name, f'{name}.log')
    try:
      if name not in self._pools:
        self._pools[name] = concurrent.futures.ProcessPoolExecutor(
          1, multiprocessing.get_context('spawn'), _start,
          (log, self._environment),
        )  # fmt: skip
        self._pids[name] = self._pools[name].submit(os.getpid).result()
      return self._pools[name].submit(function, *given).result(self._timeout)
    except Exception as error:
      self._lost.add(name)
      what = f'{type(error).__name__}: {error}'
      if isinstance(error, TimeoutError):
        what = f'no answer in {self._timeout:.0f} s'
        os.kill(self._pids[name], signal.SIGKILL)
      printed = log.read_text(errors='replace') if log.exists() else ''
      # The cause is the traceback of the process.
      lines = f'{printed}\n{error.__cause__ or ""}'.strip().splitlines()
      print(f'left out: {name}: {what}', *lines[-_ERROR_LINES:], sep='\n')
      return None


# -- times ---------------------------------------------------------------------


def measure(
  timers: Mapping[str, Timer],
  *,
  rounds: int,
  warmup: int = 0,
  calls: int = 1,
  min_seconds: float = 0.0,
  advance: Callable[[float], None] = lambda share: None,
) -> dict[str, Float[np.ndarray, 'R C']]:
  """Returns the seconds of calls, timed in interleaved rounds.

  Odd rounds take the timers in reversed order. A timer that returns None is
  left out of the result.

  Args:
    timers: by name.
    rounds: that count, after those of `warmup`.
    warmup: rounds.
    calls: of each timer in a round.
    min_seconds: of a round; the last round of the warm-up tells how many calls
      take as long.
    advance: called with the finished share of all rounds.
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
  complete = {n: taken for n, taken in seconds.items() if len(taken) == rounds}
  return {name: np.array(taken) for name, taken in complete.items()}


def run(
  candidates: Sequence[Candidate],
  case: Mapping[str, Any],
  hosts: Hosts,
  over: Mapping[str, str] | None = None,
  **timing: Any,
) -> tuple[list[dict[str, Any]], Samples]:
  """Prepares and times candidates, with a bar on stderr.

  `case` are labels such as the batch size, by column; `timing` are arguments of
  `measure`. Returns (see `rows`, seconds of the calls), without those of lost
  processes.
  """
  import rich.console
  import rich.progress

  calls, timers = {}, {}
  for name, process, make in ((c.name, c.process, c.make) for c in candidates):
    calls[name] = hosts.ask(process, _prepare, name, make)
    if calls[name] is not None:
      timers[name] = functools.partial(hosts.ask, process, _take, name)
  label = ', '.join(f'{name} {value}' for name, value in case.items())
  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(console=console) as bar:
    task = bar.add_task(label, total=1.0)
    samples = measure(
      timers, advance=lambda share: bar.update(task, completed=share), **timing
    )
  return rows(case, candidates, samples, calls, over), samples


def tables(
  cases: Iterable[tuple[Mapping[str, Any], Sequence[Candidate]]],
  settings: Mapping[str, Any],
  over: Mapping[str, str] | None = None,
  environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
  """Returns the rows of cases: (labels, candidates); see `run`.

  `settings` has some of 'rounds', 'warmup' and 'min_seconds'.
  """
  names = {'rounds', 'warmup', 'min_seconds'} & {*settings}
  timing, table = {name: settings[name] for name in names}, []
  with Hosts(environment=environment) as hosts:
    for case, candidates in cases:
      table += run(candidates, case, hosts, over, **timing)[0]
  return table


def ratio(samples: Samples, slow: str, fast: str) -> Estimate:
  """Returns how many times as fast as `slow` `fast` is, round by round."""
  return Estimate.of(samples[slow].mean(1) / samples[fast].mean(1))


def rows(
  case: Mapping[str, Any],
  candidates: Sequence[Candidate],
  samples: Samples,
  calls: Mapping[str, Call],
  over: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
  """Returns a row for each candidate that was timed.

  Columns: those of the case, `candidate`, its `baseline`, `seconds` of an
  example and `speedup` over the baseline as `Estimate`, `flops` that are
  computed, the `limit` of the speed-up by FLOPs and the reached `share` of it,
  speed-ups over the candidates that `over` names by column, the largest
  `difference` of the output to that of the first of the group, and those of
  the call. Raises ValueError if no baseline was timed.
  """
  timed = {one.name: one for one in candidates if one.name in samples}
  seconds = {name: samples[name] / calls[name].rows for name in timed}
  legal = [name for name, one in timed.items() if one.is_baseline]
  if not legal:
    raise ValueError('no baseline was timed; there is nothing to compare with')
  best = min(legal, key=lambda name: np.median(seconds[name].mean(1)))
  first: dict[str, Any] = {}
  table = []
  for name, one in timed.items():
    call, cost = calls[name], one.flops
    baseline = one.baseline if one.baseline in timed else best
    other, speedup = timed[baseline].flops, ratio(seconds, baseline, name)
    limit = other[0] / cost[0] if cost and other else None
    row = {
      **case,
      'candidate': name,
      'baseline': baseline,
      'seconds': Estimate.of(seconds[name].mean(1)),
      'flops': cost[1] if cost else None,
      'speedup': speedup,
      'limit': limit,
      'share': speedup.median / limit if limit else None,
    }
    for column, slow in (over or {}).items():
      row[column] = ratio(seconds, slow, name) if slow in timed else None
    if one.group and call.output is not None:
      reference = first.setdefault(one.group, call.output)
      row['difference'] = float(np.abs(call.output - reference).max())
    table.append(row | dict(call.columns))
  return table
