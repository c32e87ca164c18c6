"""HTTP connections of uvicorn that wait for no client without end."""

import asyncio
import json
import re
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

SLICE = 2**14  # bytes that are parsed at a time; headers have at most twice it
# A body may come in any PARTS, further ones have at least PART bytes on
# average. A part takes 20 us of all connections, a header 10.
HEADERS, PARTS, PART = 100, 250, 64
_LEGAL = (
  f'HTTP/1.1, at most {HEADERS} headers of {SLICE} bytes, a body in parts of '
  f'at least {PART} bytes'
)


class _Parser(h11.Connection):
  """Refuses many headers, and a body in many small parts."""

  def next_event(self) -> Any:
    """Returns the next event; raises RemoteProtocolError."""
    if self.their_state is h11.IDLE:
      head, *_ = re.split(rb'\n\r?\n', self.trailing_data[0], maxsplit=1)
      if head.count(b'\n') > HEADERS:
        raise h11.RemoteProtocolError('many headers')
    event = super().next_event()
    if isinstance(event, h11.Request):
      self._left = PARTS * PART
    elif isinstance(event, h11.Data):
      self._left += len(event.data) - PART
      if self._left < 0:
        raise h11.RemoteProtocolError('small parts')
    return event


class _Flow(FlowControl):
  """Reads nothing while bytes are `held`, which came before their turn."""

  def __init__(self, transport: asyncio.Transport):
    super().__init__(transport)
    self.held = bytearray()

  def pause_reading(self) -> None:
    """Reads nothing until `resume_reading`."""
    self.read_paused = True
    self.update()

  def resume_reading(self) -> None:
    """Reads on, but if bytes are held."""
    self.read_paused = False
    self.update()

  def update(self) -> None:
    """Reads, or not, after a change of `held`."""
    if self.read_paused or self.held:
      self._transport.pause_reading()
    else:
      self._transport.resume_reading()


class Connection(H11Protocol):
  """Closes a connection that waits for its client for `max_seconds`.

  For a whole request it waits from the connection, or from the first byte after
  an answer; until that byte uvicorn limits it. For an answer to be read it
  waits from when the client stops. Beyond `most` connections, a new one closes
  the longest silent one that waits for its client, of its own address, else of
  the address that has most; if none does, itself. `idle` is shared by all.
  """

  flow: Any

  def __init__(
    self,
    max_seconds: float,
    most: int,
    idle: dict[str, dict[Any, None]],  # by address, the longest silent first
    **options: Any,
  ):
    super().__init__(**options)
    self.conn = _Parser(h11.SERVER, SLICE)
    self._max_seconds, self._most, self._idle = max_seconds, most, idle
    self._timer: asyncio.TimerHandle | None = None
    self._unread: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    """Begins to wait for headers."""
    super().connection_made(transport)
    self.flow = _Flow(transport)
    if len(self.connections) > self._most:
      self._make_room()
    self._watch()

  def data_received(self, data: bytes) -> None:
    """Reads data; ends the wait once there is a request."""
    self.flow.held += data
    if len(self.flow.held) == len(data):  # else `_parse` follows
      self._parse()

  def _parse(self) -> None:
    """Parses data of the next request, in turns with other connections."""
    held = self.flow.held
    if held and self._lacks_request() and not self.transport.is_closing():
      data = bytes(held[:SLICE])
      del held[:SLICE]
      super().data_received(data)
      if held:
        self.loop.call_soon(self._parse)
      self._watch()
    self.flow.update()

  def send_400_response(self, msg: str) -> None:
    """Refuses what is no request; an answer that has begun is cut off."""
    if self.cycle:
      self.cycle.disconnected = True
    if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
      text = json.dumps({'error': f'request: expected {_LEGAL}'})
      names = (b'content-type', b'application/json'), (b'connection', b'close')
      for event in (
        h11.Response(status_code=400, headers=[*names], reason=b'Bad Request'),
        h11.Data(data=text.encode()),
        h11.EndOfMessage(),
      ):
        self.transport.write(self.conn.send(event) or b'')
      self.transport.close()
      self._limit_unread()
    else:
      self.transport.abort()

  def on_response_complete(self) -> None:
    """Is idle again, unless the next request was already received."""
    super().on_response_complete()
    if self.transport.is_closing():
      self._limit_unread()
    self._note()
    self._parse()

  def pause_writing(self) -> None:
    """Begins to wait until the client reads."""
    super().pause_writing()
    self._limit_unread()
    self._note()

  def resume_writing(self) -> None:
    """Ends that wait, unless the connection is being closed."""
    super().resume_writing()
    if not self.transport.is_closing():
      self._unread = _stopped(self._unread)
    self._note()

  def timeout_keep_alive_handler(self) -> None:
    """Closes the connection, which would wait for what was not read."""
    if self.transport.get_write_buffer_size():
      self.transport.abort()
    super().timeout_keep_alive_handler()

  def connection_lost(self, exc: Exception | None) -> None:
    """Ends the waits."""
    self._timer, self._unread = _stopped(self._timer), _stopped(self._unread)
    self._leave()
    super().connection_lost(exc)

  def _make_room(self) -> None:
    group = self._idle.get(self._address)
    group = group or max(self._idle.values(), key=len, default={})
    oldest = next(iter(group), self)
    oldest._leave()
    self.connections.discard(oldest)  # `connection_lost` is called later
    oldest.transport.abort()

  @property
  def _address(self) -> str:
    return self.client[0] if self.client else ''

  def _is_idle(self) -> bool:
    return not self.cycle or self.cycle.response_complete

  def _lacks_request(self) -> bool:
    return self._is_idle() or self.cycle.more_body

  def _note(self) -> None:
    """Keeps `idle` up to date."""
    self._leave()
    waits = self._lacks_request() or self.flow.write_paused
    if waits and self in self.connections:
      self._idle.setdefault(self._address, {})[self] = None

  def _leave(self) -> None:
    group = self._idle.get(self._address, {})
    group.pop(self, None)
    if not group:
      self._idle.pop(self._address, None)

  def _watch(self) -> None:
    self._note()
    if not self._is_idle():
      self._timer = _stopped(self._timer)
    elif not self._timer:
      self._timer = self.loop.call_later(
        self._max_seconds, self.timeout_keep_alive_handler
      )

  def _limit_unread(self) -> None:
    self._unread = self._unread or self.loop.call_later(
      self._max_seconds, self.transport.abort
    )


def _stopped(timer: Any) -> Any:
  if timer:
    timer.cancel()
  return None
