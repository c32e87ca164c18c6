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


def yield_to_others() -> None:
  """Gives the calling thread a low priority, where threads have their own."""
  # Lower ones hold up the others when another process needs all cores, as
  # what holds Python's lock is not run.
  if sys.platform == 'linux':
    os.nice(_LOW)


def return_memory() -> None:
  """Returns freed memory to the kernel, in spite of `keep_freed_memory`.

  For what is much larger than the temporaries of a program, such as photos.
  """
  with contextlib.suppress(OSError, TypeError, AttributeError):
    ctypes.CDLL(None).malloc_trim(0)


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
