"""The event loop of tests, and a check of leftover threads."""

import threading

import pytest

from tests.serve_lib import toy


@pytest.fixture
def anyio_backend():
  return 'asyncio'


@pytest.fixture
def no_thread_stays():
  toy.compiled()
  before = threading.active_count()
  yield
  assert threading.active_count() == before
