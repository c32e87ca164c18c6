"""What a process of ours does: it keeps memory, and has few threads."""

import pathlib
import subprocess
import sys

import pytest

from core import machine

MEMORY = """
import pathlib, re, sys
import numpy as np
from serve_lib import process
if sys.argv[1] == 'keep' and not process.keep_freed_memory():
  print('unknown'); sys.exit()
def resident():
  text = pathlib.Path('/proc/self/status').read_text()
  return int(re.search(r'VmRSS: +(.*) kB', text.expandtabs(1))[1]) // 1000
before = resident()
np.ones(2**25)
kept = resident()
process.return_memory()
print(kept - before, resident() - before)
"""


THREADS = """
import os, sys
import numpy as np
from serve_lib import process
from serve_lib.onnx.program import build
if sys.argv[1] == 'own':
  process.own_process()
x = np.ones((2, 2), np.float32)
def threads():
  program = build(lambda x: x @ x.T, [x])
  assert (program([x]) == 2).all()
  return program, len(os.listdir('/proc/self/task'))
programs = [threads() for _ in range(3)]
print(programs[2][1] - programs[0][1])
process.collapse_pages()
assert (programs[0][0]([x]) == 2).all()
"""


def run(*arguments):
  command = [sys.executable, '-c', *arguments]
  return subprocess.check_output(command, text=True).strip()


def test_freed_memory_is_kept_until_it_is_returned():
  output = run(MEMORY, 'keep')
  if output == 'unknown':
    pytest.skip('the C library has no mallopt')
  kept, left = map(int, output.split())  # of 268 MB
  assert left < 100 < kept
  assert int(run(MEMORY, 'give back').split()[0]) < 100


def test_programs_of_onnx_runtime_share_their_threads():
  pytest.importorskip('onnxruntime', reason='needs onnx and onnxruntime')
  if not pathlib.Path('/proc/self/task').exists() or machine.cores() < 2:
    pytest.skip('counts threads in /proc, of several cores')
  more = {how: int(run(THREADS, how)) for how in ('own', 'other')}
  assert more == {'own': 0, 'other': 2 * (machine.cores() - 1)}
