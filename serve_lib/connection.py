"""HTTP connections of uvicorn that do not wait for headers without end."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
  """Closes a connection that sends no whole request for `max_seconds`.

  The time counts from the connection, or from the first byte after an answer;
  until that byte uvicorn limits it. Beyond `most` connections, a new one closes
  the longest silent one of its own address, else of the address that has most;
  if none is idle, itself. `idle` is shared by all connections.
  """

  def __init__(
    self,
    max_seconds: float,
    most: int,
    idle: dict[str, dict[Any, None]],  # by address, the longest silent first
    **options: Any,
  ):
    super().__init__(**options)
    self._max_seconds, self._most, self._idle = max_seconds, most, idle
    self._timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    """Begins to wait for headers."""
    super().connection_made(transport)
    if len(self.connections) > self._most:
      self._make_room()
    self._watch()

  def data_received(self, data: bytes) -> None:
    """Reads data; ends the wait once there is a request."""
    super().data_received(data)
    self._watch()

  def on_response_complete(self) -> None:
    """Is idle again, unless the next request was already received."""
    super().on_response_complete()
    self._note()

  def connection_lost(self, exc: Exception | None) -> None:
    """Ends the wait."""
    self._stop()
    self._leave()
    super().connection_lost(exc)

  def _make_room(self) -> None:
    group = self._idle.get(self._address)
    group = group or max(self._idle.values(), key=len, default={})
    if not group:
      self.transport.abort()
      return
    oldest = next(iter(group))
    oldest._leave()
    # At once: `connection_lost` is called later, and waits for a slow reader.
    self.connections.discard(oldest)
    oldest.timeout_keep_alive_handler()

  @property
  def _address(self) -> str:
    return self.client[0] if self.client else ''

  def _is_idle(self) -> bool:
    return not self.cycle or self.cycle.response_complete

  def _note(self) -> None:
    """Keeps `idle` up to date."""
    self._leave()
    if self._is_idle() and self in self.connections:
      self._idle.setdefault(self._address, {})[self] = None

  def _leave(self) -> None:
    group = self._idle.get(self._address, {})
    group.pop(self, None)
    if not group:
      self._idle.pop(self._address, None)

  def _watch(self) -> None:
    self._note()
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
