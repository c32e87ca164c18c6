"""Work that requests take in turns: a clock, places, threads."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import heapq
import itertools
from collections.abc import Callable
from typing import Any

from serve_lib import process


@dataclasses.dataclass(eq=False)
class Flow:
  """Work that belongs together, in turns with other flows."""

  rows: int = 1  # in all
  # The start of its next work by each `Clock`.
  next: dict['Clock', int | float] = dataclasses.field(default_factory=dict)


class Clock:
  """Start-time fair queueing (Goyal et al. 1996).

  The work of a flow starts where its work before ends, but not before now: a
  small flow overtakes the rest of a large one. Time passes with the work that
  is done, divided by the flows that wait: new flows do not starve the others.
  """

  def __init__(self):
    self._now = 0.0

  def start(
    self, flow: Flow, cost: int | float, ahead: int | float = 0
  ) -> int | float:
    """Returns the start of the next work; `ahead` of now if it is free."""
    start = max(flow.next.get(self, 0.0), self._now - ahead)
    flow.next[self] = start + cost
    return start

  def serve(self, start: int | float, share: int | float) -> None:
    """Moves the clock: work that starts then is done."""
    self._now = max(self._now + share, start)


class Turns:
  """Places that flows share by a `Clock`, in one event loop.

  `reserve` of them are only for what a flow takes first.
  """

  def __init__(self, places: int, reserve: int = 0):
    self.places, self.reserve, self.taken = places, reserve, 0
    self._clock = Clock()
    # Start, number, cost, places that may then be taken.
    self._line: list[tuple[float, int, int, int, asyncio.Future[None]]] = []
    self._numbers = itertools.count()

  async def take(self, flow: Flow, cost: int) -> None:
    """Waits for `cost` places, at most all; `free` returns them."""
    is_first = self._clock not in flow.next
    start = self._clock.start(flow, cost, self.reserve * is_first)
    turn = asyncio.get_running_loop().create_future()
    cost = min(cost, self.places)
    most = max(self.places - self.reserve * (not is_first), cost)
    entry = start, next(self._numbers), cost, most, turn
    heapq.heappush(self._line, entry)
    self._serve()
    try:
      await turn
    except asyncio.CancelledError:
      if turn.done() and not turn.cancelled():
        self.free(cost)
      raise
    finally:
      self._serve()  # a cancelled turn may have been the first

  def free(self, cost: int) -> None:
    """Returns places that `take` has given."""
    self.taken -= min(cost, self.places)
    self._serve()

  def _serve(self) -> None:
    while self._line:
      start, _, cost, most, turn = self._line[0]
      if not turn.done():
        if self.taken + cost > most:
          return
        self.taken += cost
        self._clock.serve(start, cost / len(self._line))
        turn.set_result(None)
      heapq.heappop(self._line)


class Lane(Turns):
  """Threads with places for the work that they do at a time.

  While `yields` returns True their priority is below that of the event loop and
  of batches. `then` is called in the event loop after each function.
  """

  def __init__(
    self,
    places: int,
    threads: int,
    then: Callable[[], None] = lambda: None,
    reserve: int = 0,
    yields: Callable[[], bool] = lambda: False,
  ):
    super().__init__(places, reserve)
    self._threads = {  # a priority can't be raised again
      low: concurrent.futures.ThreadPoolExecutor(threads, initializer=begin)
      for low, begin in ((False, None), (True, process.yield_to_others))
    }
    self._yields, self._then = yields, then

  def start(
    self, cost: int, function: Callable[..., Any], *arguments: Any
  ) -> concurrent.futures.Future:
    """Calls a function in a thread; frees `cost` places when that ends."""
    job = self._threads[self._yields()].submit(function, *arguments)
    call_when_done(job, self._end, cost)
    return job

  def _end(self, cost: int) -> None:
    self.free(cost)
    self._then()

  async def run(
    self, flow: Flow, cost: int, function: Callable[..., Any], *arguments: Any
  ) -> Any:
    """Waits for a turn, calls a function in a thread, returns its result."""
    await self.take(flow, cost)
    return await asyncio.wrap_future(self.start(cost, function, *arguments))

  def close(self) -> None:
    """Ends the threads when they have done their work."""
    for threads in self._threads.values():
      threads.shutdown()


def call_now(function: Callable[[], Any]) -> concurrent.futures.Future:
  """Calls a function; returns a future of its result or error."""
  job: concurrent.futures.Future = concurrent.futures.Future()
  try:
    job.set_result(function())
  except Exception as error:
    job.set_exception(error)
  return job


def call_when_done(
  future: concurrent.futures.Future,
  function: Callable[..., None],
  *arguments: Any,
) -> None:
  """Calls a function in the running event loop when a future is done."""
  loop = asyncio.get_running_loop()

  def call(_: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
      loop.call_soon_threadsafe(function, *arguments)

  future.add_done_callback(call)
