"""An item is freed with its answer, whatever became of it; see `Failure`."""

import collections
import gc
import itertools
import subprocess
import sys
import time
import weakref

import pytest

from serve_lib import http
from serve_lib.chain import MAX_DETAILS, Failure, InputError
from tests.serve_lib import toy


class Tokens(list):
  """A list that can be watched."""

  __hash__ = object.__hash__


class Policy(toy.FaultyPolicy):
  """Fails to encode [11], with the item in many frames."""

  def encode(self, item):
    if item[1] == [11]:
      try:
        self.fail(item)
      except ZeroDivisionError as error:
        raise InputError('a bad item') from error
    return super().encode(item)

  def fail(self, item):
    try:
      raise KeyError('before')
    except KeyError as error:
      kept = error  # a cycle of its own: error, frame, error
      raise ZeroDivisionError(str(kept)) from None


def is_gone(watched):
  """Returns True if it is freed in time, without a collection of garbage."""
  gc.disable()
  deadline = time.monotonic() + toy.WAIT / 2
  while watched() is not None and time.monotonic() < deadline:
    time.sleep(0.001)
  gc.enable()
  return watched() is None


@pytest.mark.parametrize(('tokens', 'during'), [
  ([2, 0], ''), ([11], 'encode'), ([], 'encode'), ([7], 'answer'),
  ([toy.POISON], 'stage 0'), ([2, 0], 'engine'),
])  # fmt: skip
def test_an_answer_does_not_hold_its_item(monkeypatch, tokens, during):
  def broken(batch, *arguments):
    raise RuntimeError('a defect')

  engine = toy.make_engine(Policy())
  if during == 'engine':
    monkeypatch.setattr(engine._worker, '_go_on', broken)
  tokens = Tokens(tokens)
  watched = weakref.ref(tokens)
  answer = engine.predict([('full', tokens)])[0]
  if during:
    assert answer.during == during
    if during != 'engine':  # is raised again in its thread
      assert answer.error.__traceback__ is None
    has_trace = not isinstance(answer.error, InputError)
    assert answer.details.startswith('Traceback') == has_trace
    assert type(answer.error).__name__ in answer.details
  else:
    assert answer.pop('tokens') is tokens
  del tokens
  assert is_gone(watched)  # although the answer is there
  engine.close()


def test_what_the_caller_was_handling_is_left_alone():
  with toy.make_engine(Policy()) as engine:
    try:
      raise KeyError('of the caller')
    except KeyError as error:
      answer = engine.predict([('full', [11])])[0]
      frames = error.__traceback__
  assert frames is not None
  assert isinstance(answer.error.__cause__, ZeroDivisionError)
  assert answer.error.__cause__.__context__ is None


def test_details_are_bounded_and_never_in_the_way():
  class UnreadableError(Exception):
    def __str__(self):
      raise RuntimeError('no text')

  failure = Failure.of(ValueError('x' * 10**6), 'encode')
  assert len(failure.details) == MAX_DETAILS
  assert 'details' not in repr(failure)
  assert Failure.of(UnreadableError(), 'encode').during == 'encode'
  group = ExceptionGroup('several', [ValueError('one'), KeyError('two')])
  assert 'KeyError' in Failure.of(group, 'encode').details


@pytest.fixture
def no_collection():
  gc.collect()
  gc.disable()
  yield
  gc.enable()


def test_items_that_stream_are_freed_whatever_becomes_of_them(no_collection):
  kinds = [2, 0], [1] * 4, [0], [], [7], [toy.POISON]
  alive, most, counts = weakref.WeakSet(), 0, collections.Counter()

  def items(count):
    for tokens in itertools.islice(itertools.cycle(kinds), count):
      alive.add(item := Tokens(tokens))
      yield 'full', item

  with toy.make_engine(Policy()) as engine:
    for answer in engine.stream(items(360), window=8):
      most = max(most, len(alive))
      counts[getattr(answer, 'during', 'good')] += 1
  assert most < 8 + 8  # those of the window, and of batches
  assert counts == {'good': 180, 'encode': 60, 'answer': 60, 'stage 0': 60}


PROGRAM = """
from tests.serve_lib import toy
engine = toy.make_engine()  # is never closed
for _ in range(99):
  engine.submit(toy.GOOD).add_done_callback(lambda _: print('answered'))
"""


def test_pending_rows_are_answered_before_python_ends():
  output = subprocess.check_output([sys.executable, '-c', PROGRAM], text=True)
  assert output.split() == ['answered'] * 99


@pytest.mark.anyio
async def test_a_long_body_is_freed_when_it_is_no_longer_counted(
  monkeypatch, no_collection
):
  made = []

  class Body(bytearray):
    def __init__(self):
      made.append(weakref.ref(self))

  async def chunks():
    yield b' ' * 101

  monkeypatch.setattr(http, 'bytearray', Body, raising=False)
  engine = toy.make_engine()
  async with toy.started(engine, max_body_bytes=100) as client:
    found = await client.post('/predict', content=chunks())
    assert (found.status_code, made[0]()) == (413, None)
  engine.close()
