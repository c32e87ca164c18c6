"""An HTTP application in front of an engine: JSON in, JSON out.

`POST /predict` takes an item or `{"items": [...]}`. `/healthz`, `/readyz` and
`/metrics`, in the format of Prometheus, report the state. Rows wait in a line
until the engine has room for them, and leave it when their time is over; a row
that the engine has accepted is computed even if its request ends before.
"""

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any

import prometheus_client
from annotated_types import Interval
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dataset_lib import fields, text_files
from dataset_lib.errors import ConfigError
from serve_lib.chain import ClosedError, Failure, InputError
from serve_lib.metrics import EngineMetrics

RETRY = {'Retry-After': '1'}  # seconds
MAX_BODIES = 16  # of the largest size, held at a time
MAX_ERROR = 2000  # characters; a message may contain a whole item
_Milliseconds = Annotated[float, Interval(gt=0.0, le=3.6e6)]


class Service:
  """The ASGI application `app` of an engine; set `is_ready` after the warm-up.

  The engine gets rows from here only. Attributes of `limits`: `max_pending`,
  rows in the engine and of a request; `max_waiting`, further rows, above which
  the answer is 503; `max_body_bytes` of a request (all together: `MAX_BODIES`
  times that); `max_seconds` from the arrival of a request to its answer.
  """

  def __init__(self, engine: Any, limits: Any):
    self.is_ready = False
    self._engine, self._limits = engine, limits
    self._closed = ''  # the error of an engine that a defect has ended
    # Changed by the event loop only, as is the line.
    self._running = self._waiting = self._bytes = 0
    self._line, self._freed = asyncio.Lock(), asyncio.Event()
    self._tasks: set[asyncio.Task[Any]] = set()
    self._registry = prometheus_client.CollectorRegistry()
    self._registry.register(EngineMetrics(engine))
    self._responses = prometheus_client.Counter(
      'http_responses', 'Of /predict', ['status'], registry=self._registry
    )
    prometheus_client.Gauge(
      'http_waiting_rows', 'Rows that wait for room', registry=self._registry
    ).set_function(lambda: self._waiting)
    self.app = Starlette(
      routes=[
        Route('/predict', self._predict, methods=['POST']),
        Route('/healthz', self._health),
        Route('/readyz', self._health),
        Route('/metrics', self._metrics),
      ],
      exception_handlers={HTTPException: _refusal},  # such as 404, 405
    )

  def _check(self, is_ready: bool) -> None:
    """Raises 503 if the engine has ended, or is not ready."""
    if self._closed or not is_ready:
      wait = 'the programs are being compiled; retry later'
      raise HTTPException(503, self._closed or wait, RETRY)

  async def _health(self, request: Request) -> Response:
    self._check(self.is_ready or request.url.path == '/healthz')
    return _json({'status': 'ok'})

  def _metrics(self, request: Request) -> Response:
    text = prometheus_client.generate_latest(self._registry)
    kind = prometheus_client.CONTENT_TYPE_LATEST
    return Response(text, headers={'Content-Type': kind})

  async def _predict(self, request: Request) -> Response:
    """Answers a request and counts the answer by its status."""
    body = bytearray()
    try:
      response = await self._answer(request, body)
    except HTTPException as error:
      response = await _refusal(request, error)
    finally:
      self._bytes -= len(body)
    self._responses.labels(response.status_code).inc()
    return response

  async def _answer(self, request: Request, body: bytearray) -> Response:
    self._check(self.is_ready)
    arrived = asyncio.get_running_loop().time()
    seconds = self._limits.max_seconds
    try:
      async with asyncio.timeout(seconds):
        await self._read(request, body)
    except TimeoutError as error:
      late = f'body: expected within {seconds:g} s'
      raise HTTPException(408, late) from error
    items, own, is_batch = read_body(body, self._limits.max_pending)
    seconds = min(seconds, own or seconds)
    try:
      async with asyncio.timeout_at(arrived + seconds):
        answers = await self._answers(items, arrived + seconds)
    except TimeoutError as error:
      late = f'deadline_ms: no answer within {seconds:g} s'
      raise HTTPException(504, late) from error
    except ClosedError as error:
      self._closed = str(error)
      raise HTTPException(503, self._closed, RETRY) from error
    if is_batch:
      return _json({'answers': [*map(_fields, answers)]})
    return _json(_fields(answers[0]), _status(answers[0]))

  async def _read(self, request: Request, body: bytearray) -> None:
    """Appends the body of the request to `body`."""
    most = self._limits.max_body_bytes
    too_long = HTTPException(413, f'body: expected at most {most} bytes')
    if int(request.headers.get('content-length', 0)) > most:
      raise too_long
    try:
      async for chunk in request.stream():
        body += chunk
        self._bytes += len(chunk)
        if len(body) > most:
          raise too_long
        if self._bytes > MAX_BODIES * most:
          raise HTTPException(503, 'body: too many requests; retry', RETRY)
    except ClientDisconnect as error:
      raise HTTPException(400, 'body: the client has left') from error

  async def _answers(self, items: Sequence[Any], latest: float) -> list[Any]:
    """Returns the answers once there was room for the rows."""
    await self._enter(len(items))
    # Not cancelled with its request: the rows take room until their answer.
    task = asyncio.create_task(self._run(items, latest))
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    return await asyncio.shield(task)

  async def _enter(self, rows: int) -> None:
    """Waits for room in the engine, in the order of the requests."""
    room = self._limits.max_pending
    most = room + self._limits.max_waiting
    if self._running + self._waiting + rows > most:
      busy = f'{most} rows are pending or waiting; retry later'
      raise HTTPException(503, f'max_waiting: {busy}', RETRY)
    self._waiting += rows
    try:
      async with self._line:
        while self._running + rows > room:
          self._freed.clear()
          await self._freed.wait()
        self._running += rows
    finally:
      self._waiting -= rows

  async def _run(self, items: Sequence[Any], latest: float) -> list[Any]:
    """Encodes items in a thread and waits for their answers."""
    loop = asyncio.get_running_loop()

    def submit() -> list[Any]:
      if loop.time() > latest:
        raise TimeoutError
      return self._engine.submit_all(items)

    try:
      futures = await loop.run_in_executor(None, submit)
      return await asyncio.gather(*map(asyncio.wrap_future, futures))
    finally:
      self._running -= len(items)
      self._freed.set()


def read_body(
  body: bytes | bytearray, max_rows: int
) -> tuple[list[Any], float | None, bool]:
  """Returns items, seconds that they may take, and if `{"items": ...}` is used.

  An illegal item becomes an InputError. Raises HTTPException for other errors.
  """
  try:
    value = text_files.loads(body.decode())
  except ValueError as error:
    message = f'body: expected one JSON value in UTF-8, got {error}'
    raise HTTPException(400, message[:MAX_ERROR]) from error
  seconds = None
  if isinstance(value, dict) and 'deadline_ms' in value:
    given = value.pop('deadline_ms')
    try:
      seconds = fields.check_value('deadline_ms', given, _Milliseconds) / 1000.0
    except ConfigError as error:
      raise HTTPException(422, str(error)[:MAX_ERROR]) from error
  if not isinstance(value, dict) or 'items' not in value:
    return [read_item(value)], seconds, False
  items = value.pop('items')
  if value:
    message = f"body: expected 'items' and 'deadline_ms', got also {[*value]}"
    raise HTTPException(422, message[:MAX_ERROR])
  if not isinstance(items, list) or not items:
    raise HTTPException(422, 'items: expected a list of one item or more')
  if len(items) > max_rows:
    message = f'items: expected at most {max_rows}, got {len(items)}'
    raise HTTPException(413, message)
  return [*map(read_item, items)], seconds, True


def read_item(value: Any) -> Any:
  """Returns an item as the engine takes it, an InputError for an illegal one.

  No string reaches a reader of images, which would open it as a path.
  """
  if isinstance(value, str):
    return {'text': value}
  if not isinstance(value, dict):
    legal = 'an object such as {"text": ...} or {"image": ...}'
    return InputError(f'item: expected {legal}, got {type(value).__name__}')
  if 'image' not in value:
    return value
  try:
    return value | {'image': base64.b64decode(value['image'], validate=True)}
  except (TypeError, ValueError) as error:
    legal = 'the bytes of a file in base64'
    return InputError(f'image: expected {legal}, got {error}')


def _fields(answer: Any) -> dict[str, Any]:
  if isinstance(answer, Failure):
    return {'error': str(answer.error)[:MAX_ERROR]}
  return answer.as_dict()


def _status(answer: Any) -> int:
  if not isinstance(answer, Failure):
    return 200
  if isinstance(answer.error, ClosedError):
    return 503
  return 422 if isinstance(answer.error, InputError) else 500


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
  text = json.dumps(value, allow_nan=False)
  return Response(text, status, headers, 'application/json')


async def _refusal(request: Request, error: Any) -> Response:
  return _json({'error': error.detail}, error.status_code, error.headers)
