"""The memory of bodies of the HTTP application."""

import gc
import types
import weakref

import httpx2
import pytest

from serve_lib import http
from serve_lib.engine import Engine
from tests.serve_lib.http_test import LIMITS, Chain, Policy


class Body(bytearray):
  """A body with a weak reference."""

  made: list[weakref.ref] = []

  def __init__(self):
    self.made.append(weakref.ref(self))


async def chunks():
  yield b' ' * 101


@pytest.mark.anyio
async def test_a_long_body_is_freed_when_it_is_no_longer_counted(monkeypatch):
  monkeypatch.setattr(http, 'bytearray', Body, raising=False)
  limits = types.SimpleNamespace(**LIMITS | {'max_body_bytes': 100})
  with Engine(Chain(), Policy(), (6,), (1,), ahead=0) as engine:
    service = http.Service(engine, limits)
    service.is_ready = True
    given = httpx2.ASGITransport(service.app)
    gc.collect()
    gc.disable()
    try:
      async with httpx2.AsyncClient(transport=given) as client:
        found = await client.post('http://a/predict', content=chunks())
      assert (found.status_code, Body.made[0]()) == (413, None)
    finally:
      gc.enable()
      service.close()
