"""Keeping a second run out of a directory.

The kernel's record lock decides, so a kill -9 leaves nothing behind; the JSON
content of the file only tells people who holds it.
"""

import fcntl
import os
import pathlib
import socket
import time
from typing import Any

from train_lib import strict_json

# A lock left by another host is believed while it is younger than this: a
# file system without locks across hosts cannot tell us.
FOREIGN_LOCK_SECONDS = 120.0

# The open files are kept here: a lock must not end because its object does.
_held: dict[pathlib.Path, Any] = {}


class RunLockedError(RuntimeError):
  """Another run works in the directory; names its pid, host and start."""


class Lock:
  """An advisory lock that ends with the process that holds it.

  The kernel's record lock decides, so a kill -9 leaves nothing behind; the
  JSON content only tells people who holds it. Record locks belong to a
  process and not to an open file: workers forked from a run do not keep it
  alive after its death.

  Args:
    path: the file to lock.
    alive: a file whose modification time shows that the holder is at work.
  """

  def __init__(self, path: pathlib.Path, alive: pathlib.Path):
    self._path, self._alive = path, alive

  def acquire(self) -> None:
    """Takes the lock.

    Raises:
      RunLockedError: if another run holds it.
    """
    # Closing any second handle of the file would drop this process's lock,
    # so within the process it must not even be opened.
    if self._path in _held:
      raise RunLockedError(self._message('this process'))
    file = self._path.open('a+', encoding='utf-8')
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      self._refuse_foreign(file)
    except (BlockingIOError, PermissionError) as error:
      file.close()
      raise RunLockedError(self._message(self._holder())) from error
    except BaseException:
      file.close()
      raise
    _held[self._path] = file
    self._write(
      strict_json.dumps(
        {
          'pid': os.getpid(),
          'host': socket.gethostname(),
          'started': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
        }
      )
    )

  def release(self) -> None:
    """Gives the lock back; an empty file stays, for deleting it would race."""
    if self._path in _held:
      self._write('')
      _held.pop(self._path).close()

  def _write(self, text: str) -> None:
    file = _held[self._path]
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()

  def _refuse_foreign(self, file: Any) -> None:
    file.seek(0)
    host = _holder_fields(file.read()).get('host', socket.gethostname())
    age = time.time() - max(
      path.stat().st_mtime
      for path in (self._path, self._alive)
      if path.exists()
    )
    if host != socket.gethostname() and age < FOREIGN_LOCK_SECONDS:
      raise RunLockedError(
        self._message(self._holder())
        + f' Its last sign of life is {age:.0f} s old; if it is dead, start '
        f'again after {FOREIGN_LOCK_SECONDS:.0f} s, or delete {self._path}.'
      )

  def _holder(self) -> str:
    fields = _holder_fields(self._path.read_text(encoding='utf-8'))
    if not fields:
      return 'a process that is just starting'
    return (
      f'process {fields.get("pid")} on host {fields.get("host")}, started '
      f'{fields.get("started")}'
    )

  def _message(self, holder: str) -> str:
    return (
      f'{self._path.parent} is in use by {holder}. Two runs in one directory '
      'destroy each other: stop that one or use another workdir.'
    )


def _holder_fields(text: str) -> dict[str, Any]:
  try:
    fields = strict_json.loads(text)
  except ValueError:
    return {}
  return fields if isinstance(fields, dict) else {}
