"""Latency and goodput of a trained EAT and dense models under load.

  python -m benchmarks.serve --workdir=/tmp/sst2_eat --dense=/tmp/sst2

Rows arrive at times drawn before, from which latencies count: a slow server
does not slow its load (open loop; Schroeder et al. 2006, "Open versus closed").
The rows of the split are sent as token ids, in turn, to the EAT and the dense
run in the engine, and to the dense run in other libraries, with the same
largest batch, without HTTP. The engine sorts rows into length buckets; a
library runs the rows that are due, padded to the longest.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import queue
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from benchmarks import command, peers, pictures, recorded_runs
from benchmarks.timing import Hosts
from core.fields import flag
from eval_lib import plots, report
from launch.command_line import Positive, Sizes
from model_lib import convert
from serve_lib.chain import checked

BURSTS = {'Poisson': 1.0, 'bursty': 8.0}  # mean rows of a burst
MIN_ROWS = 100  # of a measurement
PERCENTS = (50, 95, 99)
Seconds = Float[np.ndarray, ' N']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Served):
  workdir: str = flag('a run of an EAT', metavar='DIRECTORY')
  dense: str = flag('a dense run on the same data', metavar='DIRECTORY')
  out: command.File = flag(
    'writes the rows here, a picture beside it', '', 'FILE.csv'
  )
  split: str = flag("split; default: that of the run's evaluation dev", '')
  rows: Positive = flag('first rows of the split to send, in turn', 1000)
  loads: Sizes = flag('% of capacity', (10, 30, 50, 70, 80, 90, 100, 110, 120))
  seconds: command.Seconds = flag('of each measurement', 10.0)
  deadline_ms: command.Seconds = flag('of the goodput', 200.0, 'MILLISECONDS')


def arrivals(rate: float, count: int, burst: float, seed: int = 0) -> Seconds:
  """Returns ascending times in seconds, on average `rate` per second.

  Bursts are a Poisson process and have geometric sizes of mean `burst`: the
  variance of the rows in an interval is 2 * burst - 1 times their mean.
  """
  draw = np.random.default_rng(seed)
  starts = np.cumsum(draw.exponential(burst / rate, count))
  return np.repeat(starts, draw.geometric(1.0 / burst, count))[:count]


def offer(submit: Any, rows: Sequence[Any], times: Seconds) -> Seconds:
  """Submits rows, in turn, at times in seconds; returns the latencies."""
  ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

  def end(number: int, future: concurrent.futures.Future) -> None:
    ended.put((number, time.perf_counter(), future))

  start = time.perf_counter() + 0.01
  for number, at in enumerate(times):
    if (wait := start + at - time.perf_counter()) > 0:
      time.sleep(wait)
    future = submit(rows[number % len(rows)])
    future.add_done_callback(functools.partial(end, number))
  latencies = -start - times
  for _ in times:
    number, now, future = ended.get()
    checked([future.result()])
    latencies[number] += now
  return latencies


def offer_batches(
  function: Any, batch: int, rows: Sequence[Any], times: Seconds
) -> Seconds:
  """As `offer`, for a function of the rows that are due, `batch` at most."""
  start, latencies, first = time.perf_counter(), np.zeros_like(times), 0
  while first < len(times):
    if (wait := start + times[first] - time.perf_counter()) > 0:
      time.sleep(wait)
    due = np.searchsorted(times, time.perf_counter() - start, 'right')
    last = int(np.clip(due, first + 1, first + batch))
    function([rows[number % len(rows)] for number in range(first, last)])
    now = time.perf_counter() - start
    latencies[first:last] = now - times[first:last]
    first = last
  return latencies


def offer_library(library: str, weights: str, *rows: Any) -> Seconds:
  return offer_batches(peers.classifier(library, weights), *rows)


def measure(
  candidates: Mapping[str, tuple[str, Callable[[Seconds], Seconds]]],
  hosts: Hosts, rows: int, flags: Any,
) -> list[dict[str, Any]]:  # fmt: skip
  """Measures the capacities, then all candidates in turns at each load.

  `candidates` are (process of `hosts`, server) by name. The capacity is the
  rate when `rows` rows arrive at once, the second time. `goodput` is the rate
  of the answers within the deadline.
  """
  capacity: dict[str, float] = {}
  table: list[dict[str, Any]] = []
  for _, name in itertools.product(range(2), candidates):
    latencies = hosts.ask(*candidates[name], np.zeros(rows))
    if latencies is not None:
      capacity[name] = rows / float(latencies.max())
  for kind, load, name in itertools.product(BURSTS, flags.loads, capacity):
    rate = load / 100 * capacity[name]
    count = max(MIN_ROWS, round(rate * flags.seconds))
    times = arrivals(rate, count, BURSTS[kind])
    if (latencies := hosts.ask(*candidates[name], times)) is None:
      continue
    rate = count / float(times[-1])
    table.append({
      'arrivals': kind, 'load': load, 'candidate': name,
      'capacity': capacity[name], 'rate': rate,
      **{f'latency_p{p}': float(np.percentile(latencies, p)) for p in PERCENTS},
      'goodput': rate * float((1e3 * latencies <= flags.deadline_ms).mean()),
    })  # fmt: skip
  return table


def draw(path: plots.Path, table: report.Rows) -> None:
  panels = []
  labels = {'latency_p95': 'p95 latency (s)', 'goodput': 'goodput (rows/s)'}
  for (column, label), kind in itertools.product(labels.items(), BURSTS):
    rows = [row for row in table if row['arrivals'] == kind]
    panels.append(plots.Panel(
      f'{kind} arrivals', label, 'rate (rows/s)',
      pictures.lines(rows, 'rate', column),
      log='xy' if 'latency' in column else 'x',
    ))  # fmt: skip
  plots.draw_panels(path, panels, (10.8, 7.4), 2)


def write(flags: Any) -> None:
  of: Any = dict(split=flags.split, limit=flags.rows, lengths=flags.lengths)
  servers: dict[str, Any] = {}
  rows: list[Any] = []
  with contextlib.ExitStack() as stack:
    for name, flag, options in (
      ('EAT', 'workdir', {'tau': flags.tau}), ('dense', 'dense', {})
    ):  # fmt: skip
      directory = getattr(flags, flag)
      run = recorded_runs.load(
        name, directory, f'--{flag}', serve=options, **of
      )
      run.policy.monitor.drift = None  # it would send rows to full depth
      rows = rows or run.items(range(len(run.fitted)))
      submit = stack.enter_context(run.start(flags.batch_size)).submit
      servers[f'{name}, engine'] = '', functools.partial(offer, submit, rows)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    params = run.policy.chain.variables['params']
    convert.save_model(folder, run.module, params)
    for library in peers.usable(flags.peers):
      name = f'dense, {peers.TITLES[library]}'
      sent = library, folder, flags.batch_size, rows
      servers[name] = name, functools.partial(offer_library, *sent)
    hosts = stack.enter_context(Hosts())
    table = measure(servers, hosts, len(rows), flags)
  report.print_table('under load', table, columns=list(table[0]))
  if flags.out:
    report.write_csv(flags.out, table, {'deadline_ms': flags.deadline_ms})
    with plots.if_installed():
      draw(flags.out, table)


main = command.reporting('serve', __doc__, Flags, write)

if __name__ == '__main__':
  raise SystemExit(main())
