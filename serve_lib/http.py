"""An HTTP application in front of an engine: JSON in, JSON out.

`POST /predict` takes an item or `{"items": [...]}`; `/healthz`, `/readyz` and
`/metrics` (Prometheus) report the state, `/` and `/openapi.json` describe the
model. Requests take turns at threads and the engine's places. When the client
has left or the time is over, the rows of a request leave all lines, also that
of the engine.
"""

import asyncio
import collections
import concurrent.futures
import functools
import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import prometheus_client
from prometheus_client import core, registry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from core import machine
from serve_lib import bodies, description, items, pool, process, turns
from serve_lib.chain import ClosedError, Failure, InputError

RETRY = {'Retry-After': '1'}  # seconds
MAX_BODIES = 16  # of the largest size, held at a time
MAX_ERROR = 2000  # characters; a message may contain a whole item
MAX_INLINE = 2**14  # bytes of a body that is parsed in the event loop
QUICK = 2**10  # characters of a request that is read there, .3 ms
# Characters that are read at a time, 5 ms; more waits in another line.
SLICE = 2**14
PAUSE = 1.0  # seconds until memory is returned


class Service(registry.Collector):
  """The ASGI application `app` of an engine; set `is_ready` after the warm-up.

  The engine gets rows from here only. Attributes of `limits`: `max_pending`,
  rows in the engine and of a request; `max_waiting`, further rows, above which
  the answer is 503; `max_body_bytes` of a request (`MAX_BODIES` times that of
  all); `max_pixels` of a request, and decoded at a time; `max_seconds` until
  the answer. A request of less than its share of the rows or bytes is accepted
  above the limit of all. `name` is that of the run or bundle.
  """

  def __init__(self, engine: Any, limits: Any, name: str = ''):
    self.is_ready = False
    self._engine, self._limits = engine, limits
    self._closed = ''  # the error of an engine that a defect has ended
    # Changed by the event loop only, as are the lines.
    self._requests = self._waiting = self._bytes = 0
    # Rows of a request in turn: several requests share a batch.
    self._most_rows = max(engine.grid.capacity // 4, 1)
    most = limits.max_pending
    self._places = turns.Turns(most, most // 8)  # in the engine
    cores = machine.cores()
    self._quick_came = -math.inf  # when a quick request came last
    self._quick = turns.Lane(
      cores + 1, cores + 1, reserve=1, yields=self._is_shared
    )
    # Photos and long bodies, which others need not wait for.
    places = limits.max_pixels // items.PIXELS
    self._slow = turns.Lane(
      max(places, SLICE), max(cores // 2, 1), self._return_soon,
      yields=self._is_shared,
    )  # fmt: skip
    self._returns = False  # memory, soon
    # Of the answers to /predict.
    self._statuses = collections.Counter[int]()
    self._latency = prometheus_client.Histogram(
      'http_latency_seconds', 'seconds from a request to its answer',
      buckets=description.SECONDS, registry=None,
    )  # fmt: skip
    self._about = description.about(engine, name)
    self.app = Starlette(
      routes=[
        Route('/', self._describe),
        Route('/openapi.json', self._describe),
        Route('/predict', self._predict, methods=['POST']),
        Route('/healthz', self._health),
        Route('/readyz', self._health),
        Route('/metrics', self._metrics),
      ],
      exception_handlers={HTTPException: _refusal},  # such as 404, 405
    )
    self.app.router.redirect_slashes = False  # to a host of the client's choice

  def close(self) -> None:
    """Ends the threads, when all requests are answered."""
    self._quick.close()
    self._slow.close()

  def _check(self, is_ready: bool) -> None:
    if self._closed or not is_ready:
      wait = 'the programs are being compiled; retry later'
      raise HTTPException(503, self._closed or wait, RETRY)

  async def _health(self, request: Request) -> Response:
    self._check(self.is_ready or request.url.path == '/healthz')
    return _json({'status': 'ok'})

  async def _describe(self, request: Request) -> Response:
    if request.url.path == '/':
      return _json(self._about | {'ready': self.is_ready})
    return _json(description.openapi(self._about))

  async def _metrics(self, request: Request) -> Response:
    kind = prometheus_client.CONTENT_TYPE_LATEST
    return Response(prometheus_client.generate_latest(self), media_type=kind)

  def collect(self) -> Iterator[core.Metric]:
    """Yields the numbers of engine and service; see `serve_lib.description`."""
    rows, answers = self._waiting, self._statuses
    own = {'http_waiting_rows': rows, 'http_responses': answers}
    yield from description.metrics(self._engine, own)
    yield from self._latency.collect()

  async def _predict(self, request: Request) -> Response:
    body, began = bytearray(), time.monotonic()
    self._requests += 1
    try:
      response = await self._answer(request, body)
    except HTTPException as error:
      response = await _refusal(request, error)
    finally:
      self._requests -= 1
      size = len(body)
      self._bytes -= size
      del body
      if self._lane(size // 16)[0] is self._slow:
        self._return_soon()
    self._statuses[response.status_code] += 1
    self._latency.observe(time.monotonic() - began)
    return response

  def _return_soon(self) -> None:
    """Returns the memory of large bodies and photos, once in `PAUSE`."""
    # Meanwhile the allocator's lock stops all threads.
    if not self._returns:
      self._returns = True
      asyncio.get_running_loop().call_later(PAUSE, self._return_memory)

  def _return_memory(self) -> None:
    self._returns = False
    asyncio.get_running_loop().run_in_executor(None, process.return_memory)

  async def _answer(self, request: Request, body: bytearray) -> Response:
    self._check(self.is_ready)
    tasks: list[asyncio.Task[Any]] = []
    late = 408, 'body'
    try:
      async with asyncio.timeout(self._limits.max_seconds) as limit:
        await self._read(request, body)
        late = 504, 'deadline_ms'
        tasks.append(asyncio.create_task(self._answers(body, limit)))
        # After the body only the client's leaving is received.
        left: Any = request.receive()
        tasks.append(asyncio.create_task(left))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
          raise ClientDisconnect
        return tasks[0].result()
    except TimeoutError as error:
      raise HTTPException(late[0], f'{late[1]}: the time is over') from error
    except ClientDisconnect as error:
      raise HTTPException(400, 'body: the client has left') from error
    except ClosedError as error:
      self._closed = str(error)
      raise HTTPException(503, self._closed, RETRY) from error
    finally:
      for task in tasks:
        task.cancel()
      tasks.clear()  # an error's frames would hold it, and the body

  async def _read(self, request: Request, body: bytearray) -> None:
    most = self._limits.max_body_bytes
    if int(request.headers.get('content-length', 0)) > most:
      raise HTTPException(413, f'body: expected at most {most} bytes')
    async for chunk in request.stream():
      body += chunk
      self._bytes += len(chunk)
      if len(body) > most:
        raise HTTPException(413, f'body: expected at most {most} bytes')
      if self._is_too_much(self._bytes, len(body), MAX_BODIES * most):
        raise HTTPException(503, 'body: too many requests; retry', RETRY)

  def _is_too_much(self, held: int, own: int, most: int) -> bool:
    """Returns True above a limit of all, unless a request has a small share."""
    return held > most and own > most // self._requests

  async def _answers(self, body: bytearray, limit: Any) -> Response:
    """Returns the answers to a body, whose deadline may be before `limit`."""
    flow = turns.Flow()
    if len(body) <= MAX_INLINE:
      read = bodies.read(body, self._limits)
    else:
      lane, cost = self._lane(len(body) // 16)
      read = await lane.run(flow, cost, bodies.read, body, self._limits)
    earlier = max(self._limits.max_seconds - read.seconds, 0.0)
    limit.reschedule(limit.when() - earlier)
    work = [one + self._engine.item_work for one in read.work]
    read = read._replace(work=work)
    answers = await self._submit(flow, read, len(body) <= MAX_INLINE)
    if not read.is_batch:
      return _json(*_fields(read.ids[0], answers[0]))
    if len(answers) <= pool.SMALL:
      return _batch(read.ids, answers)
    return await self._quick.run(flow, 1, _batch, read.ids, answers)

  def _is_shared(self) -> bool:
    """Returns True if quick requests have come lately."""
    return time.monotonic() < self._quick_came + pool.PAUSE

  def _lane(self, work: int) -> tuple[turns.Lane, int]:
    """Returns threads for some work, and the places that it takes there."""
    return (self._quick, 1) if work <= SLICE else (self._slow, work)

  async def _submit(
    self, flow: turns.Flow, read: bodies.Body, is_short: bool
  ) -> list[Any]:
    """Gives items to the engine, a slice at a time; returns their answers."""
    futures: list[asyncio.Future[Any]] = []
    left = len(read.items)
    # Changing the thread would take longer than the work.
    is_quick = is_short and left <= pool.SMALL and sum(read.work) <= QUICK
    if is_quick:
      self._quick_came = time.monotonic()
    flow.rows = left
    most = self._limits.max_pending + self._limits.max_waiting
    held = self._places.taken + self._waiting + left
    if self._is_too_much(held, left, most):
      raise HTTPException(503, f'max_waiting: {most} rows wait; retry', RETRY)
    self._waiting += left
    try:
      for some in slices(read.work, self._most_rows):
        rows = read.items[some]
        submit = functools.partial(self._engine.submit_all, rows, None, flow)
        if is_quick:
          await self._places.take(flow, len(rows))
          job = turns.call_now(submit)
        else:
          lane, cost = self._lane(sum(read.work[some]))
          await self._take(flow, lane, cost, len(rows))
          job = lane.start(cost, submit)
        self._waiting -= len(rows)
        left -= len(rows)
        turns.call_when_done(job, self._placed, job, len(rows))
        try:
          futures += map(asyncio.wrap_future, await asyncio.wrap_future(job))
        except asyncio.CancelledError:
          turns.call_when_done(job, _drop, job)
          raise
      return await asyncio.gather(*futures)
    finally:
      self._waiting -= left
      for future in futures:
        future.cancel()  # also in the engine

  async def _take(
    self, flow: turns.Flow, lane: turns.Lane, cost: int, rows: int
  ) -> None:
    """Waits for places of rows in the engine and in a lane."""
    # Rows that wait for a slow lane hold no places, quick rows no thread.
    order: list[tuple[turns.Turns, int]] = [(self._places, rows), (lane, cost)]
    first, second = order[:: -1 if lane is self._slow else 1]
    await first[0].take(flow, first[1])
    try:
      await second[0].take(flow, second[1])
    except asyncio.CancelledError:
      first[0].free(first[1])
      raise

  def _placed(self, job: concurrent.futures.Future, rows: int) -> None:
    """Frees the places of rows when they are answered, or were refused."""
    futures = _result(job)
    self._places.free(rows - len(futures))
    for future in futures:
      turns.call_when_done(future, self._places.free, 1)


def _result(job: concurrent.futures.Future) -> list[Any]:
  return [] if job.cancelled() or job.exception() else job.result()


def _drop(job: concurrent.futures.Future) -> None:
  for future in _result(job):
    future.cancel()


def slices(work: Sequence[int], most_rows: int) -> Iterator[slice]:
  """Yields slices of `most_rows` items at most, and `SLICE` work if several."""
  first = total = 0
  for number, one in enumerate(work):
    if number > first and (total + one > SLICE or number - first == most_rows):
      yield slice(first, number)
      first, total = number, 0
    total += one
  yield slice(first, len(work))


def _fields(own: dict[str, Any], answer: Any) -> tuple[dict[str, Any], int]:
  """Returns an answer, with the `own` id of its item, and the status."""
  if not isinstance(answer, Failure):
    return own | answer.as_dict(), 200
  status = 422 if isinstance(answer.error, InputError) else 500
  return own | {'error': str(answer.error)[:MAX_ERROR]}, status


def _batch(ids: Sequence[Any], answers: Sequence[Any]) -> Response:
  rows = zip(ids, answers, strict=True)
  return _json({'answers': [_fields(*row)[0] for row in rows]})


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
  text = json.dumps(value, allow_nan=False)
  return Response(text, status, headers, 'application/json')


async def _refusal(request: Request, error: Any) -> Response:
  value = {'error': error.detail[:MAX_ERROR]}
  return _json(value, error.status_code, error.headers)
