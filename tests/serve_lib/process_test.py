"""What a process of ours does: it keeps memory, and has few threads."""

import pathlib
import subprocess
import sys

import pytest

from core import machine

PROGRAM = """
import resource, sys
import numpy as np
from serve_lib.process import keep_freed_memory
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


THREADS = """
import os, sys
import numpy as np
from serve_lib import onnx_program, process
if sys.argv[1] == 'own':
  process.own_process()
x = np.ones((2, 2), np.float32)
def threads():
  program = onnx_program.build(lambda x: x @ x.T, [x])
  assert (program([x]) == 2).all()
  return program, len(os.listdir('/proc/self/task'))
programs = [threads() for _ in range(3)]
print(programs[2][1] - programs[0][1])
process.collapse_pages()
assert (programs[0][0]([x]) == 2).all()
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


MEMORY = """
import pathlib, re
import numpy as np
from serve_lib import process
def resident():
  text = pathlib.Path('/proc/self/status').read_text()
  return int(re.search(r'VmRSS: +(.*) kB', text.expandtabs(1))[1]) // 1000
before = process.keep_freed_memory() and resident()
np.ones(2**25)
kept = resident()
process.return_memory()
print(before, kept, resident())
"""


def test_memory_of_a_photo_is_returned():
  command = [sys.executable, '-c', MEMORY]
  before, kept, after = subprocess.check_output(command, text=True).split()
  if before == 'False' or int(kept) < int(before) + 200:
    pytest.skip('the C library keeps no memory')
  assert int(after) < int(before) + 100


def test_programs_of_onnx_runtime_share_their_threads():
  pytest.importorskip('onnxruntime', reason='needs onnx and onnxruntime')
  if not pathlib.Path('/proc/self/task').exists() or machine.cores() < 2:
    pytest.skip('counts threads in /proc, of several cores')
  more = {}
  for how in ('own', 'other'):
    command = [sys.executable, '-c', THREADS, how]
    more[how] = int(subprocess.check_output(command, text=True))
  assert more == {'own': 0, 'other': 2 * (machine.cores() - 1)}
