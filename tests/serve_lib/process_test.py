"""A process of ours: freed memory stays, ONNX Runtime has one pool."""

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


THREADS = """
import sys
import numpy as np
import onnxruntime
from serve_lib import onnx_program, tuning
if sys.argv[1] == 'ours':
  tuning.own_process()
kinds = []
class Session(onnxruntime.InferenceSession):
  def __init__(self, model, options, **others):
    kinds.append(options.use_per_session_threads)
    super().__init__(model, options, **others)
onnxruntime.InferenceSession = Session
x = np.ones(3, np.float32)
for _ in range(2):
  assert (onnx_program.build(lambda _, x: x + 1, {}, x, 2)({}, x) == 2).all()
print(*kinds)
"""


@pytest.mark.parametrize('whose', ['ours', 'of others'])
def test_sessions_share_threads_only_in_a_process_of_ours(whose):
  runtime = pytest.importorskip('onnxruntime')
  if not hasattr(runtime, 'set_global_thread_pool_sizes'):
    pytest.skip('this ONNX Runtime has no shared threads')
  command = [sys.executable, '-c', THREADS, whose]
  printed = subprocess.check_output(command, text=True).split()
  assert printed == [str(whose != 'ours')] * 2
