"""`launch.serve`: a server under load, with bad clients, until SIGTERM."""

import asyncio
import contextlib
import json
import random
import re
import signal
import threading

import pytest

from core import machine
from launch import serve, serving
from tests.launch import servers
from tests.launch.servers import post
from tests.serve_lib import toy
from tests.serve_lib.http_test import BAD

CONNECTIONS = 50
# The command, with a small engine instead of that of a run.
PROGRAM = """
import sys
from launch import serve, serving
from serve_lib.engine import Engine
from tests.serve_lib.http_test import Chain, Policy
serving.load_engine = lambda flags: Engine(
  Chain(), Policy(), (6,), (1, 8), max_pending=flags.max_pending
)
sys.exit(serve.main(sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def connected(port):
  """Yields a function of a request to status and body, and the writer."""
  reader, writer = await asyncio.open_connection('127.0.0.1', port)

  async def ask(request):
    writer.write(request)
    head = await reader.readuntil(b'\r\n\r\n')
    length = int(re.search(rb'(?i)content-length: (\d+)', head)[1])
    return int(head.split()[1]), await reader.readexactly(length)

  try:
    yield ask, writer
  finally:
    writer.transport.abort()


def metric(server, name):
  text = server.get('/metrics').text
  return float(re.search(rf'^{name} (.*)$', text, re.M)[1])


async def use(port, number, requests):
  """Sends good requests and 5 % bad ones; checks every answer."""
  draw = random.Random(number)
  async with connected(port) as (ask, _):
    for _ in range(requests):
      if draw.random() < 0.05:
        body, status, words = draw.choice(BAD)
        found, answer = await ask(post(body))
        assert found == status, (body[:99], answer)
        assert words in json.loads(answer)['error']
        continue
      rows = [
        draw.choices(range(1, 5), k=draw.randrange(1, 5))
        for _ in range(draw.choice((1, 1, 1, 4)))
      ]
      items = [{'tokens': row, 'source': 'forum'} for row in rows]
      body = {'items': items} if len(rows) > 1 else items[0]
      found, answer = await ask(post(body))
      assert found == 200, answer
      answer = json.loads(answer)
      for row, one in zip(rows, answer.get('answers', [answer]), strict=True):
        expected = toy.reference(('full', row))
        assert (one['label'], one['depth']) == (row, expected['depth'])


async def leave(port, number):
  """Sends a part of a request, or all of it, and does not wait."""
  async with connected(port) as (_, writer):
    request = post({'tokens': [1, 2]})
    writer.write(request[: None if number % 2 else len(request) // 2])
    await asyncio.sleep(0.001 * (number % 5))


async def never_read(port):
  """Sends requests with long answers, which it does not read, of 100 MB."""
  request = post({'items': [{'tokens': [1], 'x' * 300: 0}] * 50})
  async with connected(port) as (_, writer):
    for _ in range(10**8 // len(request)):
      writer.write(request)
      await writer.drain()


async def idle(port):
  """Waits until an answered connection is closed, by --keep_alive."""
  reader, writer = await asyncio.open_connection('127.0.0.1', port)
  writer.write(post({'tokens': [2, 0]}))
  assert b' 200 OK' in await reader.read()
  writer.close()


async def load(server, requests):
  """Answers, refusals, clients that leave, and one that does not read."""
  each, port = requests // CONNECTIONS, server.port
  tasks = [use(port, number, each) for number in range(CONNECTIONS)]
  tasks += [leave(port, number) for number in range(requests // 100)]
  slow = asyncio.create_task(never_read(port))
  await asyncio.gather(*tasks)
  assert slow.cancel()  # it waits still
  async with asyncio.timeout(60.0):
    for name in ('http_waiting_rows', 'engine_pending'):
      while metric(server, name):
        await asyncio.sleep(0.05)


async def end(server):
  """Ends the server under load; returns the answers that clients got then."""
  answers, torn = 0, []

  async def ask_until_closed():
    nonlocal answers
    async with connected(server.port) as (ask, _):
      try:
        while True:
          assert (await ask(post({'tokens': [2, 0]})))[0] == 200
          answers += 1
      except (asyncio.IncompleteReadError, ConnectionError) as error:
        torn.append(getattr(error, 'partial', b''))

  tasks = [asyncio.create_task(ask_until_closed()) for _ in range(CONNECTIONS)]
  while answers < 200:
    await asyncio.sleep(0.01)
  server.process.send_signal(signal.SIGTERM)
  await asyncio.gather(*tasks)
  assert not any(torn)
  return answers


@pytest.mark.parametrize('requests', [
  pytest.param(2_000, marks=pytest.mark.slow),
  pytest.param(100_000, marks=pytest.mark.nightly),
])  # fmt: skip
def test_under_load_nothing_is_lost(requests):
  async def talk(server):
    await load(server, requests // 2)
    before = server.resident()
    await load(server, requests // 2)
    assert server.resident() - before < 50e6
    async with asyncio.timeout(60.0):  # --max_seconds and the default are more
      await idle(server.port)
    answered = metric(server, 'engine_answers_total')
    return answered + await end(server)

  limits = toy.LIMITS | dict(max_waiting=10_000, max_seconds=600, keep_alive=3)
  flags = [f'--{name}={value}' for name, value in limits.items()]
  with servers.served(PROGRAM, '--workdir=none', *flags) as server:
    answers = asyncio.run(talk(server))
    assert server.process.wait(60.0) == 0
    # All that the engine answered has reached the clients.
    *lines, last = server.log.read_text().splitlines()
    assert 'ready: the programs are compiled' in lines
    assert json.loads(last)['answers'] == answers


def test_a_decoder_does_not_keep_the_process():
  decoder = threading.Event()
  assert not serve.ends_within(0.01, decoder.wait)
  decoder.set()
  assert serve.ends_within(600.0, decoder.wait)


def test_a_taken_address_is_answered_in_one_line(refused):
  with serve.listen('127.0.0.1', 0) as taken:
    given = '--workdir=/nowhere', f'--port={taken.getsockname()[1]}'
    refused(serve.main, given, ['--port: expected a free address'])


def test_programs_are_those_of_a_number_of_cores(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  for cores in (2, 64):
    monkeypatch.setattr(machine, 'cores', lambda cores=cores: cores)
    folder = tmp_path / 'adaptive_computation' / f'programs-{cores}'
    assert serving.cache_directory('') == str(folder)
  assert serving.cache_directory('none') == ''
