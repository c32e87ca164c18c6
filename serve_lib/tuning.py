"""What makes programs fast on this machine: compiler options, kept memory.

On a CPU XLA compiles products to kernels of YNNPACK or of Eigen, and which of
them is faster depends on the shapes and the machine. Eigen was 1.08 to 1.37
times as fast on the encoders that were measured, so it is the default here.
`Tuner` measures both if asked, and remembers the choice.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dataset_lib import text_files
from dataset_lib.errors import InvalidDataError

# Compiler options by name; the first is the default.
CPU_OPTIONS: Mapping[str, Mapping[str, Any]] = {
  'eigen': {'xla_cpu_experimental_ynn_fusion_type': ''},
  'ynnpack': {},
}
OTHER_OPTIONS: Mapping[str, Mapping[str, Any]] = {'default': {}}
FILE = 'options.json'  # of the cache directory: choices by machine and program
# Of a measurement; with less time a program of 7 ms lost to one of 11.
ROUNDS, LEAST_SECONDS, SETTLE_SECONDS = 5, 0.3, 0.005
OWNED = threading.Event()  # set by `own_process`
# Options of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_HUGE, _COLLAPSE = 2**21, 25  # bytes of a huge page; MADV_COLLAPSE of Linux


class Tuner:
  """Compiles programs with the options that are fastest on this machine.

  Args:
    device: the device that the programs run on.
    directory: where the choices are remembered, '' for nowhere.
    tune: measure programs whose choice is not remembered.
  """

  def __init__(self, device: jax.Device, directory: str, tune: bool):
    is_cpu = device.platform == 'cpu'
    self._device, self._lock = device, threading.RLock()
    self._options = CPU_OPTIONS if is_cpu else OTHER_OPTIONS
    self._tune = tune and len(self._options) > 1
    self._path = pathlib.Path(directory, FILE) if directory else None
    self._known: dict[str, Any] = {}  # options by machine and program
    if self._path and len(self._options) > 1:
      with contextlib.suppress(OSError, InvalidDataError):
        self._known = text_files.read_object(self._path)
    self.chosen = collections.Counter[str]()  # programs by their options

  def compile(
    self, lowered: Any, arguments: Sequence[Any], at_once: int = 1
  ) -> Any:
    """Returns the compiled program; `arguments` are arrays or shapes.

    `at_once` is the number of calls at a time that are measured.
    """
    default, key, name = next(iter(self._options)), '', ''
    if self._tune or self._known:
      text = f'{at_once} {lowered.as_text()}'
      key = hashlib.sha256(text.encode()).hexdigest()[:32]
      known = self._known.get(machine())
      name = str(known.get(key)) if isinstance(known, dict) else ''
    if name not in self._options and self._tune:
      programs = {n: lowered.compile(o) for n, o in self._options.items()}
      with self._lock:  # one measurement at a time
        given = functools.partial(_zeros, arguments, self._device)
        name = fastest(programs, given, at_once)
        self._remember(key, name)
      program = programs[name]
    else:
      name = name if name in self._options else default
      program = lowered.compile(self._options[name])
    self.chosen[name] += 1
    return program

  def _remember(self, key: str, name: str) -> None:
    known = self._known.get(machine())
    known = known if isinstance(known, dict) else {}
    self._known[machine()] = known | {key: name}
    if self._path:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      text_files.write_json(self._path, self._known)


def machine() -> str:
  """Returns what choices depend on: processor, cores and version of XLA."""
  model = platform.processor() or platform.machine()
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    names = [x.partition(': ')[2] for x in lines if x.startswith('model name')]
    model = (*names, model)[0]
  return f'{model}, {cores()} cores, JAX {jax.__version__}'


def cores() -> int:
  """Returns the processors that this process may use."""
  affinity = getattr(os, 'sched_getaffinity', None)  # not on every system
  return len(affinity(0)) if affinity else os.cpu_count() or 1


def _zeros(arguments: Any, device: jax.Device) -> Any:
  """Returns the arguments, with zeros where they are shapes."""

  def fill(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return jax.device_put(np.zeros(leaf.shape, leaf.dtype), device)
    return leaf

  return jax.tree.map(fill, arguments)


def fastest(
  programs: Mapping[str, Callable[..., Any]],
  arguments: Callable[[], Any],
  at_once: int,
) -> str:
  """Returns the name of the program with the least median time, in turns.

  Each time is that of `at_once` calls by as many threads. `arguments()` returns
  new ones for each call, as a program may reuse theirs.
  """
  seconds: dict[str, list[float]] = {name: [] for name in programs}
  together = threading.Barrier(at_once)

  def call(program: Callable[..., Any], given: Any) -> None:
    together.wait()  # each in a thread of its own
    jax.block_until_ready(program(*given))

  with concurrent.futures.ThreadPoolExecutor(at_once) as threads:

    def measure(program: Callable[..., Any]) -> float:
      given = [jax.block_until_ready(arguments()) for _ in range(at_once)]
      time.sleep(SETTLE_SECONDS)  # threads of the program before may still spin
      started = time.perf_counter()
      for done in [threads.submit(call, program, one) for one in given]:
        done.result()
      return time.perf_counter() - started

    for program in programs.values():  # the first call is slower
      measure(program)
    spent = 0.0
    while spent < LEAST_SECONDS or min(map(len, seconds.values())) < ROUNDS:
      for name, program in programs.items():
        seconds[name].append(measure(program))
        spent += seconds[name][-1]
  return min(programs, key=lambda name: float(np.median(seconds[name])))


def own_process() -> None:
  """Makes programs fast in a process that does nothing else.

  Keeps freed memory, and lets all sessions of ONNX Runtime share their threads;
  then the process can have no session with threads of its own.
  """
  keep_freed_memory()
  OWNED.set()


def keep_freed_memory() -> bool:
  """Keeps freed host memory in the process instead of the kernel.

  glibc returns XLA's temporaries above 32 MB to the kernel after each run of a
  CPU program, and the next run faults the same pages in again. Keeping them
  saves 0 to 13 % of the time of a BERT-base at batch 16, and a fifth of a
  training step of a ViT of width 64. Irreversible; call it before threads are
  created, whose arenas it does not reach. Returns True if the C library has all
  options.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (OSError, TypeError, AttributeError):
    return False
  options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
  known = [mallopt(option, value) for option, value in options]
  return all(known)


def collapse_pages() -> None:
  """Puts the memory of this process, such as weights, into huge pages.

  A row alone reads all weights once; with huge pages a MiniLM takes 4 to 9 %
  less time for it. Does nothing where Linux cannot do it (before 6.1).
  """
  with contextlib.suppress(OSError, TypeError, AttributeError):
    madvise = ctypes.CDLL(None).madvise
    for line in pathlib.Path('/proc/self/maps').read_text().splitlines():
      place, mode, _, _, inode, *_ = line.split()
      first, last = (int(end, 16) for end in place.split('-'))
      first, last = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
      if mode.startswith('rw') and inode == '0' and first < last:
        size = ctypes.c_size_t(last - first)
        madvise(ctypes.c_void_p(first), size, _COLLAPSE)
