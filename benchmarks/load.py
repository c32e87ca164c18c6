"""Latency and goodput of servers under load as it comes.

Rows arrive at times drawn before, from which latencies count: a slow server
does not slow its load (open loop; Schroeder et al. 2006, "Open versus closed").
Shared: rows, rates and the largest batch, without HTTP; no server waits while
it is idle. The engine takes each row when it is due and sorts rows into length
buckets. A library runs the rows that are due, padded to the longest.
"""

import concurrent.futures
import functools
import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from benchmarks import peers
from benchmarks.timing import Hosts
from eval_lib import plots
from serve_lib.chain import checked

BURSTS = {'Poisson': 1.0, 'bursty': 8.0}  # mean rows of a burst
MIN_ROWS = 100  # of a measurement
PERCENTS = (50, 95, 99)
Seconds = Float[np.ndarray, ' N']
Server = Callable[[Seconds], Seconds]  # of the arrivals of rows to latencies


def arrivals(rate: float, count: int, burst: float, seed: int = 0) -> Seconds:
  """Returns ascending times in seconds, on average `rate` per second.

  Bursts are a Poisson process and have geometric sizes of mean `burst`: the
  variance of the rows in an interval is 2 * burst - 1 times their mean.
  """
  draw = np.random.default_rng(seed)
  starts = np.cumsum(draw.exponential(burst / rate, count))
  return np.repeat(starts, draw.geometric(1.0 / burst, count))[:count]


def offer(
  submit: Callable[[Any], concurrent.futures.Future],
  rows: Sequence[Any],
  times: Seconds,
) -> Seconds:
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
  function: Callable[[list[Any]], Any],
  batch: int,
  rows: Sequence[Any],
  times: Seconds,
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


def offer_library(library: str, weights: str, *given: Any) -> Seconds:
  """As `offer_batches`, for a library; see `peers.classifier`."""
  return offer_batches(peers.classifier(library, weights), *given)


def measure(
  candidates: Mapping[str, tuple[str, Server]],
  hosts: Hosts,
  *,
  loads: Sequence[int],
  seconds: float,
  deadline: float,
  rows: int,
) -> list[dict[str, Any]]:
  """Measures the capacities, then all candidates in turns at each load.

  `candidates` are by name, each with its process of `hosts`. `loads` are
  percents of the capacity of each, its rate when `rows` rows arrive at once,
  the second time. `seconds` is the length of a measurement, `goodput` the rate
  of the answers within `deadline` seconds.
  """

  def ask(name: str, times: Seconds) -> Any:
    process, server = candidates[name]
    return hosts.ask(process, server, times)

  capacity: dict[str, float] = {}
  table: list[dict[str, Any]] = []
  for _, name in itertools.product(range(2), candidates):
    if (found := ask(name, np.zeros(rows))) is not None:
      capacity[name] = rows / float(found.max())
  for kind, load, name in itertools.product(BURSTS, loads, capacity):
    rate = load / 100 * capacity[name]
    count = max(MIN_ROWS, round(rate * seconds))
    times = arrivals(rate, count, BURSTS[kind])
    if (found := ask(name, times)) is None:
      continue
    rate = count / float(times[-1])
    row: dict[str, Any] = dict(arrivals=kind, load=load, candidate=name)
    row |= dict(capacity=capacity[name], rate=rate)
    for percent in PERCENTS:
      row[f'latency_p{percent}'] = float(np.percentile(found, percent))
    table.append(row | {'goodput': rate * float((found <= deadline).mean())})
  return table


def draw(path: plots.Path, table: Sequence[Mapping[str, Any]]) -> None:
  """Draws the 95th percentile and the goodput against the rate."""
  panels = []
  names = dict.fromkeys(row['candidate'] for row in table)
  labels = {'latency_p95': 'p95 (s)', 'goodput': 'goodput (rows/s)'}
  for column, kind in itertools.product(labels, BURSTS):
    lines = []
    for number, name in enumerate(names):
      key = kind, name
      own = [r for r in table if (r['arrivals'], r['candidate']) == key]
      x, y = (np.array([r[axis] for r in own]) for axis in ('rate', column))
      lines.append(plots.Line(name, x, y, number))
    title = f'{kind} arrivals'
    panels.append(plots.Panel(title, labels[column], 'rate (rows/s)', lines))
  plots.draw_panels(path, panels, (10.8, 7.4), 2)
