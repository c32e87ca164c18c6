"""Compiled programs kept for the next process: only what its user wrote is run.

JAX executes what it finds in `<name of a program>-cache`. So the folder must
belong to this user, and no other may write to it, or to a file in it; other
files are deleted, which costs a compilation.
"""

import contextlib
import os
import pathlib
import stat
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from core.errors import ConfigError

# Copies compile in milliseconds; keep them too, for fast restarts.
_OPTIONS = {
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}


class ProgramCache:
  """The directory of compiled programs; '' for none, made if it is missing.

  Raises ConfigError for a directory that others can write to.
  """

  def __init__(self, directory: str):
    self._path = pathlib.Path(directory).absolute() if directory else None
    if self._path:
      self._path.mkdir(0o700, parents=True, exist_ok=True)
      self._check()
      # From now on only this user can put files there.
      for path in self._path.glob('*-cache'):
        with contextlib.suppress(FileNotFoundError):  # another server's work
          if not is_private(path, stat.S_ISREG):
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
    before = _configure(
      _OPTIONS | {'jax_compilation_cache_dir': f'{self._path}'}
    )
    try:
      yield
    finally:
      _configure(before)


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
