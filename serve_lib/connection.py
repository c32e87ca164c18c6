"""HTTP connections of uvicorn that do not wait for headers without end."""

import asyncio
import collections
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
  """Closes a connection that sends no whole request for `max_seconds`.

  uvicorn limits the time between an answer and the next byte only. The time
  counts from the connection, or from the first byte after an answer. Beyond
  `most` connections, a new one closes idle ones of the address that has most of
  them, those that are silent longest.
  """

  def __init__(self, max_seconds: float, most: int, **options: Any):
    super().__init__(**options)
    self._max_seconds, self._most, self._heard = max_seconds, most, 0.0
    self._timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    """Begins to wait for headers."""
    if len(self.connections) >= self._most:
      self._make_room()
    super().connection_made(transport)
    self._watch()

  def data_received(self, data: bytes) -> None:
    """Reads data; ends the wait once there is a request."""
    super().data_received(data)
    self._watch()

  def connection_lost(self, exc: Exception | None) -> None:
    """Ends the wait."""
    self._stop()
    super().connection_lost(exc)

  def _make_room(self) -> None:
    every: Any = self.connections
    idle = [one for one in every if one._is_idle()]
    counts = collections.Counter(one._address() for one in idle)
    idle.sort(key=lambda one: (-counts[one._address()], one._heard))
    for one in idle[: 1 + self._most // 16]:  # so it is seldom needed
      one.timeout_keep_alive_handler()

  def _address(self) -> str:
    return self.client[0] if self.client else ''

  def _is_idle(self) -> bool:
    return not self.cycle or self.cycle.response_complete

  def _watch(self) -> None:
    self._heard = self.loop.time()
    if not self._is_idle():
      self._stop()
    elif not self._timer:
      self._timer = self.loop.call_later(
        self._max_seconds, self.timeout_keep_alive_handler
      )

  def _stop(self) -> None:
    if self._timer:
      self._timer.cancel()
      self._timer = None
