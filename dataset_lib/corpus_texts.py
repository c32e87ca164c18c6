"""Texts of a corpus as a stream of paragraphs, in bounded memory.

A line is a paragraph; an empty line, or the end of a file, ends a document. In
`wrapped` text, where lines are broken to a width, the lines up to an empty one
are a paragraph, and only the end of a file ends a document. A record of TFDS is
a document. Damaged text is repaired or left out, and counted; see `ACTIONS`.
"""

import codecs
import gzip
import io
import os
import pathlib
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dataset_lib import tfds
from dataset_lib.errors import (
  BadRecord,
  FaultCounts,
  InvalidDataError,
  MissingDataError,
)

SUFFIXES = ('.txt', '.txt.gz')
TFDS = 'tfds:'
MAX_LINE = 2**20  # bytes
_TEXT = 'text'
_LONGEST_CHARACTER = 4  # bytes in UTF-8
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# Faults of whole files, folders and records, all of which are named.
FILE_ACTIONS = {
  'empty_file': 'left out',
  'not_utf8_file': 'left out',
  'truncated_gzip': 'read as far as it goes',
  'damaged_gzip': 'read as far as it goes',
  'unreadable_file': 'left out from there on',
  'unreadable_record': 'left out',
  'repeated_file': 'read once',
  'other_file': 'left out: neither .txt nor .txt.gz',
  'linked_folder': 'left out: links to folders are not followed',
}
ACTIONS = FILE_ACTIONS | {
  'broken_bytes': 'what is no UTF-8 became U+FFFD; counted once a line',
  'nul_bytes': 'removed',
  'byte_order_mark': 'removed',
  'long_line': 'cut at spaces',
  'one_sentence_document': 'kept: its rows are cut at a word instead',
  'too_short': 'left out: less than two tokens cannot be two segments',
}

Advance = Callable[[int], object]  # called with bytes on disk that are done


class Faults:
  """Counts faults of texts, the keys of `ACTIONS`; not thread-safe.

  Attributes:
    files: {'kind', 'where', 'message'} of every fault of a whole file.
  """

  def __init__(self) -> None:
    self._counts = FaultCounts()
    self.files: list[dict[str, str]] = []

  def add(self, kind: str, where: Any, message: str = '') -> None:
    """Counts one fault at a file name, which may not be UTF-8, or a line."""
    where = os.fsencode(where).decode('utf-8', errors='replace')
    self._counts.add(kind, where=where, message=message)
    if kind in FILE_ACTIONS:
      self.files.append({'kind': kind, 'where': where, 'message': message})

  def summary(self) -> dict[str, dict[str, Any]]:
    """Returns {kind: {'count', 'action', 'first': [{'where', 'message'}]}}."""
    return {
      kind: {'count': fault['count'], 'action': ACTIONS[kind],
             'first': fault['first']}
      for kind, fault in self._counts.summary().items()
    }  # fmt: skip


class Paragraph(NamedTuple):
  """Text without white space around it, and its file and line.

  An empty text ends the document.
  """

  text: str
  where: str


class Texts:
  """Texts of files, of folders and of 'tfds:NAME', each once.

  `faults` counts files and links that are not read; the `names` in `without`
  are left out silently. Lines longer than `max_line` bytes are cut at spaces: a
  file of any size takes a few MiB. `size` is the bytes on disk.
  """

  def __init__(
    self,
    inputs: Sequence[str],
    faults: Faults,
    without: Collection[str] = (),
    data_dir: str = '',
    wrapped: bool = False,
    max_line: int = MAX_LINE,
  ):
    self._wrapped, self._max_line = wrapped, max_line
    names = [name for name in inputs if not name.startswith(TFDS)]
    kept: dict[str, pathlib.Path] = {}
    for file in find(names, faults) if names else []:
      path = os.path.realpath(file)
      if path not in without and kept.setdefault(path, file) is not file:
        faults.add('repeated_file', file)
    self._files = list(kept.values())
    prepared = [
      name
      for name in dict.fromkeys(inputs)
      if name.startswith(TFDS) and name not in without
    ]
    self._records = [_prepared(name, data_dir) for name in prepared]
    self.names = [*kept, *prepared]
    on_disk = [file for file in self._files if file.is_file()]
    on_disk += [file for records, _ in self._records for file in records.files]
    self.size = sum(map(os.path.getsize, on_disk))

  def paragraphs(self, faults: Faults, advance: Advance) -> Iterator[Paragraph]:
    """Yields the paragraphs, with an empty one at the end of each document."""
    for file in self._files:
      lines = self._file_lines(file, faults, advance)
      yield from self._joined(lines) if self._wrapped else lines
      yield Paragraph('', '')
    for records, key in self._records:
      size = sum(map(os.path.getsize, records.files))
      for number in range(len(records)):
        advance(size // len(records))
        where = records.where(number)
        try:
          stream = io.BytesIO(records[number][key])
        except BadRecord as bad:
          faults.add('unreadable_record', where, f'{bad.kind}: {bad.message}')
          continue
        lines = self.lines(stream, where, faults)
        # An empty line does not end a record.
        joined = self._joined(lines) if self._wrapped else lines
        yield from (line for line in joined if line.text)
        yield Paragraph('', '')

  def _joined(self, lines: Iterable[Paragraph]) -> Iterator[Paragraph]:
    """Joins lines up to an empty one, or to `max_line` characters."""
    parts: list[str] = []
    where, length = '', 0
    for line in lines:
      if parts and (not line.text or length >= self._max_line):
        yield Paragraph(' '.join(parts), where)
        parts, length = [], 0
      if line.text:
        where = where if parts else line.where
        parts.append(line.text)
        length += len(line.text)
    if parts:
      yield Paragraph(' '.join(parts), where)

  def _file_lines(
    self, file: pathlib.Path, faults: Faults, advance: Advance
  ) -> Iterator[Paragraph]:
    """Yields the lines of one file; white space alone is an empty line."""
    has_text, done = False, 0
    try:
      status = file.stat()
      if not stat.S_ISREG(status.st_mode):  # reading a pipe would not end
        raise OSError('not a regular file')
      with file.open('rb') as raw:
        is_gzip = file.suffix == '.gz'
        stream: Any = gzip.GzipFile(fileobj=raw) if is_gzip else raw
        if stream.peek(2)[:2] in _UTF16:
          faults.add('not_utf8_file', file, 'it begins like UTF-16')
          return
        for line in self.lines(stream, file, faults):
          has_text = has_text or bool(line.text)
          yield line
          advance(raw.tell() - done)
          done = raw.tell()
      advance(status.st_size - done)
    except EOFError as error:
      faults.add('truncated_gzip', file, str(error))
    except (gzip.BadGzipFile, zlib.error) as error:
      faults.add('damaged_gzip', file, str(error))
    except OSError as error:
      faults.add('unreadable_file', file, str(error))
    else:
      if not has_text:
        faults.add('empty_file', file, f'{status.st_size} bytes without text')

  def lines(
    self, stream: Any, where: Any, faults: Faults
  ) -> Iterator[Paragraph]:
    """Yields the lines of a stream, repaired, long ones in parts."""
    rest, number, long_line, is_first = b'', 1, 0, True
    while data := rest + stream.readline(self._max_line - len(rest)):
      place = f'{where}, line {number}'
      is_part = len(data) == self._max_line and not data.endswith(b'\n')
      cut = _cut(data) if is_part else len(data)
      data, rest = data[:cut], data[cut:]
      if is_part and number != long_line:
        long_line = number
        faults.add('long_line', place, f'more than {len(data)} bytes')
      if is_first and data.startswith(codecs.BOM_UTF8):
        faults.add('byte_order_mark', place)
        data = data.removeprefix(codecs.BOM_UTF8)
      text = _decoded(data, place, faults)
      # A part of a long line that is white space is no empty line.
      if text or number != long_line:
        yield Paragraph(text, place)
      number, is_first = number + (not is_part), False


def _prepared(name: str, data_dir: str) -> tuple[tfds.Examples, str]:
  """Returns the training split of 'tfds:NAME', and its text's key."""
  builder = tfds.prepared_builder(name.removeprefix(TFDS), data_dir, name)
  features = list(builder.info.features)
  keys = [key for key in features if key.endswith(_TEXT)]  # pg19: book_text
  if _TEXT not in features and len(keys) != 1:
    raise InvalidDataError(
      f'{builder.info.full_name}: expected a feature {_TEXT!r}, got '
      f'{", ".join(features)}'
    )
  key = _TEXT if _TEXT in features else keys[0]
  return tfds.Examples(builder, 'train', (key,)), key


def find(inputs: Sequence[str], faults: Faults) -> list[pathlib.Path]:
  """Returns files, and the text files in folders, sorted by their path.

  Raises:
    MissingDataError: there is no such path, or no text file.
  """
  files: list[pathlib.Path] = []
  for path in map(pathlib.Path, inputs):
    if not os.path.lexists(path):
      raise MissingDataError(f'no file or folder {path}')
    files += _in_folder(path, faults) if path.is_dir() else [path]
  if not files:
    raise MissingDataError(
      f'no text in {", ".join(inputs)}: expected files {" or ".join(SUFFIXES)}'
    )
  return files


def _in_folder(folder: pathlib.Path, faults: Faults) -> list[pathlib.Path]:
  def unreadable(error: OSError) -> None:
    faults.add('unreadable_file', error.filename, str(error))

  files: list[pathlib.Path] = []
  left_out: list[tuple[str, pathlib.Path]] = []
  for place, folders, names in os.walk(folder, onerror=unreadable):
    inside = pathlib.Path(place)
    links = [inside / name for name in folders if (inside / name).is_symlink()]
    left_out += [('linked_folder', link) for link in links]
    for name in names:
      if name.endswith(SUFFIXES):
        files.append(inside / name)
      else:
        left_out.append(('other_file', inside / name))
  for kind, path in sorted(left_out):
    faults.add(kind, path)
  return sorted(files)


def _cut(data: bytes) -> int:
  """Returns the place after the last space, or before the last character."""
  if (space := data.rfind(b' ')) >= 0:
    return space + 1
  for back in range(1, min(_LONGEST_CHARACTER, len(data) - 1) + 1):
    if data[-back] & 0xC0 != 0x80:  # not inside of a character
      return len(data) - back
  return len(data)


def _decoded(data: bytes, place: str, faults: Faults) -> str:
  if b'\0' in data:
    faults.add('nul_bytes', place, f'{data.count(0)} of {len(data)} bytes')
    data = data.replace(b'\0', b'')
  try:
    return data.decode('utf-8').strip()
  except UnicodeDecodeError as error:
    message = f'byte {error.start} of the line: {error.reason}'
    faults.add('broken_bytes', place, message)
    return data.decode('utf-8', errors='replace').strip()
