"""Texts of a corpus as a stream of paragraphs, in bounded memory.

A line is a paragraph; an empty line, or the end of a file, ends a document. In
`wrapped` text, where lines are broken to a width, the lines up to an empty one
are a paragraph, and only the end of a file ends a document. A record of TFDS is
a document.

Files are read in pieces, and a line longer than `max_line` bytes is cut at
spaces, so that a file of any size takes a few MiB. Text that is damaged is
repaired or left out, and counted; see `corpus.ACTIONS`.
"""

import codecs
import gzip
import io
import os
import pathlib
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dataset_lib import tfds
from dataset_lib.corpus import Faults
from dataset_lib.errors import BadRecord, InvalidDataError, MissingDataError

SUFFIXES = ('.txt', '.txt.gz')
TFDS = 'tfds:'
TEXT = 'text'
MAX_LINE = 2**20  # bytes
_NO_BREAK = 4  # bytes of the longest character in UTF-8
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Advance = Callable[[int], None]  # called with bytes on disk that are done


class Paragraph(NamedTuple):
  """Text without white space around it, and its file and line.

  An empty text ends the document.
  """

  text: str
  where: str


END = Paragraph('', '')


class Texts:
  """Texts of files and of TFDS.

  Attributes:
    size: bytes on disk.

  Args:
    inputs: files, folders and 'tfds:NAME'.
    faults: counts files and links that are not read.
    without: files that are left out, silently.
    data_dir: of TFDS.
  """

  def __init__(
    self,
    inputs: Sequence[str],
    faults: Faults,
    without: Sequence[pathlib.Path] = (),
    data_dir: str = '',
  ):
    self._prepared = [
      TfdsTexts(name.removeprefix(TFDS), data_dir)
      for name in inputs
      if name.startswith(TFDS)
    ]
    names = [name for name in inputs if not name.startswith(TFDS)]
    excluded = {os.path.realpath(file) for file in without}
    kept: dict[str, pathlib.Path] = {}
    for file in find(names, faults) if names else []:
      path = os.path.realpath(file)
      if path not in excluded and kept.setdefault(path, file) is not file:
        faults.add('repeated_file', printable(file))
    self.files = list(kept.values())
    sizes = [file.stat().st_size for file in self.files if file.is_file()]
    self.size = sum(sizes) + sum(texts.size for texts in self._prepared)

  def paragraphs(
    self,
    faults: Faults,
    advance: Advance,
    wrapped: bool = False,
    max_line: int = MAX_LINE,
  ) -> Iterator[Paragraph]:
    """Yields the paragraphs, with an empty one at the end of each document."""
    for file in self.files:
      lines = _lines(file, faults, advance, max_line)
      yield from joined(lines, max_line) if wrapped else lines
      yield END
    for texts in self._prepared:
      yield from texts.paragraphs(faults, advance, wrapped, max_line)


def find(inputs: Sequence[str], faults: Faults) -> list[pathlib.Path]:
  """Returns files, and the text files in folders, sorted by their path.

  Raises:
    MissingDataError: there is no such path, or no text file.
  """
  files: list[pathlib.Path] = []
  for name in inputs:
    path = pathlib.Path(name)
    if path.is_dir():
      files += _in_folder(path, faults)
    elif os.path.lexists(path):
      files.append(path)
    else:
      raise MissingDataError(f'no file or folder {path}')
  if not files:
    raise MissingDataError(
      f'no text in {", ".join(inputs)}: expected files {" or ".join(SUFFIXES)}'
    )
  return files


def _in_folder(folder: pathlib.Path, faults: Faults) -> list[pathlib.Path]:
  def unreadable(error: OSError) -> None:
    faults.add('unreadable_file', printable(error.filename), str(error))

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
    faults.add(kind, printable(path))
  return sorted(files)


def printable(path: str | os.PathLike[str]) -> str:
  """Returns the name of a file, also if it is no text in any encoding."""
  return os.fsencode(path).decode('utf-8', errors='replace')


class TfdsTexts:
  """Texts of the training split of a data set that TFDS prepared.

  Raises:
    MissingDataError: it is not prepared.
    InvalidDataError: it has no feature 'text', and not one that ends so.
  """

  def __init__(self, name: str, data_dir: str):
    builder = tfds.prepared_builder(name, data_dir, TFDS + name)
    features = list(builder.info.features)
    keys = [key for key in features if key.endswith(TEXT)]  # pg19: book_text
    if TEXT not in features and len(keys) != 1:
      raise InvalidDataError(
        f'{builder.info.full_name}: expected a feature {TEXT!r}, got '
        f'{", ".join(features)}'
      )
    self._key = TEXT if TEXT in features else keys[0]
    self._records = tfds.Examples(builder, 'train', (self._key,))
    self.size = sum(map(os.path.getsize, self._records.files))

  def paragraphs(
    self,
    faults: Faults,
    advance: Advance,
    wrapped: bool = False,
    max_line: int = MAX_LINE,
  ) -> Iterator[Paragraph]:
    """Yields as `Texts.paragraphs`; an empty line does not end a record."""
    for number in range(len(self._records)):
      where = self._records.where(number)
      advance(self.size // len(self._records))
      try:
        stream = io.BytesIO(self._records[number][self._key])
      except BadRecord as bad:
        faults.add('unreadable_record', where, f'{bad.kind}: {bad.message}')
        continue
      lines = clean(pieces(stream, max_line), where, faults)
      if wrapped:
        yield from joined(lines, max_line)
      else:
        yield from (line for line in lines if line.text)
      yield END


def joined(lines: Iterable[Paragraph], max_length: int) -> Iterator[Paragraph]:
  """Joins lines up to an empty one, or to `max_length` characters."""
  parts: list[str] = []
  where, length = '', 0
  for line in lines:
    if not line.text or length >= max_length:
      if parts:
        yield Paragraph(' '.join(parts), where)
      parts, length = [], 0
    if line.text:
      where = where if parts else line.where
      parts.append(line.text)
      length += len(line.text)
  if parts:
    yield Paragraph(' '.join(parts), where)


def _lines(
  file: pathlib.Path, faults: Faults, advance: Advance, max_line: int
) -> Iterator[Paragraph]:
  """Yields the lines of one file; white space alone is an empty line."""
  name, has_text, done = printable(file), False, 0
  try:
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would not end
      raise OSError('not a regular file')
    with file.open('rb') as raw:
      stream: Any = gzip.GzipFile(fileobj=raw) if file.suffix == '.gz' else raw
      if stream.peek(2)[:2] in _UTF16:
        faults.add('not_utf8_file', name, 'it begins like UTF-16')
        return
      for line in clean(pieces(stream, max_line), name, faults):
        has_text = has_text or bool(line.text)
        yield line
        advance(raw.tell() - done)
        done = raw.tell()
    advance(status.st_size - done)
  except EOFError as error:
    faults.add('truncated_gzip', name, str(error))
  except (gzip.BadGzipFile, zlib.error) as error:
    faults.add('damaged_gzip', name, str(error))
  except OSError as error:
    faults.add('unreadable_file', name, str(error))
  else:
    if not has_text:
      faults.add('empty_file', name, f'{status.st_size} bytes without text')


class Piece(NamedTuple):
  """Bytes of a line, its number from 1, and whether the line goes on."""

  data: bytes
  line: int
  is_part: bool


def pieces(stream: io.BufferedIOBase, max_line: int) -> Iterator[Piece]:
  """Yields the lines of a stream, cut after a space at `max_line` bytes.

  Without a space a line is cut at most 4 bytes before, between two characters.
  """
  rest, number = b'', 1
  while data := rest + stream.readline(max_line - len(rest)):
    rest = b''
    is_part = len(data) == max_line and not data.endswith(b'\n')
    if is_part:
      cut = _cut(data)
      data, rest = data[:cut], data[cut:]
    yield Piece(data, number, is_part)
    number += not is_part


def _cut(data: bytes) -> int:
  """Returns the place after the last space, or before the last character."""
  space = data.rfind(b' ')
  if space >= 0:
    return space + 1
  for back in range(1, min(_NO_BREAK, len(data) - 1) + 1):
    if data[-back] & 0xC0 != 0x80:  # not inside of a character
      return len(data) - back
  return len(data)


def clean(
  data: Iterable[Piece], where: str, faults: Faults
) -> Iterator[Paragraph]:
  """Decodes pieces from the beginning of file `where` on; counts repairs."""
  cut_line = 0
  for first, (raw, line, is_part) in enumerate(data):
    place = f'{where}, line {line}'
    if is_part and line != cut_line:
      cut_line = line
      faults.add('long_line', place, f'more than {len(raw)} bytes')
    if first == 0 and raw.startswith(codecs.BOM_UTF8):
      faults.add('byte_order_mark', place)
      raw = raw.removeprefix(codecs.BOM_UTF8)
    if b'\0' in raw:
      faults.add('nul_bytes', place, f'{raw.count(0)} of {len(raw)} bytes')
      raw = raw.replace(b'\0', b'')
    try:
      text = raw.decode('utf-8')
    except UnicodeDecodeError as error:
      message = f'byte {error.start} of the line: {error.reason}'
      faults.add('broken_bytes', place, message)
      text = raw.decode('utf-8', errors='replace')
    text = text.strip()
    # A part of a long line that is white space is no empty line.
    if text or line != cut_line:
      yield Paragraph(text, place)
