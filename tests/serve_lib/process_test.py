"""Freed memory that stays with the process."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from serve_lib.tuning import keep_freed_memory
if sys.argv[1] == 'keep' and not keep_freed_memory():
  print('unknown'); sys.exit()
def faults():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2**23)
before = faults()
for _ in range(4):
  np.ones(2**23)
print(faults() - before)
"""


def faults(how):
  command = [sys.executable, '-c', PROGRAM, how]
  return subprocess.check_output(command, text=True).strip()


def test_pages_are_not_asked_for_again():
  kept = faults('keep')
  if kept == 'unknown':
    pytest.skip('the C library has no mallopt')
  # 64 MB are 16,384 pages of 4 kB, or 32 of 2 MB.
  assert int(kept) < 8 <= int(faults('give back'))
