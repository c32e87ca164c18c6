"""Settings of a serving process: kept programs, kept memory, shielded calls."""

import contextlib
import ctypes
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

# Options of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_CACHE_OPTIONS = {
  # Copies between stages compile in milliseconds; a restart needs them too.
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}


def keep_freed_memory() -> bool:
  """Keeps freed host memory in the process instead of the kernel.

  XLA takes the temporaries of each run of a CPU program from malloc and frees
  them after it. glibc returns blocks above 32 MB to the kernel at once, and
  the next run faults the same pages in again: for a BERT-base at batch 16 two
  million page faults became 0.4 million, and 0 to 13 % of the time was saved.

  Irreversible; resident memory stays at its peak. Call it at the start of a
  program, before threads are created.

  Returns:
    True if the C library has all options; without glibc nothing happens.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (OSError, TypeError, AttributeError):
    return False
  options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
  known = [mallopt(option, value) for option, value in options]
  return all(known)


@contextlib.contextmanager
def persistent_cache(directory: str) -> Iterator[None]:
  """Compiles through a cache on disk within the context.

  JAX's settings are process-wide; they are restored at the end. Programs are
  loaded from the directory and run: only trusted users may write there.

  Args:
    directory: of the programs; '' for no cache.
  """
  if not directory:
    yield
    return
  options = {'jax_compilation_cache_dir': directory, **_CACHE_OPTIONS}
  before = {name: getattr(jax.config, name) for name in options}
  _configure(options)
  try:
    yield
  finally:
    _configure(before)


def _configure(options: Mapping[str, Any]) -> None:
  for name, value in options.items():
    jax.config.update(name, value)
  # JAX reads these options once in a process, or after a reset.
  compilation_cache.reset_cache()


def private_directory(path: str) -> str:
  """Makes a directory that only its owner can write to, or takes an existing.

  Args:
    path: of the directory; its parent exists.

  Returns:
    The path; '' if it cannot be made or written, is a link or no directory,
    belongs to another user, or others may write to it.
  """
  try:
    os.makedirs(path, 0o700, exist_ok=True)
    found = os.lstat(path)
  except OSError:
    return ''
  is_private = (
    stat.S_ISDIR(found.st_mode)
    and found.st_uid == os.getuid()
    and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  )
  return path if is_private and os.access(path, os.W_OK | os.X_OK) else ''


def shielded(function: Callable[..., Any], *arguments: Any) -> None:
  """Calls a user callback; logs whatever it raises, `SystemExit` included."""
  try:
    function(*arguments)
  except BaseException:
    logging.getLogger(__name__).exception('in a callback of the engine')
