"""Size and CRC-32 of every file of a directory, to know damage from data.

Checkpoint libraries read flipped bits without complaint; a manifest that is
written beside the data and checked before it is read tells which file is not
what was written.
"""

import concurrent.futures
import json
import os
import pathlib
import zlib
from collections.abc import Collection
from typing import Any

NAME = 'manifest.json'
_CHUNK = 1 << 20  # bytes
_THREADS = 4  # zlib and reading both release the interpreter lock


def write(
  directory: str | os.PathLike[str], exclude: Collection[str] = ()
) -> None:
  """Writes the manifest of all files below a directory into it.

  Args:
    directory: where the files are; `manifest.json` appears in it.
    exclude: names of files at the top that someone else still writes.
  """
  root = pathlib.Path(directory)
  skipped = {NAME, *exclude}
  names = sorted(
    path.relative_to(root).as_posix()
    for path in root.rglob('*')
    if path.is_file() and path.relative_to(root).as_posix() not in skipped
  )
  (root / NAME).write_text(_encode(dict(_measure_all(root, names))))


def verify(directory: str | os.PathLike[str]) -> tuple[str, ...]:
  """Compares the files below a directory with its manifest.

  Files that the manifest does not list are not looked at.

  Returns:
    One line per damaged file, which it names; none if all is well.
  """
  root = pathlib.Path(directory)
  try:
    text = (root / NAME).read_text(encoding='utf-8')
    listed = json.loads(text)['files']
    # Any change of the manifest itself, even of its white space, counts.
    if text != _encode(listed) or not all(map(_is_inside, listed)):
      return (f'{root / NAME}: is not what was written',)
  except FileNotFoundError:
    return (f'{root / NAME}: is missing',)
  except (OSError, ValueError, TypeError, LookupError) as error:
    return (f'{root / NAME}: cannot be read ({error})',)
  problems = [
    f'{root / name}: expected {_words(listed[name])}, got {_words(found)}'
    for name, found in _measure_all(root, sorted(listed))
    if found != listed[name]
  ]
  return tuple(problems)


def _measure_all(
  root: pathlib.Path, names: list[str]
) -> list[tuple[str, dict[str, Any] | None]]:
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    measured = pool.map(_measure, [root / name for name in names])
    return list(zip(names, measured, strict=True))


def _measure(path: pathlib.Path) -> dict[str, Any] | None:
  """Size in bytes and CRC-32 of a file; None if it cannot be read."""
  crc = size = 0
  try:
    with path.open('rb') as file:
      while chunk := file.read(_CHUNK):
        crc = zlib.crc32(chunk, crc)
        size += len(chunk)
  except OSError:
    return None
  return {'crc32': f'{crc:08x}', 'size': size}


def _encode(files: dict[str, Any]) -> str:
  body = json.dumps(files, sort_keys=True)
  crc = zlib.crc32(body.encode())
  return json.dumps({'crc32': f'{crc:08x}', 'files': files}, sort_keys=True)


def _is_inside(name: str) -> bool:
  path = pathlib.PurePosixPath(name)
  return not path.is_absolute() and '..' not in path.parts


def _words(found: dict[str, Any] | None) -> str:
  if found is None:
    return 'no readable file'
  return f'{found["size"]} bytes with crc32 {found["crc32"]}'
