"""HTTP connections of uvicorn that do not wait for headers without end."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
  """Closes a connection that sends no whole request for `max_seconds`.

  uvicorn limits the time between an answer and the next byte only. The time
  counts from the connection, or from the first byte after an answer.
  """

  def __init__(self, max_seconds: float, **options: Any):
    super().__init__(**options)
    self._max_seconds = max_seconds
    self._timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    """Begins to wait for headers."""
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

  def _watch(self) -> None:
    if self.cycle and not self.cycle.response_complete:
      self._stop()
    elif not self._timer:
      self._timer = self.loop.call_later(
        self._max_seconds, self.timeout_keep_alive_handler
      )

  def _stop(self) -> None:
    if self._timer:
      self._timer.cancel()
      self._timer = None
