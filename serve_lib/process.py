"""What makes programs fast in this process: threads, kept memory."""

import contextlib
import ctypes
import os
import pathlib
import sys
import threading

OWNED = threading.Event()  # set by `own_process`
# Options of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_LOW = 10  # added to the nice value: a tenth of the others' share of a core
_HUGE, _COLLAPSE = 2**21, 25  # bytes of a huge page; MADV_COLLAPSE of Linux


def own_process() -> None:
  """Makes programs fast in a process that does nothing else.

  Keeps freed memory; all sessions of ONNX Runtime share their threads.
  """
  keep_freed_memory()
  OWNED.set()


def keep_freed_memory() -> bool:
  """Keeps freed host memory in the process; False if the C library cannot.

  Else glibc returns XLA's temporaries above 32 MB to the kernel after each run
  of a CPU program, and the next run faults them in again: up to 13 % of a
  BERT-base at batch 16, a fifth of a training step of a ViT of width 64.
  Irreversible; call it before threads are created, whose arenas it does not
  reach.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (OSError, TypeError, AttributeError):
    return False
  options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
  results = [mallopt(*option) for option in options]
  return all(results)


def yield_to_others() -> None:
  """Gives the calling thread a low priority, where threads have their own."""
  # A lower one may hold Python's lock and not run while others need the cores.
  if sys.platform == 'linux':
    os.nice(_LOW)


def return_memory() -> None:
  """Returns freed memory, as of photos, in spite of `keep_freed_memory`."""
  with contextlib.suppress(OSError, TypeError, AttributeError):
    ctypes.CDLL(None).malloc_trim(0)


def collapse_pages() -> None:
  """Puts the memory of this process, such as weights, into huge pages.

  A MiniLM takes 4 to 9 % less time for a row alone. Linux cannot before 6.1.
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
