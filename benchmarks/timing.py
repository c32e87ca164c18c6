"""Times candidates against each other in interleaved rounds.

Machines drift, so candidates take turns, in alternating directions (A B, then
B A), and a ratio is taken within each round. If a candidate's process dies or
hangs, only the results of that process are lost.
"""

import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import gc
import itertools
import math
import multiprocessing
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import rich.console
import rich.progress
from jaxtyping import Float

from eval_lib.report import Estimate
from serve_lib import process
from serve_lib.chain import checked

ENVIRONMENT = {
  'HF_HUB_OFFLINE': '1',
  'TF_CPP_MIN_LOG_LEVEL': '3',
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',  # processes share a GPU
}
SETTLE_SECONDS = 0.02  # thread pools spin for some milliseconds after work
_ERROR_LINES = 30


@dataclasses.dataclass(frozen=True)
class Call:
  run: Any  # the timed function; returned jax arrays are blocked on
  rows: int = 1  # examples that one call processes; seconds are divided by it
  output: Any = None  # compared within the group, or None
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Candidate:
  name: str  # unique in the benchmark
  make: Callable[[], Call]  # can be pickled where `process` is given
  process: str = ''  # to run in, which candidates may share; '' for this one
  is_baseline: bool = False  # the fastest of several is used
  baseline: str = ''  # name of the candidate to compare with instead
  flops: float | None = None  # of an example by formula, for the limit
  group: str = ''  # of candidates that compute the same output; '' for none
  over: str = ''  # column of the speed-ups over this candidate; '' for none
  throughput: str = ''  # column of examples per second; '' for none
  # Known before it runs; 'flops' may differ from the field `flops`.
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_calls: dict[str, Call] = {}  # prepared in this process, by candidate


def _prepare(name: str, make: Callable[[], Call]) -> Call:
  """Makes a call and runs it once; returns it without its function."""
  call = _calls[name] = make()
  _return_memory()
  _take(name, 1)
  output = None if call.output is None else np.asarray(call.output)
  return dataclasses.replace(call, run=None, output=output)


def _return_memory() -> None:
  """Returns what preparing freed, such as a model that was exported."""
  gc.collect()
  process.return_memory()


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


def _start(log: pathlib.Path) -> None:
  """Begins a process: its output goes to a file, it ends with its parent."""
  file = os.open(log, os.O_CREAT | os.O_WRONLY)
  os.dup2(file, 1)
  os.dup2(file, 2)
  process.keep_freed_memory()
  parent: Any = multiprocessing.parent_process()
  end = threading.Thread(target=lambda: os._exit(parent.join() or 1))
  end.daemon = True
  end.start()


def _answer(timeout: float, function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function; at a timeout prints the stacks and ends the process."""
  faulthandler.dump_traceback_later(timeout, exit=True)
  try:
    return function(*args)
  finally:
    faulthandler.cancel_dump_traceback_later()


def in_turn(
  answer: Callable[[Any], Any], items: Sequence[Any], batch: int, **fields: Any
) -> Call:
  """Returns a call that answers the next item at batch 1, else all items."""
  calls = [[item] for item in items] if batch == 1 else [items]
  turns = itertools.cycle(calls)
  return Call(lambda: answer(next(turns)), len(items) // len(calls), **fields)


class Hosts(contextlib.ExitStack):
  """Processes by name, which must answer within `timeout` seconds."""

  def __init__(self, timeout: float = 1800.0):
    super().__init__()
    self._timeout = timeout
    self._folder = self.enter_context(tempfile.TemporaryDirectory())
    self._pools: dict[str, Any] = {}  # None for a lost process

  def ask(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a process; returns None once the process is lost."""
    if not name:
      return function(*args)
    log = pathlib.Path(self._folder, f'{name}.log')
    if name not in self._pools:
      log.touch()
      spawn = multiprocessing.get_context('spawn')
      pool = concurrent.futures.ProcessPoolExecutor(1, spawn, _start, (log,))
      self._pools[name] = self.enter_context(pool)
      # It imports the main module, and so jax, before `_start` runs.
      with mock.patch.dict(os.environ, ENVIRONMENT):
        pool.submit(os.getpid)
    if self._pools[name] is None:
      return None
    try:
      task = self._pools[name].submit(_answer, self._timeout, function, *args)
      return task.result()
    except Exception as error:
      self._pools[name] = None
      # The cause is the traceback of the process.
      printed = f'{log.read_text(errors="replace")}\n{error.__cause__ or ""}'
      print(f'left out: {name}: {type(error).__name__}: {error}')
      print(*printed.strip().splitlines()[-_ERROR_LINES:], sep='\n')
      return None


def label(case: Mapping[str, Any]) -> str:
  """Returns the labels of a case as a title: 'batch 8, mean 0.42'."""
  return ', '.join(f'{name} {value}' for name, value in case.items())


def run(
  candidates: Sequence[Candidate],
  case: Mapping[str, Any],
  hosts: Hosts,
  *,
  rounds: int,
  warmup: int = 0,
  calls: int = 1,
  min_seconds: float = 0.0,
) -> tuple[list[dict[str, Any]], Mapping[str, Float[np.ndarray, 'R C']]]:
  """Prepares and times candidates; returns (see `rows`, seconds of the calls).

  Odd rounds are in reverse order. `warmup` rounds do not count; the last one
  sets the number of calls that take `min_seconds` in a round.
  """
  _return_memory()  # that making the case used
  prepared: dict[str, Any] = {}
  for one in candidates:
    prepared[one.name] = hosts.ask(one.process, _prepare, one.name, one.make)
  wanted = dict.fromkeys(prepared, calls)
  seconds: dict[str, list[Any]] = {name: [] for name in prepared}
  indices, console = range(warmup + rounds), rich.console.Console(stderr=True)
  for index in rich.progress.track(indices, label(case), console=console):
    for one in candidates[:: -1 if index % 2 else 1]:
      taken = hosts.ask(one.process, _take, one.name, wanted[one.name])
      if taken is not None and index >= warmup:
        seconds[one.name].append(taken)
      elif taken is not None and index == warmup - 1:
        enough = math.ceil(min_seconds / max(taken.mean(), 1e-6))
        wanted[one.name] = max(calls, enough)
  _calls.clear()  # frees the weights before the next case
  samples = {n: np.array(s) for n, s in seconds.items() if len(s) == rounds}
  return rows(case, candidates, samples, prepared), samples


def rows(
  case: Mapping[str, Any],
  candidates: Sequence[Candidate],
  samples: Mapping[str, Float[np.ndarray, 'R C']],
  calls: Mapping[str, Call],
) -> list[dict[str, Any]]:
  """Returns a row for each candidate that was timed.

  `seconds` of an example and `speedup` over the baseline are an `Estimate`;
  `limit` is the speed-up that FLOPs allow, `share` the reached part of it,
  `difference` the largest absolute one from the first output of the group.
  Raises ValueError if no baseline was timed.
  """
  timed = {c.name: c for c in candidates if c.name in samples}
  seconds = {name: samples[name].mean(1) / calls[name].rows for name in timed}
  legal = [name for name, c in timed.items() if c.is_baseline]
  if not legal:
    raise ValueError('no baseline was timed; there is nothing to compare with')
  best = min(legal, key=lambda name: np.median(seconds[name]))
  first: dict[str, Any] = {}
  table = []
  for name, candidate in timed.items():
    call = calls[name]
    baseline = candidate.baseline if candidate.baseline in timed else best
    speedup = Estimate.of(seconds[baseline] / seconds[name])
    most = timed[baseline].flops
    limit = most / candidate.flops if most and candidate.flops else None
    row = {
      **case,
      'candidate': name,
      'baseline': baseline,
      'seconds': Estimate.of(seconds[name]),
      'flops': candidate.flops,
      'speedup': speedup,
      'limit': limit,
      'share': speedup.median / limit if limit else None,
    }
    for slow in candidates:
      if slow.over and slow.name in timed:
        row[slow.over] = Estimate.of(seconds[slow.name] / seconds[name])
    if candidate.throughput:
      row[candidate.throughput] = Estimate.of(1.0 / seconds[name])
    if candidate.group and call.output is not None:
      reference = first.setdefault(candidate.group, call.output)
      row['difference'] = float(np.abs(call.output - reference).max())
    table.append(row | dict(candidate.columns) | dict(call.columns))
  return table


def log_probabilities(answers: Sequence[Any]) -> Float[np.ndarray, 'B C']:
  """Returns log-probabilities; raises RuntimeError for a `Failure`."""
  return np.log([list(x.probabilities.values()) for x in checked(answers)])
