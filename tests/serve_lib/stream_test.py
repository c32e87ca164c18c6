"""Who leaves a stream early does not wait for its source."""

import concurrent.futures
import signal
import subprocess
import sys
import threading

import pytest

from serve_lib import stream

WAIT = 20.0
PROGRAM = """
import concurrent.futures, signal
from serve_lib import stream
# Ignored where the tests run in the background of a shell.
signal.signal(signal.SIGINT, signal.default_int_handler)
def submit(line):
  future = concurrent.futures.Future()
  future.set_result(line)
  return future
for line in stream.in_order(open(0, 'rb', closefd=False), submit, 4):
  print(line, flush=True)
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
      assert process.stdout.readline() == b"b'one\\n'\n"
      process.send_signal(signal.SIGINT)
      assert process.wait(WAIT) == -signal.SIGINT  # and its input is open
      message = process.stderr.read()
    finally:
      process.kill()
  assert message.splitlines()[-1] == b'KeyboardInterrupt'


def submit(item):
  future = concurrent.futures.Future()
  future.set_result(item)
  return future


def test_left_early_it_waits_for_nothing_and_submits_nothing():
  asked, go, submitted = threading.Event(), threading.Event(), []

  def source():
    yield 1
    asked.set()
    assert go.wait(WAIT)
    yield 2

  def note(item):
    submitted.append(item)
    return submit(item)

  answers = stream.in_order(source(), note, 4)
  assert next(answers) == 1
  assert asked.wait(WAIT)
  (reader,) = (t for t in threading.enumerate() if 'stream' in t.name)
  answers.close()
  assert reader.is_alive()
  go.set()
  reader.join(WAIT)
  assert not reader.is_alive()
  assert submitted == [1]


@pytest.mark.parametrize('breaks', [False, True])
def test_at_its_end_no_thread_stays(breaks):
  def source():
    yield 1
    if breaks:
      raise OSError('the pipe broke')

  before = threading.active_count()
  answers = stream.in_order(source(), submit, 4)
  assert next(answers) == 1
  with pytest.raises(OSError if breaks else StopIteration):
    next(answers)
  assert threading.active_count() == before
