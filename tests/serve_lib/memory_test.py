"""An item is freed with its answer, whatever became of it; see `Failure`."""

import gc
import time
import weakref

import pytest

from serve_lib import worker
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


@pytest.fixture
def make(monkeypatch):
  # The thread frees rows by itself, and not because it ends.
  monkeypatch.setattr(worker, 'LINGER_SECONDS', 60.0)
  return lambda: toy.make_engine(Policy())


def is_gone(watched):
  """Returns True if it is freed in time, without a collection of garbage."""
  gc.disable()
  deadline = time.monotonic() + toy.WAIT / 2
  while watched() is not None and time.monotonic() < deadline:
    time.sleep(0.001)
  gc.enable()
  return watched() is None


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
@pytest.mark.parametrize(
  ('tokens', 'during'),
  [
    ([2, 0], ''), ([11], 'encode'), ([], 'encode'), ([7], 'answer'),
    ([toy.POISON], 'stage 0'), ([2, 0], 'engine'),
  ],
)  # fmt: skip
def test_an_answer_does_not_hold_its_item(make, monkeypatch, tokens, during):
  def broken(batch, *arguments):
    raise RuntimeError('a defect')

  engine = make()
  if during == 'engine':
    monkeypatch.setattr(engine._worker, '_go_on', broken)
  tokens = Tokens(tokens)
  watched = weakref.ref(tokens)
  answer = engine.predict([('full', tokens)])[0]
  if during:
    assert answer.during == during
    if during != 'engine':  # is raised again in its thread
      assert answer.error.__traceback__ is None
    assert answer.details.startswith('Traceback')
    assert type(answer.error).__name__ in answer.details
  else:
    assert answer.pop('tokens') is tokens
  del tokens
  assert is_gone(watched)  # although the answer is there
  engine.close()


def test_what_the_caller_was_handling_is_left_alone(make):
  with make() as engine:
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
