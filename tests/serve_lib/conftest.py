"""Engines with a policy that can break, and a check of leftover threads."""

import threading

import pytest

from tests.serve_lib import toy


@pytest.fixture(scope='module')
def engines():
  toy.compiled()  # before the threads are counted

  def make(**settings):
    return toy.make_engine(toy.FaultyPolicy(), **settings)

  return make


@pytest.fixture
def no_thread_stays():
  before = threading.active_count()
  yield
  assert threading.active_count() == before
