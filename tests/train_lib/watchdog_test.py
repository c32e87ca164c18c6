"""Faults of the watchdog itself: its store fails, or its thread has a bug."""

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
