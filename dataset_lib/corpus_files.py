"""Text files as a stream of paragraphs, in bounded memory, whatever is in them.

A line is a paragraph; an empty line, or the end of a file, ends a document. In
`wrapped` text, where lines are broken to a width, the lines up to an empty one
are a paragraph, and only the end of a file ends a document.

Files are read in pieces, and a line longer than `MAX_LINE` bytes is cut at
spaces, so that a file of any size takes a few MiB. What is no good text is
repaired or left out, and counted; see `corpus_faults.ACTIONS`.
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

from dataset_lib.corpus_faults import Faults
from dataset_lib.errors import MissingDataError

SUFFIXES = ('.txt', '.txt.gz')
MAX_LINE = 2**20  # bytes
_NO_BREAK = 4  # bytes of the longest character in UTF-8
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Paragraph(NamedTuple):
  """One paragraph; an empty one ends the document.

  Attributes:
    text: the text, without white space around it.
    where: its file and line.
  """

  text: str
  where: str


END = Paragraph('', '')


def find(inputs: Sequence[str], faults: Faults) -> list[pathlib.Path]:
  """The text files of files and folders, in a fixed order.

  Args:
    inputs: files, and folders that are searched with all folders in them;
      files in a folder are sorted by their path.
    faults: counts what lies there and is not read.

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
  others: list[pathlib.Path] = []
  links: list[pathlib.Path] = []
  for place, folders, names in os.walk(folder, onerror=unreadable):
    inside = pathlib.Path(place)
    links += [inside / name for name in folders if (inside / name).is_symlink()]
    for name in names:
      (files if name.endswith(SUFFIXES) else others).append(inside / name)
  for link in sorted(links):
    faults.add('linked_folder', printable(link))
  for other in sorted(others):
    faults.add('other_file', printable(other))
  return sorted(files)


def printable(path: str | os.PathLike[str]) -> str:
  """The name of a file, also if it is no text in any encoding."""
  return os.fsencode(path).decode('utf-8', errors='replace')


def paragraphs(
  files: Iterable[pathlib.Path],
  faults: Faults,
  advance: Callable[[int], None],
  max_line: int = MAX_LINE,
  wrapped: bool = False,
) -> Iterator[Paragraph]:
  """The paragraphs of files, with an empty one at the end of each document.

  Args:
    files: text files, plain or gzip.
    faults: counts what is repaired and left out.
    advance: called with bytes on disk that are done, compressed ones of gzip.
    max_line: longest line, in bytes.
    wrapped: lines are broken to a width, see above.
  """
  for file in files:
    lines = _lines(file, faults, advance, max_line)
    yield from joined(lines, max_line) if wrapped else lines
    yield END


def joined(lines: Iterable[Paragraph], max_length: int) -> Iterator[Paragraph]:
  """Joins the lines up to an empty one; the empty ones are gone.

  Args:
    lines: of one document.
    max_length: a paragraph ends when it has this many characters.
  """
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
  file: pathlib.Path,
  faults: Faults,
  advance: Callable[[int], None],
  max_line: int,
) -> Iterator[Paragraph]:
  """The lines of one file; white space alone is an empty line."""
  name, has_text, done = printable(file), False, 0
  try:
    size = _size(file)
    with file.open('rb') as raw:
      stream: Any = raw
      if file.suffix == '.gz':
        stream = gzip.GzipFile(fileobj=raw)
      if stream.peek(2)[:2] in _UTF16:
        faults.add('not_utf8_file', name, 'it begins like UTF-16')
        return
      for line in clean(pieces(stream, max_line), name, faults):
        has_text = has_text or bool(line.text)
        yield line
        advance(raw.tell() - done)
        done = raw.tell()
    advance(size - done)
  except EOFError as error:
    faults.add('truncated_gzip', name, str(error))
  except (gzip.BadGzipFile, zlib.error) as error:
    faults.add('damaged_gzip', name, str(error))
  except OSError as error:
    faults.add('unreadable_file', name, str(error))
  else:
    if not has_text:
      faults.add('empty_file', name, f'{size} bytes without text')


def _size(file: pathlib.Path) -> int:
  """Bytes of a file; a pipe or a device would be waited for without end."""
  status = file.stat()
  if not stat.S_ISREG(status.st_mode):
    raise OSError('not a regular file')
  return status.st_size


class Piece(NamedTuple):
  """A line, or a part of a long one.

  Attributes:
    data: its bytes.
    line: number of the line, from 1.
    is_part: the line goes on behind it.
  """

  data: bytes
  line: int
  is_part: bool


def pieces(stream: io.BufferedIOBase, max_line: int) -> Iterator[Piece]:
  """The lines of a stream, long ones cut behind a space.

  Args:
    stream: bytes.
    max_line: longest piece, in bytes; without a space in so many bytes, a cut
      is at most `_NO_BREAK` bytes before, between two characters.
  """
  rest, number = b'', 1
  while True:
    data = rest + stream.readline(max_line - len(rest))
    if not data:
      return
    rest = b''
    is_part = len(data) == max_line and not data.endswith(b'\n')
    if is_part:
      cut = _cut(data)
      data, rest = data[:cut], data[cut:]
    yield Piece(data, number, is_part)
    number += not is_part


def _cut(data: bytes) -> int:
  """Where to cut: behind the last space, or else before the last character."""
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
  """Decodes pieces of a file and counts what had to be repaired.

  Args:
    data: from the beginning of the file on.
    where: its name.
    faults: counts repairs, each kind once for a piece.
  """
  cut_line = 0
  for first, piece in enumerate(data):
    place, raw = f'{where}, line {piece.line}', piece.data
    if piece.is_part and piece.line != cut_line:
      cut_line = piece.line
      faults.add('long_line', place, f'more than {len(raw)} bytes')
    if first == 0 and raw.startswith(codecs.BOM_UTF8):
      faults.add('byte_order_mark', place)
      raw = raw.removeprefix(codecs.BOM_UTF8)
    if b'\0' in raw:
      faults.add('nul_bytes', place, f'{raw.count(0)} of {len(raw)} bytes')
      raw = raw.replace(b'\0', b'')
    text = _decoded(raw, place, faults).strip()
    # A part of a long line that is white space is no empty line.
    if text or piece.line != cut_line:
      yield Paragraph(text, place)


def _decoded(raw: bytes, place: str, faults: Faults) -> str:
  try:
    return raw.decode('utf-8')
  except UnicodeDecodeError as error:
    message = f'byte {error.start} of the line: {error.reason}'
    faults.add('broken_bytes', place, message)
    return raw.decode('utf-8', errors='replace')
