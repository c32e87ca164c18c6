"""Places of an event loop that requests take in turns, and threads for them."""

import asyncio
import collections
import concurrent.futures
import contextlib
import heapq
import itertools
from collections.abc import Callable
from typing import Any

# Of one request: for each `Turns`, the work that it has been given so far.
Flow = collections.defaultdict[Any, int]


def new_flow() -> Flow:
  """Returns the flow of a new request."""
  return collections.defaultdict(int)


class Turns:
  """Places that flows share fairly; used in one event loop.

  Start-time fair queueing (Goyal et al. 1996): who has been given the least
  since it came is next, so a small request overtakes the rest of a large one.
  """

  def __init__(self, places: int):
    self.places, self.taken, self._clock = places, 0, 0
    self._line: list[tuple[int, int, int, asyncio.Future[None]]] = []
    self._numbers = itertools.count()

  async def take(self, flow: Flow, cost: int) -> None:
    """Waits for `cost` places, at most all; `free` returns them."""
    start = max(self._clock, flow[self])
    flow[self] = start + cost
    turn = asyncio.get_running_loop().create_future()
    heapq.heappush(self._line, (start, next(self._numbers), cost, turn))
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
      start, _, cost, turn = self._line[0]
      if not turn.done():
        cost = min(cost, self.places)
        if self.taken + cost > self.places:
          return
        self.taken += cost
        self._clock = max(self._clock, start)
        turn.set_result(None)
      heapq.heappop(self._line)


class Lane(Turns):
  """Threads with places for the work that they do at a time."""

  def __init__(
    self, places: int, threads: int, then: Callable[[], None] = lambda: None
  ):
    super().__init__(places)
    self._threads = concurrent.futures.ThreadPoolExecutor(threads)
    self._then = then  # called in the thread after each function

  def start(
    self, cost: int, function: Callable[..., Any], *arguments: Any
  ) -> concurrent.futures.Future:
    """Calls a function in a thread; frees `cost` places when that ends."""

    def call() -> Any:
      try:
        return function(*arguments)
      finally:
        self._then()

    job = self._threads.submit(call)
    call_when_done(job, self.free, cost)
    return job

  async def run(
    self, flow: Flow, cost: int, function: Callable[..., Any], *arguments: Any
  ) -> Any:
    """Waits for a turn, calls a function in a thread, returns its result."""
    await self.take(flow, cost)
    return await asyncio.wrap_future(self.start(cost, function, *arguments))

  def close(self) -> None:
    """Ends the threads when they have done their work."""
    self._threads.shutdown()


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
