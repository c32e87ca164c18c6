"""Latency and goodput of servers under load as it comes.

Rows arrive at times drawn before, from which latencies count: a slow server
does not slow its load (open loop; Schroeder et al. 2006, "Open versus closed").
Shared: the rows, `submit(row)`, which returns a future, without HTTP, and the
largest batch; no server waits while it is idle. The engine sorts rows into
length buckets; a `BatchServer` of a library pads them to the longest.
"""

import concurrent.futures
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from eval_lib import peers, plots
from eval_lib.benchmark import Hosts, checked
from eval_lib.plots import Line, Panel

BURSTS = {'Poisson': 1.0, 'bursty': 8.0}  # mean rows of a burst
MIN_ROWS = 100  # of a measurement
PERCENTS = (50, 95, 99)
_servers: dict[str, tuple[Any, Sequence[Any]]] = {}  # of this process


def arrivals(
  rate: float, count: int, burst: float, seed: int = 0
) -> Float[np.ndarray, ' N']:
  """Returns ascending times in seconds, on average `rate` per second.

  Bursts are a Poisson process and have geometric sizes of mean `burst`: the
  variance of the rows in an interval is 2 * burst - 1 times their mean.
  """
  draw = np.random.default_rng(seed)
  starts = np.cumsum(draw.exponential(burst / rate, count))
  return np.repeat(starts, draw.geometric(1.0 / burst, count))[:count]


class BatchServer:
  """A thread that maps the rows that wait to answers, `batch` at most."""

  def __init__(self, function: Callable[[list[Any]], Any], batch: int):
    self._function, self._batch = function, batch
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=self._run, daemon=True).start()

  def submit(self, row: Any) -> concurrent.futures.Future:
    """Accepts a row; its future gives the answer or the error of its batch."""
    future = concurrent.futures.Future[Any]()
    self._queue.put((row, future))
    return future

  def _run(self) -> None:
    while True:
      taken = [self._queue.get()]
      while len(taken) < self._batch and not self._queue.empty():
        taken.append(self._queue.get())
      try:
        answers = self._function([row for row, _ in taken])
        pairs = list(zip(taken, answers, strict=True))
      except Exception as error:
        for _, future in taken:
          future.set_exception(error)
        continue
      for (_, future), answer in pairs:
        future.set_result(answer)


def library_server(
  library: str, weights: str, rows: Sequence[Any], batch: int
) -> tuple[BatchServer, Sequence[Any]]:
  """Returns a server of a library of `peers`, and the rows to send."""
  return BatchServer(peers.classifier(library, weights), batch), rows


def offer(
  submit: Callable[[Any], concurrent.futures.Future],
  rows: Sequence[Any],
  times: Float[np.ndarray, ' N'],
) -> Float[np.ndarray, ' N']:
  """Submits rows, in turn, at times in seconds; returns the latencies."""
  ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

  def end(number: int, future: concurrent.futures.Future) -> None:
    ended.put((number, time.perf_counter(), future))

  start = time.perf_counter() + 0.01
  given = zip(times, itertools.cycle(rows), strict=False)
  for number, (at, row) in enumerate(given):
    if (wait := start + at - time.perf_counter()) > 0:
      time.sleep(wait)
    submit(row).add_done_callback(functools.partial(end, number))
  latencies = -start - times
  for _ in times:
    number, now, future = ended.get()
    checked([future.result()])
    latencies[number] += now
  return latencies


def _offer(name: str, make: Callable[[], Any], times: Any) -> np.ndarray:
  if name not in _servers:
    _servers[name] = make()
  server, rows = _servers[name]
  return offer(server.submit, rows, times)


def measure(
  candidates: Mapping[str, tuple[str, Callable[[], Any]]],
  hosts: Hosts,
  *,
  loads: Sequence[int],
  seconds: float,
  deadline: float,
  rows: int,
) -> list[dict[str, Any]]:
  """Measures the capacities, then all candidates in turns at each load.

  `candidates` are by name (process of `hosts`, function that returns a server
  and the rows to send). `loads` are percents of the capacity of each, its rate
  when `rows` rows arrive at once, the second time. `seconds` is the length of a
  measurement, `goodput` the rate of the answers within `deadline` seconds.
  """

  def ask(name: str, times: np.ndarray) -> Any:
    process, make = candidates[name]
    return hosts.ask(process, _offer, name, make, times)

  _servers.clear()
  table: list[dict[str, Any]] = []
  capacity: dict[str, float] = {}
  for _, name in itertools.product(range(2), candidates):
    if (found := ask(name, np.zeros(rows))) is not None:
      capacity[name] = rows / float(found.max())
  for kind, load, name in itertools.product(BURSTS, loads, capacity):
    rate = load / 100 * capacity[name]
    count = max(MIN_ROWS, round(rate * seconds))
    times = arrivals(rate, count, BURSTS[kind])
    if (found := ask(name, times)) is None:
      continue
    row: dict[str, Any] = dict(arrivals=kind, load=load, candidate=name)
    row |= dict(capacity=capacity[name], rate=count / float(times[-1]))
    for percent in PERCENTS:
      row[f'latency_p{percent}'] = float(np.percentile(found, percent))
    row['goodput'] = row['rate'] * float((found <= deadline).mean())
    table.append(row)
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
      x, y = ([row[axis] for row in own] for axis in ('rate', column))
      lines.append(Line(name, np.array(x), np.array(y), number))
    title, x_label = f'{kind} arrivals', 'rate (rows/s)'
    panels.append(Panel(title, labels[column], x_label, lines))
  plots.draw_panels(path, panels, (10.8, 7.4), 2)
