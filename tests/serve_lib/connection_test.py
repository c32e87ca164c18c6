"""Connections without a whole request are closed."""

import asyncio
import contextlib
import functools

import pytest
import uvicorn

from launch import serve
from serve_lib.connection import Connection

pytestmark = pytest.mark.anyio
REQUEST = b'GET / HTTP/1.1\r\nHost: a\r\n'


async def answer(scope, receive, send):
  await asyncio.sleep(0.5)  # longer than headers may take
  await send({'type': 'http.response.start', 'status': 204, 'headers': []})
  await send({'type': 'http.response.body', 'body': b''})


@pytest.fixture
async def connected():
  protocol = functools.partial(Connection, 0.3, 3, {})
  server = uvicorn.Server(uvicorn.Config(
    answer, http=protocol, ws='none', lifespan='off', log_config=None,
    timeout_keep_alive=60,
  ))  # fmt: skip
  with serve.listen('127.0.0.1', 0) as listener:
    task = asyncio.create_task(server.serve(sockets=[listener]))
    found = await asyncio.open_connection(*listener.getsockname()[:2])
    yield found
    found[1].close()
    server.should_exit = True
    await task


async def ask(reader, writer):
  writer.write(REQUEST + b'\r\n')
  head = await reader.readuntil(b'\r\n\r\n')
  assert head.startswith(b'HTTP/1.1 204')


async def drip(writer):
  while True:
    writer.write(b'a')
    await asyncio.sleep(0.05)


@pytest.mark.parametrize(('begin', 'requests', 'drips'), [
  (b'', 0, False), (b'', 0, True), (REQUEST + b'A: ', 0, True),
  (b'G', 1, False), (REQUEST + b'A: ', 2, True),
])  # fmt: skip
async def test_headers_without_end_are_closed(
  connected, begin, requests, drips
):
  reader, writer = connected
  async with asyncio.timeout(20.0):
    for _ in range(requests):
      await ask(reader, writer)
      await asyncio.sleep(0.4)  # it is kept alive
    writer.write(begin)
    task = asyncio.create_task(drip(writer) if drips else asyncio.sleep(0))
    assert await reader.read() == b''
    task.cancel()


async def test_a_connection_makes_room_at_its_own_address(connected):
  """The longest silent one; then, with none idle, the new one is closed."""
  reader, writer = connected
  host, port, *_ = writer.get_extra_info('peername')
  async with asyncio.timeout(20.0):
    await ask(reader, writer)
    others = [
      await asyncio.open_connection(host, port, local_addr=('127.0.0.2', 0))
      for _ in range(4)
    ]
    await asyncio.gather(*(ask(*other) for other in others[2:]))
    assert [await one.read() for one, _ in others[:2]] == [b'', b'']
    await ask(reader, writer)
    for _, one in (connected, *others[2:]):
      one.write(REQUEST + b'\r\n')
    await asyncio.sleep(0.1)
    last = await asyncio.open_connection(host, port)
    with contextlib.suppress(ConnectionError):
      assert await last[0].read() == b''
    await ask(reader, writer)
  for _, one in (*others, last):
    one.close()
