"""Streams: an early exit of the caller does not wait for the source."""

import signal
import subprocess
import sys
import threading

import pytest

from tests.serve_lib import toy

WAIT = 20.0
GOOD = ('full', [0])
PROGRAM = """
import signal
from tests.serve_lib import toy
# Ignored where the tests run in the background of a shell.
signal.signal(signal.SIGINT, signal.default_int_handler)
def items():
  for line in open(0, 'rb', closefd=False):
    yield 'full', [0]
with toy.make_engine() as engine:
  for answer in engine.stream(items(), 4):
    print(answer['depth'], flush=True)
"""


def test_an_interrupt_ends_a_program_whose_source_is_idle(repository):
  with subprocess.Popen(
    [sys.executable, '-c', PROGRAM],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    cwd=repository,
  ) as process:
    try:
      process.stdin.write(b'one\n')
      process.stdin.flush()
      assert process.stdout.readline() == b'1\n'
      process.send_signal(signal.SIGINT)
      assert process.wait(WAIT) == -signal.SIGINT  # and its input is open
      message = process.stderr.read()
    finally:
      process.kill()
  assert message.splitlines()[-1] == b'KeyboardInterrupt'


@pytest.fixture
def engine():
  with toy.make_engine() as engine:
    yield engine


def test_after_an_early_exit_no_item_is_submitted(engine):
  asked, go = threading.Event(), threading.Event()

  def source():
    yield GOOD
    asked.set()
    assert go.wait(WAIT)
    yield GOOD

  answers = engine.stream(source(), 4)
  next(answers)
  assert asked.wait(WAIT)
  (reader,) = (t for t in threading.enumerate() if 'stream' in t.name)
  answers.close()
  assert reader.is_alive()
  go.set()
  reader.join(WAIT)
  assert not reader.is_alive()
  assert engine.monitor.snapshot()['answers'] == 1


@pytest.mark.parametrize('breaks', [False, True])
def test_at_its_end_no_thread_stays(engine, breaks):
  def source():
    yield GOOD
    if breaks:
      raise OSError('the pipe broke')

  engine.predict([GOOD])
  before = threading.active_count()
  answers = engine.stream(source(), 4)
  next(answers)
  with pytest.raises(OSError if breaks else StopIteration):
    next(answers)
  assert threading.active_count() == before
