"""Faults of the watchdog itself: no store, a bug, a thread that cannot run."""

import subprocess
import sys

import pytest

PROGRAM = """
import time
from jax._src import distributed
from train_lib import watchdog

class Store:
  def key_value_set(self, *_):
    raise {error}

state = distributed.global_state
state.client, state.process_id, state.num_processes = Store(), 0, 2
with watchdog.Watchdog(600):
  time.sleep(600)
"""


@pytest.mark.parametrize(
  ('error', 'code', 'line'),
  [
    (
      'RuntimeError("refused")',
      8,
      'error: the key-value store of jax.distributed does not answer',
    ),
    ('KeyError("a bug")', 1, "error: KeyError: 'a bug'"),
  ],
)
def test_process_0_ends_without_a_working_watchdog(error, code, line):
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM.format(error=error)],
    capture_output=True, text=True, timeout=100,
  )  # fmt: skip
  assert done.returncode == code, done.stderr
  assert done.stderr.splitlines()[-1] == line


LOCKED = """
import ctypes
import time
from train_lib import watchdog

watchdog.SILENCE = watchdog.TICK = 0.5
with watchdog.Watchdog(1):
  time.sleep(2)
  ctypes.PyDLL(None).sleep(4)  # keeps Python's lock
"""


def test_stacks_are_printed_when_no_thread_can_run():
  done = subprocess.run(
    [sys.executable, '-c', LOCKED], capture_output=True, text=True, timeout=100
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr.startswith('Timeout (0:00:01.5')
  assert 'line 9 in <module>' in done.stderr
