"""Texts of a corpus as a stream of paragraphs, in bounded memory."""

import codecs
import gzip
import io
import itertools
import os
import pathlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from core import files
from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib import bad_records
from dataset_lib.records import tfds

Advance = Callable[[int], object]  # called with bytes on disk that are done
SUFFIXES = ('.txt', '.txt.gz')
MAX_LINE = 2**20  # characters
_TFDS, _TEXT = 'tfds:', 'text'
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DECODING: Any = {'encoding': 'utf-8', 'errors': 'replace'}
_BOM, _REPLACED = '\ufeff', '\ufffd'

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
  'broken_bytes': 'bytes that are not UTF-8 became U+FFFD; counted per line',
  'nul_bytes': 'removed',
  'byte_order_mark': 'removed',
  'long_line': 'cut at spaces',
  'one_sentence_document': 'kept: rows are split at a word, not a sentence',
  'too_short': 'left out: less than two tokens cannot be two segments',
}


class Faults(bad_records.FaultCounts):
  """Counts faults of texts; `files` lists the faults of whole files."""

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
  """Texts of files, folders and 'tfds:NAME', each once, but `without` some."""

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
    self.names: dict[str, Any] = {}  # by the real path
    for text in (text for name in inputs for text in _find(name, faults)):
      path = os.path.realpath(text)
      if path in self.names:
        faults.count('repeated_file', text)
      elif path not in without:
        self.names[path] = text
    if inputs and not self.names and not without:
      names, expected = ', '.join(inputs), ' or '.join(SUFFIXES)
      raise MissingDataError(f'no text in {names}: expected files {expected}')
    # Files, or records and the key of their text, with the bytes on disk.
    self._texts = [_sized(text, data_dir) for text in self.names.values()]
    self.size = sum(size for _, size in self._texts)

  def paragraphs(self, faults: Faults, advance: Advance) -> Iterator[Paragraph]:
    """Yields paragraphs, and an empty one at the end of each document."""
    for text, size in self._texts:
      if isinstance(text, pathlib.Path):
        yield from self._joined(self._file_lines(text, size, faults, advance))
        yield Paragraph('', '')
        continue
      records, key = text
      for number in range(len(records)):
        advance(size // len(records))
        where = records.where(number)
        try:
          data = records[number][key].decode(**_DECODING)
        except BadRecord as bad:
          faults.count('unreadable_record', where, f'{bad.kind}: {bad.message}')
          continue
        # An empty line does not end a record.
        lines = self._joined(self.lines(io.StringIO(data), where, faults))
        yield from (line for line in lines if line.text)
        yield Paragraph('', '')

  def _joined(self, lines: Iterable[Paragraph]) -> Iterator[Paragraph]:
    """Joins `wrapped` lines up to an empty one, or to `max_line` characters."""
    if not self._wrapped:
      yield from lines
      return
    parts: list[str] = []
    where, length = '', 0
    # The empty one at the end completes the last paragraph.
    for text, place in itertools.chain(lines, [Paragraph('', '')]):
      if parts and (not text or length >= self._max_line):
        yield Paragraph(' '.join(parts), where)
        parts, length = [], 0
      if text:
        where = where if parts else place
        parts.append(text)
        length += len(text)

  def _file_lines(
    self, file: pathlib.Path, size: int, faults: Faults, advance: Advance
  ) -> Iterator[Paragraph]:
    has_text, done = False, 0
    try:
      if file.exists() and not file.is_file():  # a pipe might not end
        raise OSError('not a regular file')
      opened: Any = gzip.open if file.suffix == '.gz' else open
      with opened(file, 'rt', newline='\n', **_DECODING) as stream:
        raw = stream.buffer.fileobj if file.suffix == '.gz' else stream.buffer
        if stream.buffer.peek(2)[:2] in _UTF16:
          faults.count('not_utf8_file', file, 'it begins like UTF-16')
          return
        for line in self.lines(stream, file, faults):
          has_text = has_text or bool(line.text)
          yield line
          advance(raw.tell() - done)
          done = raw.tell()
      advance(size - done)
      if not has_text:
        faults.count('empty_file', file, f'{size} bytes without text')
    except EOFError as error:
      faults.count('truncated_gzip', file, str(error))
    except (gzip.BadGzipFile, zlib.error) as error:
      faults.count('damaged_gzip', file, str(error))
    except OSError as error:
      faults.count('unreadable_file', file, str(error))

  def lines(self, file: Any, where: Any, faults: Faults) -> Iterator[Paragraph]:
    """Yields the lines of decoded text, repaired, long ones in parts."""
    rest, number, long_line, is_first = '', 1, 0, True
    while text := rest + file.readline(self._max_line - len(rest)):
      place = f'{where}, line {number}'
      is_part = len(text) == self._max_line and not text.endswith('\n')
      cut = text.rfind(' ') + 1 if is_part else 0
      text, rest = text[: cut or None], text[cut:] if cut else ''
      if is_part and number != long_line:
        long_line = number
        faults.count('long_line', place, f'more than {len(text)} characters')
      if is_first and text.startswith(_BOM):
        faults.count('byte_order_mark', place)
        text = text.removeprefix(_BOM)
      if nuls := text.count('\0'):
        faults.count('nul_bytes', place, f'{nuls} of {len(text)} characters')
        text = text.replace('\0', '')
      if (broken := text.find(_REPLACED)) >= 0:
        faults.count('broken_bytes', place, f'character {broken} of the line')
      text = text.strip()
      # A blank part of a long line does not end a paragraph.
      if text or number != long_line:
        yield Paragraph(text, place)
      number, is_first = number + (not is_part), False


def _find(name: str, faults: Faults) -> list[Any]:
  """Returns 'tfds:NAME', a file, or the text files of a folder, sorted."""
  path, paths = pathlib.Path(name).expanduser(), []
  if name.startswith(_TFDS):
    return [name]
  if not os.path.lexists(path):
    raise MissingDataError(f'no file or folder {path}')
  if not path.is_dir():
    return [path]
  for entry in sorted(path.rglob('*')):
    if not os.path.isdir(entry):
      if entry.name.endswith(SUFFIXES):
        files.check_inside(entry, path)
        paths.append(entry)
      else:
        faults.count('other_file', entry)
    elif entry.is_symlink():
      faults.count('linked_folder', entry)
    elif not os.access(entry, os.R_OK | os.X_OK):
      faults.count('unreadable_file', entry, 'no permission')
  return paths


def _sized(text: Any, data_dir: str) -> tuple[Any, int]:
  """Returns a file, or records and the key of their text; and its bytes."""
  if isinstance(text, pathlib.Path):
    return text, text.stat().st_size if text.is_file() else 0
  builder = tfds.prepared_builder(text.removeprefix(_TFDS), data_dir, text)
  features = list(builder.info.features)
  keys = [key for key in features if key.endswith(_TEXT)]  # pg19: book_text
  keys = [_TEXT] if _TEXT in features else keys
  if len(keys) != 1:
    name, got = builder.info.full_name, ', '.join(features)
    raise InvalidDataError(f'{name}: expected a feature {_TEXT!r}, got {got}')
  records = tfds.examples(builder, 'train', keys)
  return (records, keys[0]), sum(map(os.path.getsize, records.files))
