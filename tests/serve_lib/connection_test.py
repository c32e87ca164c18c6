"""Connections that let the server wait, or work, are closed."""

import asyncio
import contextlib
import json

import h11
import pytest
import uvicorn

from launch import serve
from serve_lib import connection

pytestmark = pytest.mark.anyio
REQUEST = b'GET / HTTP/1.1\r\nHost: a\r\n'
POST = REQUEST.replace(b'GET', b'POST')
CHUNKED = b'Transfer-Encoding: chunked\r\n\r\n'


LARGE = 2**25  # bytes, more than the kernel keeps


async def answer(scope, receive, send):
  if scope['path'] == '/large':
    await send({'type': 'http.response.start', 'status': 200, 'headers': []})
    await send({'type': 'http.response.body', 'body': bytes(LARGE)})
    return
  while scope['method'] == 'POST' and (await receive()).get('more_body'):
    pass
  await asyncio.sleep(0.5)  # longer than headers may take
  await send({'type': 'http.response.start', 'status': 204, 'headers': []})
  await send({'type': 'http.response.body', 'body': b''})


@pytest.fixture
async def connected():
  made, idle = [], {}

  def protocol(**options):
    made.append(connection.Connection(0.3, 3, idle, **options))
    return made[-1]

  server = uvicorn.Server(uvicorn.Config(
    answer, http=protocol, ws='none', lifespan='off', log_config=None,
    timeout_keep_alive=60, timeout_graceful_shutdown=1,
  ))  # fmt: skip
  with serve.listen('127.0.0.1', 0) as listener:
    task = asyncio.create_task(server.serve(sockets=[listener]))
    found = await asyncio.open_connection(*listener.getsockname()[:2])
    yield *found, made
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
  reader, writer, _ = connected
  async with asyncio.timeout(20.0):
    for _ in range(requests):
      await ask(reader, writer)
      await asyncio.sleep(0.4)  # it is kept alive
    writer.write(begin)
    task = asyncio.create_task(drip(writer) if drips else asyncio.sleep(0))
    with contextlib.suppress(ConnectionError):  # it drips on
      assert await reader.read() == b''
    task.cancel()


async def test_a_connection_makes_room_at_its_own_address(connected):
  """The longest silent one; then, with none idle, the new one is closed."""
  reader, writer, _ = connected
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
    for one in (writer, *(one for _, one in others[2:])):
      one.write(REQUEST + b'\r\n')
    await asyncio.sleep(0.1)
    last = await asyncio.open_connection(host, port)
    with contextlib.suppress(ConnectionError):
      assert await last[0].read() == b''
    await ask(reader, writer)
  for _, one in (*others, last):
    one.close()


async def test_a_body_without_end_makes_room(connected):
  _, writer, _ = connected
  place = writer.get_extra_info('peername')[:2]
  async with asyncio.timeout(20.0):
    writers = [writer]
    writers += [(await asyncio.open_connection(*place))[1] for _ in range(2)]
    for one in writers:
      one.write(POST + b'Content-Length: 9\r\n\r\n{')
    await asyncio.sleep(0.1)
    last = await asyncio.open_connection(*place)
    await ask(*last)
  for one in (*writers, last[1]):
    one.close()


@pytest.mark.parametrize('more', [b'', b'Connection: close\r\n'])
async def test_an_answer_that_is_not_read_is_cut_off(connected, more):
  reader, writer, made = connected
  writer.write(b'GET /large HTTP/1.1\r\nHost: a\r\n' + more + b'\r\n')
  async with asyncio.timeout(20.0):
    while made[0].conn.our_state is h11.IDLE or made[0].connections:
      await asyncio.sleep(0.05)
    with contextlib.suppress(ConnectionError):
      assert len(await reader.read()) < LARGE


@pytest.mark.parametrize('sent', [
  REQUEST + b'a:\r\n' * connection.HEADERS + b'\r\n',
  POST + CHUNKED + b'1\r\n \r\n' * 2 * connection.PARTS,
  POST + CHUNKED + b'1\r\n \r\n' * 40 * connection.PARTS,
  POST + CHUNKED + b'no size\r\n',
])  # fmt: skip
async def test_what_takes_long_to_parse_is_refused(connected, sent):
  reader, writer, _ = connected
  async with asyncio.timeout(20.0):
    writer.write(REQUEST + b'\r\n' + sent)  # also after an answer
    head = await reader.readuntil(b'\r\n\r\n')
    assert head.startswith(b'HTTP/1.1 204')
    assert b' 400 ' in await reader.readuntil(b'\r\n\r\n')
    line = await reader.readuntil(b'}')
    error = json.loads(line[line.index(b'{') :])['error']
    assert error.startswith('request: expected HTTP/1.1, at most 100 headers')


async def test_requests_ahead_of_their_answers_are_not_read(connected):
  reader, writer, (made, *_) = connected
  writer.write((POST + b'Content-Length: 0\r\n\r\n') * 200_000)
  async with asyncio.timeout(20.0):
    for _ in range(4):
      await reader.readuntil(b'\r\n\r\n')
      assert len(made.conn.trailing_data[0] + made.flow.held) < 2**19
  writer.transport.abort()
