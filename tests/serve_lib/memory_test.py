"""An item is freed with its answer, whatever became of it; see `Failure`."""

import gc
import json
import pathlib
import subprocess
import sys
import time
import weakref

import pytest

from serve_lib.chain import MAX_DETAILS, Failure, InputError
from tests.serve_lib import toy


class Tokens(list):
  """A list that can be watched."""


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


@pytest.mark.parametrize(
  ('tokens', 'during'),
  [
    ([2, 0], ''), ([11], 'encode'), ([], 'encode'), ([7], 'answer'),
    ([toy.POISON], 'stage 0'), ([2, 0], 'engine'),
  ],
)  # fmt: skip
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


PROGRAM = """
import collections, dataclasses, gc, json, os
import numpy as np
from serve_lib.engine import Engine
from tests.serve_lib import toy

class Chain(toy.Chain):
  variants = ('full',)

class Policy(toy.Policy):
  def encode(self, item):
    return dataclasses.replace(super().encode(item[:2]), context=item)

  def answer(self, row):
    variant, tokens, payload = row.encoded.context
    if tokens == [7]:
      raise ZeroDivisionError('answer')
    return int(payload[-1])

KINDS = [[2, 0], [1] * 4, [0], [], [7], [toy.POISON]]

def items(count):
  for number in range(count):
    yield 'full', KINDS[number % 6], np.ones(4 * 2**20, np.uint8)

def resident():
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * os.sysconf('SC_PAGESIZE') / 2**20

engine = Engine(Chain(), Policy(), (3,), (1, 2))  # is never closed
engine.warm_up()
list(engine.stream(items(60), window=8))
gc.collect()
gc.disable()
before, growth, kinds = resident(), 0, collections.Counter()
for answer in engine.stream(items(360), window=8):
  growth = max(growth, resident() - before)
  kinds[getattr(answer, 'during', 'good')] += 1
print(json.dumps([growth, kinds]))
engine.submit(next(items(1))).add_done_callback(lambda _: print('the end'))
"""


def test_memory_is_bounded_whatever_streams_in():
  """1.4 GB of items, two in three bad, and no garbage collection."""
  if not pathlib.Path('/proc/self/statm').exists():
    pytest.skip('resident memory is read from /proc/self/statm')
  output = subprocess.check_output([sys.executable, '-c', PROGRAM], text=True)
  result, end = output.splitlines()
  assert end == 'the end'  # pending rows are answered before Python ends
  growth, kinds = json.loads(result)
  assert growth < 150  # MB; the window alone holds 32
  assert kinds['encode'] == 120
  assert kinds['stage 0'] >= 60
  assert kinds['answer'] > 0
  assert kinds['good'] > 60
