"""Compiled programs kept for the next process: only what its user wrote is run.

JAX keeps compiled programs as files, `<name>-cache`, and executes what it finds
under the name of a program. What it reads must be a file of this user that
nobody else can write to, and match the code beside it: HMAC-SHA256 of name and
content with a key of the user, made of what JAX wrote and not of what is in the
file. Others are deleted, which costs a compilation.
"""

import contextlib
import hmac
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import compilation_cache, lru_cache

from core import files
from core.errors import ConfigError

# Copies compile in milliseconds; keep them too, for fast restarts.
_OPTIONS = {
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ProgramCache:
  """The directory of compiled programs; '' for none, made if it is missing.

  Raises ConfigError for a directory that others can write to.
  """

  def __init__(self, directory: str):
    self._path = pathlib.Path(directory).absolute() if directory else None
    if self._path:
      self._path.mkdir(0o700, parents=True, exist_ok=True)
      if not is_private(self._path):
        expected = 'a folder of this user that nobody else can write to'
        raise ConfigError('engine.cache_directory', directory, expected)
      self._key = _key()

  @contextlib.contextmanager
  def used(self) -> Iterator[None]:
    """Lets JAX read and write the programs within the context."""
    if not self._path:
      yield
      return
    # JAX asks this function for the cache of the folder that is configured.
    made = compilation_cache.get_file_cache
    signed = _Signed(self._path, self._key)
    compilation_cache.get_file_cache = lambda path: (signed, path)
    before = _configure(
      _OPTIONS | {'jax_compilation_cache_dir': f'{self._path}'}
    )
    try:
      yield
    finally:
      compilation_cache.get_file_cache = made
      _configure(before)


class _Signed(lru_cache.LRUCache):
  """JAX's files, each with a code."""

  def __init__(self, folder: pathlib.Path, key: bytes):
    super().__init__(str(folder), max_size=-1)
    self._folder, self._key = folder, key

  def get(self, key: str) -> bytes | None:
    """Returns the program that was put; deletes any other."""
    value, (path, code) = super().get(key), self._files(key)
    with contextlib.suppress(OSError, UnicodeError):
      is_own = _is_own_file(path) and _is_own_file(code)
      if value and is_own and code.read_text() == self._code(path.name, value):
        return value
    for file in (path, code):
      file.unlink(missing_ok=True)
    return None

  def put(self, key: str, value: bytes) -> None:
    """Writes a program and its code."""
    super().put(key, value)
    path, code = self._files(key)
    files.write_text(code, self._code(path.name, value))

  def _files(self, key: str) -> tuple[pathlib.Path, pathlib.Path]:
    path = self._folder / f'{key}-cache'
    return path, path.with_name(f'{path.name}.code')

  def _code(self, name: str, value: bytes) -> str:
    return hmac.digest(self._key, name.encode() + value, 'sha256').hex()


def is_private(path: pathlib.Path) -> bool:
  """Returns True for a folder that this user alone can write to."""
  found = path.lstat()
  is_own = found.st_uid == os.getuid() and os.access(path, os.W_OK | os.X_OK)
  return stat.S_ISDIR(found.st_mode) and not found.st_mode & _OTHERS and is_own


def _is_own_file(path: pathlib.Path) -> bool:
  found = path.lstat()
  is_own = found.st_uid == os.getuid() and not found.st_mode & _OTHERS
  return stat.S_ISREG(found.st_mode) and is_own


def _key() -> bytes:
  """Returns the user's key; a new one, if none can be kept."""
  path = files.cache_folder('key')
  with contextlib.suppress(OSError):
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
      new = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
      with open(new, 'wb') as file:
        file.write(secrets.token_bytes(32))
    if is_private(path.parent) and _is_own_file(path):
      key = path.read_bytes()
      if len(key) == 32:  # else another process is writing it
        return key
  return secrets.token_bytes(32)


def _configure(options: dict[str, Any]) -> dict[str, Any]:
  """Sets options of JAX's cache of programs; returns their old values."""
  before = {name: getattr(jax.config, name) for name in options}
  for item in options.items():
    jax.config.update(*item)
  # JAX reads them once in a process, or after a reset.
  compilation_cache.reset_cache()
  return before
