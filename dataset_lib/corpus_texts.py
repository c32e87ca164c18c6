"""Texts of a corpus as a stream of paragraphs, in bounded memory.

A line is a paragraph; an empty line, or the end of a file, ends a document. In
`wrapped` text the lines up to an empty one are a paragraph, and only the end of
a file ends a document. A record of TFDS is a document. Damaged text is repaired
or left out, and counted; see `ACTIONS`.
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
MAX_LINE = 2**20  # bytes
_TFDS, _TEXT = 'tfds:', 'text'
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


class Faults(FaultCounts):
  """Counts faults of texts; `files` lists those of whole files."""

  def __init__(self) -> None:
    super().__init__()
    self.files: list[dict[str, str]] = []

  def count(self, kind: str, where: Any, message: str = '') -> None:
    """Counts a fault, a key of `ACTIONS`; a file name may be no UTF-8."""
    where = os.fsencode(where).decode('utf-8', errors='replace')
    self.add(kind, where=where, message=message)
    if kind in FILE_ACTIONS:
      self.files.append({'kind': kind, 'where': where, 'message': message})


class Paragraph(NamedTuple):
  """Text without white space around it, '' to end a document, and its place."""

  text: str
  where: str


class Texts:
  """Texts of files, of folders and of 'tfds:NAME', each once.

  `faults` counts files and links that are not read; the `names` in `without`
  are left out silently. Lines longer than `max_line` bytes are cut at spaces.
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
    self.names: dict[str, Any] = {}
    for text in (text for name in inputs for text in _find(name, faults)):
      path = os.path.realpath(text)
      if path in self.names:
        faults.count('repeated_file', text)
      elif path not in without:
        self.names[path] = text
    if inputs and not self.names and not without:
      expected = ' or '.join(SUFFIXES)
      raise MissingDataError(
        f'no text in {", ".join(inputs)}: expected files {expected}'
      )
    texts = self.names.values()
    self._files = [text for text in texts if isinstance(text, pathlib.Path)]
    self._prepared = [
      _prepared(text, data_dir) for text in texts if isinstance(text, str)
    ]
    self.size = sum(
      file.stat().st_size for file in self._files if file.is_file()
    )
    self.size += sum(size for _, _, size in self._prepared)  # bytes on disk

  def paragraphs(
    self, faults: Faults, advance: Callable[[int], object]
  ) -> Iterator[Paragraph]:
    """Yields paragraphs, and an empty one at the end of each document.

    `advance` is called with bytes on disk that are done.
    """
    for file in self._files:
      yield from self._joined(self._file_lines(file, faults, advance))
      yield Paragraph('', '')
    for records, key, size in self._prepared:
      for number in range(len(records)):
        advance(size // len(records))
        where = records.where(number)
        try:
          stream = io.BytesIO(records[number][key])
        except BadRecord as bad:
          faults.count('unreadable_record', where, f'{bad.kind}: {bad.message}')
          continue
        lines = self._joined(self.lines(stream, where, faults))
        # An empty line does not end a record.
        yield from (line for line in lines if line.text)
        yield Paragraph('', '')

  def _joined(self, lines: Iterable[Paragraph]) -> Iterator[Paragraph]:
    """Joins `wrapped` lines up to an empty one, or to `max_line` characters."""
    if not self._wrapped:
      yield from lines
      return
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
    self, file: pathlib.Path, faults: Faults, advance: Callable[[int], object]
  ) -> Iterator[Paragraph]:
    has_text, done = False, 0
    try:
      status = file.stat()
      if not stat.S_ISREG(status.st_mode):  # reading a pipe would not end
        raise OSError('not a regular file')
      with file.open('rb') as raw:
        is_gzip = file.suffix == '.gz'
        stream: Any = gzip.GzipFile(fileobj=raw) if is_gzip else raw
        if stream.peek(2)[:2] in _UTF16:
          faults.count('not_utf8_file', file, 'it begins like UTF-16')
          return
        for line in self.lines(stream, file, faults):
          has_text = has_text or bool(line.text)
          yield line
          advance(raw.tell() - done)
          done = raw.tell()
      advance(status.st_size - done)
    except EOFError as error:
      faults.count('truncated_gzip', file, str(error))
    except (gzip.BadGzipFile, zlib.error) as error:
      faults.count('damaged_gzip', file, str(error))
    except OSError as error:
      faults.count('unreadable_file', file, str(error))
    else:
      if not has_text:
        message = f'{status.st_size} bytes without text'
        faults.count('empty_file', file, message)

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
        faults.count('long_line', place, f'more than {len(data)} bytes')
      if is_first and data.startswith(codecs.BOM_UTF8):
        faults.count('byte_order_mark', place)
        data = data.removeprefix(codecs.BOM_UTF8)
      if nuls := data.count(0):
        faults.count('nul_bytes', place, f'{nuls} of {len(data)} bytes')
        data = data.replace(b'\0', b'')
      try:
        text = data.decode('utf-8')
      except UnicodeDecodeError as error:
        message = f'byte {error.start} of the line: {error.reason}'
        faults.count('broken_bytes', place, message)
        text = data.decode('utf-8', errors='replace')
      text = text.strip()
      # A part of a long line that is white space is no empty line.
      if text or number != long_line:
        yield Paragraph(text, place)
      number, is_first = number + (not is_part), False


def _find(name: str, faults: Faults) -> list[Any]:
  """Returns 'tfds:NAME', a file, or the text files of a folder, sorted."""
  path, files = pathlib.Path(name).expanduser(), []
  if name.startswith(_TFDS):
    return [name]
  if not os.path.lexists(path):
    raise MissingDataError(f'no file or folder {path}')
  if not path.is_dir():
    return [path]
  for found in sorted(path.rglob('*')):
    if not os.path.isdir(found):
      if found.name.endswith(SUFFIXES):
        files.append(found)
      else:
        faults.count('other_file', found)
    elif found.is_symlink():
      faults.count('linked_folder', found)
    elif not os.access(found, os.R_OK | os.X_OK):
      faults.count('unreadable_file', found, 'no permission')
  return files


def _prepared(name: str, data_dir: str) -> tuple[tfds.Examples, str, int]:
  """Returns the training split of 'tfds:NAME', its text's key, its bytes."""
  builder = tfds.prepared_builder(name.removeprefix(_TFDS), data_dir, name)
  features = list(builder.info.features)
  keys = [key for key in features if key.endswith(_TEXT)]  # pg19: book_text
  if _TEXT not in features and len(keys) != 1:
    raise InvalidDataError(
      f'{builder.info.full_name}: expected a feature {_TEXT!r}, got '
      f'{", ".join(features)}'
    )
  key = _TEXT if _TEXT in features else keys[0]
  records = tfds.Examples(builder, 'train', (key,))
  return records, key, sum(map(os.path.getsize, records.files))


def _cut(data: bytes) -> int:
  """Returns the place after the last space, or before the last character."""
  if (space := data.rfind(b' ')) >= 0:
    return space + 1
  starts = range(len(data) - 1, max(0, len(data) - 1 - _LONGEST_CHARACTER), -1)
  # Not inside of a character.
  return next((at for at in starts if data[at] & 0xC0 != 0x80), len(data))
