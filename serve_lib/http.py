"""An HTTP application in front of an engine: JSON in, JSON out.

`POST /predict` takes an item or `{"items": [...]}`. `/healthz`, `/readyz` and
`/metrics`, in the format of Prometheus, report the state. Rows wait in a line
until the engine has room for them, and leave it when their time is over; a row
that the engine has accepted is computed even if its request ends before.
"""

import asyncio
import base64
import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import prometheus_client
from annotated_types import Interval, MinLen
from prometheus_client import core, registry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dataset_lib import fields, text_files
from dataset_lib.errors import ConfigError
from serve_lib.chain import ClosedError, Failure, InputError

RETRY = {'Retry-After': '1'}  # seconds
MAX_BODIES = 16  # of the largest size, held at a time
MAX_ERROR = 2000  # characters; a message may contain a whole item
# Metrics that are counted, and the labels of mappings; of others `source`.
_COUNTS = (
  'engine_answers', 'engine_failures', 'engine_depth', 'engine_reasons',
  'http_responses',
)  # fmt: skip
_LABELS = dict(
  engine_failures='during', engine_depth='depth', engine_reasons='reason',
  engine_latency='quantile', engine_retention='quantile', engine_fill='stage',
  http_responses='status',
)  # fmt: skip


@dataclasses.dataclass
class _Batch:
  items: Annotated[tuple[Any, ...], MinLen(1), 'a list of one item or more']
  deadline_ms: Annotated[float, Interval(gt=0.0, le=3.6e6)] = math.inf


class Service(registry.Collector):
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
    self._statuses = collections.Counter[int]()  # of the answers to /predict
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
    if self._closed or not is_ready:
      wait = 'the programs are being compiled; retry later'
      raise HTTPException(503, self._closed or wait, RETRY)

  async def _health(self, request: Request) -> Response:
    self._check(self.is_ready or request.url.path == '/healthz')
    return _json({'status': 'ok'})

  async def _metrics(self, request: Request) -> Response:
    kind = prometheus_client.CONTENT_TYPE_LATEST
    return Response(prometheus_client.generate_latest(self), media_type=kind)

  def collect(self) -> Iterator[core.Metric]:
    """Yields the numbers of `Monitor.snapshot`, `Engine.status` and requests.

    The keys of a mapping are values of its label. None is left out.
    """
    found = self._engine.monitor.snapshot() | self._engine.status()
    for name, value in found.pop('drift', {}).items():
      found[f'drift_{name}'] = value
    for source, report in found.pop('drift_by_source', {}).items():
      for name, value in report.items():
        found.setdefault(f'drift_by_source_{name}', {})[source] = value
    values = {f'engine_{name}': value for name, value in found.items()}
    values |= dict(
      http_waiting_rows=self._waiting, http_responses=self._statuses
    )
    for name, value in values.items():
      is_count, is_group = name in _COUNTS, isinstance(value, dict)
      kind = core.CounterMetricFamily if is_count else core.GaugeMetricFamily
      labels = [_LABELS.get(name, 'source')] if is_group else []
      metric = kind(name, 'See docs/serving.md', labels=labels)
      for key, number in value.items() if is_group else [('', value)]:
        if labels == ['quantile']:  # 'p95'
          key = int(key[1:]) / 100
        if number is not None:
          metric.add_metric([str(key)], float(number))
      yield metric

  async def _predict(self, request: Request) -> Response:
    body = bytearray()
    try:
      response = _json(*await self._answer(request, body))
    except HTTPException as error:
      response = await _refusal(request, error)
    finally:
      self._bytes -= len(body)
    self._statuses[response.status_code] += 1
    return response

  async def _answer(self, request: Request, body: bytearray) -> tuple[Any, int]:
    self._check(self.is_ready)
    now, late = asyncio.get_running_loop().time(), (408, 'body')
    try:
      async with asyncio.timeout_at(now + self._limits.max_seconds) as limit:
        await self._read(request, body)
        items, own, is_batch = read_body(body, self._limits.max_pending)
        limit.reschedule(now + min(self._limits.max_seconds, own))
        late = 504, 'deadline_ms'
        answers = [*map(_fields, await self._answers(items))]
    except TimeoutError as error:
      raise HTTPException(late[0], f'{late[1]}: the time is over') from error
    except ClientDisconnect as error:
      raise HTTPException(400, 'body: the client has left') from error
    except ClosedError as error:
      self._closed = str(error)
      raise HTTPException(503, self._closed, RETRY) from error
    if is_batch:
      return {'answers': [value for value, _ in answers]}, 200
    return answers[0]

  async def _read(self, request: Request, body: bytearray) -> None:
    most = self._limits.max_body_bytes
    async for chunk in request.stream():
      body += chunk
      self._bytes += len(chunk)
      if len(body) > most:
        raise HTTPException(413, f'body: expected at most {most} bytes')
      if self._bytes > MAX_BODIES * most:
        raise HTTPException(503, 'body: too many requests; retry', RETRY)

  async def _answers(self, items: Sequence[Any]) -> list[Any]:
    """Encodes items in a thread once there is room, returns their answers."""
    rows, room = len(items), self._limits.max_pending
    most = room + self._limits.max_waiting
    if self._running + self._waiting + rows > most:
      raise HTTPException(503, f'max_waiting: {most} rows wait; retry', RETRY)
    self._waiting += rows
    try:
      async with self._line:  # in the order of the requests
        while self._running + rows > room:
          self._freed.clear()
          await self._freed.wait()
        self._running += rows
    finally:
      self._waiting -= rows

    async def run() -> list[Any]:
      try:
        futures = await asyncio.to_thread(self._engine.submit_all, items)
        return await asyncio.gather(*map(asyncio.wrap_future, futures))
      finally:
        self._running -= rows
        self._freed.set()

    # Not cancelled with its request: the rows take room until their answer.
    task = asyncio.create_task(run())
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    return await asyncio.shield(task)


def read_body(body: bytearray, max_rows: int) -> tuple[list[Any], float, bool]:
  """Returns items, seconds that they may take, and if they are a batch.

  An illegal item becomes an InputError. Raises HTTPException for other errors.
  """
  try:
    value = text_files.loads(body.decode())
  except ValueError as error:
    expected = f'body: expected one JSON value in UTF-8, got {error}'
    raise HTTPException(400, expected) from error
  is_batch = isinstance(value, dict) and 'items' in value
  if not is_batch:
    value = {'items': [value]}
    if isinstance(item := value['items'][0], dict) and 'deadline_ms' in item:
      value['deadline_ms'] = item.pop('deadline_ms')
  try:
    items, milliseconds = fields.check(_Batch, value, '').values()
  except ConfigError as error:
    raise HTTPException(422, str(error)) from error
  if len(items) > max_rows:
    message = f'items: expected at most {max_rows}, got {len(items)}'
    raise HTTPException(413, message)
  return [*map(read_item, items)], milliseconds / 1e3, is_batch


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


def _fields(answer: Any) -> tuple[dict[str, Any], int]:
  if not isinstance(answer, Failure):
    return answer.as_dict(), 200
  status = 422 if isinstance(answer.error, InputError) else 500
  return {'error': str(answer.error)[:MAX_ERROR]}, status


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
  text = json.dumps(value, allow_nan=False)
  return Response(text, status, headers, 'application/json')


async def _refusal(request: Request, error: Any) -> Response:
  value = {'error': error.detail[:MAX_ERROR]}
  return _json(value, error.status_code, error.headers)
