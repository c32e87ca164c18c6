"""Files of data sets, which others have written: regular, bounded, inside."""

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import BinaryIO

from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError

Path = str | os.PathLike[str]

MAX_PIXELS = 2**28 // 3  # of an image by default; 256 MiB as RGB
MAX_BYTES = 2**26  # of a file with one image, of one record, of JSON
MAX_LOG, MAX_WEIGHTS = 2**30, 2**34  # of metrics, of parameters or a bundle


def read_bytes(path: Path, limit: int | None = None) -> bytes:
  """Reads a file; see `opened`."""
  with opened(path, limit) as file:
    return file.read(MAX_BYTES if limit is None else limit)


@contextlib.contextmanager
def opened(path: Path, limit: int | None = None) -> Iterator[BinaryIO]:
  """Opens a regular file of at most `limit` bytes, by default `MAX_BYTES`.

  Raises BadRecord 'not_a_file' for a pipe, folder or device and 'too_large' for
  more bytes, before it reads; OSError if the file cannot be opened.
  """
  # Without O_NONBLOCK, opening a pipe waits for its writer.
  descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  # A descriptor of a folder cannot be passed to `open`.
  try:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
      raise BadRecord('not_a_file', str(path), 'not a regular file')
    check_size(found.st_size, limit, str(path))
    with open(descriptor, 'rb', closefd=False) as file:
      yield file
  finally:
    os.close(descriptor)


def check_size(size: int, limit: int | None = None, where: str = '') -> None:
  """Raises BadRecord 'too_large' for more bytes; see `read_bytes`."""
  limit = MAX_BYTES if limit is None else limit
  if size > limit:
    message = f'expected at most {limit} bytes, got {size}'
    raise BadRecord('too_large', where, message)


def check_inside(path: Path, root: Path) -> None:
  """Raises InvalidDataError if a link leads from `path` out of `root`."""
  target, real_root = (pathlib.Path(os.path.realpath(p)) for p in (path, root))
  if not target.is_relative_to(real_root):
    raise InvalidDataError(
      f'{path} links to {target}, outside of {real_root}; copy the data, or '
      'give the folder it lies in'
    )


def check_no_link(path: Path) -> None:
  """Raises InvalidDataError if a folder to write to is a link."""
  if os.path.islink(path) and os.path.isdir(path):
    raise InvalidDataError(
      f'{path} links to {os.path.realpath(path)}, which would be written to: '
      'put the folder itself there, or remove the link'
    )


def check_replaceable(path: Path) -> None:
  """Raises InvalidDataError unless a file to write is regular or missing.

  A link would be followed, and a pipe waited for.
  """
  is_link, exists = os.path.islink(path), os.path.exists(path)
  if is_link or (exists and not os.path.isfile(path)):
    raise InvalidDataError(f'{path} is not a regular file: remove it')


def check_regular(path: Path, root: Path) -> None:
  """Raises InvalidDataError unless a file is regular and not outside `root`.

  MissingDataError if it is not there.
  """
  if not os.path.exists(path):
    raise MissingDataError(f'missing {path}; copy it again')
  check_inside(path, root)
  if not os.path.isfile(path):
    raise InvalidDataError(f'{path} is not a regular file')


def cache_folder(name: str) -> pathlib.Path:
  """Returns a folder of the user's cache, which may not exist yet."""
  cache = os.environ.get('XDG_CACHE_HOME', '')
  # By its specification a relative path is not valid.
  cache = cache if os.path.isabs(cache) else '~/.cache'
  return pathlib.Path(cache).expanduser() / 'adaptive_computation' / name
