"""Compiled programs kept for the next process: only what its user wrote is run.

JAX executes what it finds in `<name of a program>-cache`. So the folder must
belong to this user, and no other may write to it, or to a file in it; other
files are deleted, which costs a compilation. Its key has the features of the
processor and the versions of JAX and XLA.
"""

import contextlib
import os
import pathlib
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from core import files, machine
from core.errors import ConfigError

MAX_BYTES = 2**30  # of the programs of trainings and evaluations
# Copies compile in milliseconds; keep them too, for fast restarts.
_OPTIONS = {
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}
DIRECTORY = 'JAX_COMPILATION_CACHE_DIR'  # where the user keeps them instead


class ProgramCache:
  """The directory of compiled programs; '' for none, made if it is missing.

  Of more than `max_bytes` (-1: no limit) those used last are kept. Raises
  ConfigError for a directory that others can write to.
  """

  def __init__(self, directory: str, max_bytes: int = -1):
    self._path = pathlib.Path(directory).absolute() if directory else None
    self._options = _OPTIONS | {
      'jax_compilation_cache_dir': f'{self._path}',
      'jax_compilation_cache_max_size': max_bytes,
    }
    if self._path:
      self._path.mkdir(0o700, parents=True, exist_ok=True)
      self._check()
      # From now on only this user can put files there.
      for path in self._path.glob('*-cache'):
        with contextlib.suppress(FileNotFoundError):  # another server's work
          used = path.with_name(path.name.removesuffix('cache') + 'atime')
          # JAX writes when it was used after the program: else it is not whole.
          is_torn = max_bytes >= 0 and not used.exists()
          if is_torn or not is_private(path, stat.S_ISREG):
            path.unlink()

  def _check(self) -> None:
    """Raises ConfigError if others may exchange the folder or its files."""
    place: Any = self._path
    parent = place.parent.stat().st_mode
    is_open = parent & stat.S_IWOTH and not parent & stat.S_ISVTX
    if is_open or not is_private(place):
      expected = 'a folder of this user that nobody else can write to'
      raise ConfigError('engine.cache_directory', str(place), expected)

  @contextlib.contextmanager
  def used(self) -> Iterator[None]:
    """Lets JAX read and write the programs within the context."""
    if not self._path:
      yield
      return
    self._check()
    before = _configure(self._options)
    try:
      yield
    finally:
      _configure(before)


@contextlib.contextmanager
def kept() -> Iterator[None]:
  """Keeps what this process compiles in the user's cache, for the next."""
  # Only process 0 writes, and on GPUs processes tune a program together.
  if DIRECTORY in os.environ or jax.distributed.is_initialized():
    yield
    return
  name = of_cores('steps')
  if not (folder := own_folder(name)):
    text = f'{files.cache_folder(name)} is not a folder of this user alone'
    text = f'warning: {text}: the next start compiles again'
    print(f'{text} (or set {DIRECTORY})', file=sys.stderr)
  with ProgramCache(folder, MAX_BYTES).used():
    yield


def of_cores(name: str) -> str:
  """Returns the name of a folder for programs of so many cores.

  XLA splits loops by their number, which is not in the key of a program.
  """
  return f'{name}-{machine.cores()}'


def own_folder(name: str) -> str:
  """Returns a folder of the user's cache, made if missing; '' if not private.

  What it holds is executed, so no other user may write to it.
  """
  path = files.cache_folder(name)
  try:
    os.makedirs(path.parent, 0o700, exist_ok=True)
    os.makedirs(path, 0o700, exist_ok=True)
    # Who can write to the parent can put another folder in its place.
    is_own = all(map(is_private, (path, path.parent)))
  except OSError:
    return ''
  return str(path) if is_own else ''


def is_private(
  path: pathlib.Path, is_kind: Callable[[int], bool] = stat.S_ISDIR
) -> bool:
  """Returns True for a folder, or a file, that this user alone can write to."""
  state = path.lstat()
  is_own = state.st_uid == os.getuid() and os.access(path, os.W_OK)
  others = stat.S_IWGRP | stat.S_IWOTH
  return is_kind(state.st_mode) and not state.st_mode & others and is_own


def _configure(options: dict[str, Any]) -> dict[str, Any]:
  """Sets options of JAX's cache of programs; returns their old values."""
  before = {name: getattr(jax.config, name) for name in options}
  for item in options.items():
    jax.config.update(*item)
  # JAX reads them once in a process, or after a reset.
  compilation_cache.reset_cache()
  return before
