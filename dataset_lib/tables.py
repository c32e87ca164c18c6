"""Files of rows with named columns: CSV, TSV, JSON lines, Parquet, Arrow.

Text files may be gzipped, begin with a byte order mark, and end lines in any
way. A CSV is quoted as in RFC 4180, but spaces may precede a field; its
delimiter is that of `,;|` and the tab which splits its first line into most
columns, or that of a first line such as `sep=;`. TSV has no quoting. Numbers of
Parquet and JSON are read as JSON text, lists too; null is '', as NaN. A folder
that `datasets.save_to_disk` wrote is a table.
"""

import codecs
import csv
import dataclasses
import functools
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core import errors, files
from core.errors import BadRecord, InvalidDataError, MissingDataError
from core.fields import unknown
from dataset_lib.source import require

MAX_TEXT, MAX_LINES = 2**29, 10**7  # bytes and lines of a file, unpacked
MAX_LINE = 2**20  # bytes of a row
MAX_BATCH = 1024  # rows of Parquet that are unpacked at once
DELIMITERS = ',;\t|'
SAVED, FOLDER = 'state.json', 'a folder of `datasets.save_to_disk`'
_DELIMITER = re.compile('"?sep=(?P<delimiter>[,;\t|])"?')  # as Excel reads
_UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
_QUOTE = (
  'a quote is not closed, or a quote within quotes is not doubled; write "" '
  'for a quote within quotes, as every CSV writer does'
)
_OBJECTS = 'expected one object {...} on a line'

Place = tuple[Any, int]  # rows with `where`, and the number of one
Line = tuple[int, bytes]  # its number in the file, from 1
Read = tuple[int, Any]  # number of a row, and its fields or a BadRecord


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of a file; of its `columns` only the `kept` ones are in memory."""

  path: Path
  columns: Sequence[str]
  kept: Sequence[str]
  rows: Sequence[Sequence[str] | BadRecord]  # a BadRecord where it is damaged
  numbers: Sequence[Any]  # of the rows in the file; (file, number) of several
  unit: str = 'line'

  def __len__(self) -> int:
    return len(self.rows)

  def __getitem__(self, row: int) -> dict[str, str]:
    """Returns the kept fields of a row; raises its BadRecord."""
    if isinstance(fields := self.rows[row], BadRecord):
      raise fields.with_traceback(None)
    return dict(zip(self.kept, fields, strict=True))

  def where(self, row: int) -> str:
    """Returns the file of a row and its line there."""
    number = self.numbers[row]
    path, number = number if isinstance(number, tuple) else (self.path, number)
    return f'{path}, {self.unit} {number}'

  def require(self, columns: Mapping[str, str]) -> None:
    """Raises ConfigError of a field of `dataset` that names no column."""
    for field, name in columns.items():
      if name and name not in self.columns:
        legal = unknown(name, self.columns, 'column')
        expected = f'a column of {self.path}: {legal}'
        raise errors.ConfigError(f'dataset.{field}', name, expected)

  def take(self, rows: Iterable[int]) -> 'Table':
    """Returns some of the rows."""
    chosen = [*rows]
    return dataclasses.replace(
      self,
      rows=[self.rows[row] for row in chosen],
      numbers=[self.numbers[row] for row in chosen],
    )


def places(records: Any) -> Iterator[Place]:
  """Yields the places of all rows of a `Table`, or an object like it."""
  return zip(itertools.repeat(records), range(len(records)), strict=False)


def read_all(places: Iterable[Place], read: Any) -> tuple[list[Any], Any]:
  """Returns (number, `read(fields)`) of good rows, (number, error) of bad."""
  good, bad = [], []
  for number, (records, row) in enumerate(places):
    try:
      good.append((number, read(records[row])))
    except BadRecord as error:
      where = error.where or records.where(row)
      bad.append((number, BadRecord(error.kind, where, error.message)))
  return good, tuple(bad)


def form_of(path: Path) -> str:
  """Returns a name of `_READERS`, such as '.csv'; '' if it is none."""
  name = path.name.lower().removesuffix('.gz') if path.is_file() else ''
  form = FOLDER if (path / SAVED).is_file() else Path(name).suffix
  return form if form in _READERS else ''


def read(
  path: Path, names: Collection[str], headless: Sequence[str] = ()
) -> Table:
  """Reads the columns of a file that are among `names`.

  `headless` are the columns of a TSV file whose first line has as many fields
  and none of these names. Raises MissingDataError, or InvalidDataError for a
  file that cannot be read or has one of `names` twice.
  """
  if path.exists() and not form_of(path):
    legal = f'one of {", ".join(_READERS)}'
    raise InvalidDataError(f'{path}: expected {legal}')
  records = _READERS[form_of(path) or '.csv'](path, names)
  columns = next(records, (0, ''))[1]
  if not columns or isinstance(columns, BadRecord):
    problem = f': line 1: {columns}' if columns else ' is empty; copy it again'
    raise InvalidDataError(f'{path}{problem}')
  if len(columns) == len(headless) and not {*columns} & {*headless}:
    records, columns = itertools.chain([(1, columns)], records), headless
  if twice := [n for n in sorted(names) if columns.count(n) > 1]:
    expected = f'expected one column {twice[0]!r}; rename the others'
    raise InvalidDataError(f'{path}: {expected}')
  places = {name: n for n, name in enumerate(columns) if name in names}
  rows: list[Any] = []
  numbers = []
  for number, fields in records:
    numbers.append(number)
    try:
      rows.append(_picked(fields, places, len(columns)))
    except BadRecord as bad:
      rows.append(bad)
  unit = 'row' if _READERS.get(form_of(path)) is _arrow else 'line'
  return Table(path, tuple(columns), tuple(places), rows, numbers, unit)


def _picked(fields: Any, places: dict[str, int], count: int) -> tuple[str, ...]:
  """Returns the kept fields of all, or of a mapping; BadRecord of bad ones."""
  if isinstance(fields, BadRecord):
    raise fields
  if isinstance(fields, dict):
    chosen = tuple(fields.get(name, '') for name in places)
  else:
    message = f'expected {count} columns, got {len(fields)}'
    require(len(fields) == count, 'wrong_columns', message)
    chosen = tuple(fields[place] for place in places.values())
  text = decoded('\t'.join(chosen))
  require('\0' not in text, 'nul', 'a NUL byte: is it a text in UTF-8?')
  return chosen


def decoded(text: bytes | str) -> str:
  """Returns a text; BadRecord if it is long, or neither UTF-8 nor Unicode."""
  try:
    if isinstance(text, str):  # with lone surrogates of JSON or of `_csv`
      text = text.encode(errors='surrogateescape')
    files.check_size(len(text), MAX_LINE)
    return text.decode('utf-8')
  except UnicodeError as error:
    message = f'{error}; save the file as UTF-8'
    raise BadRecord('not_utf8', '', message) from error


def read_lines(path: Path) -> Iterator[Line]:
  """Yields lines, plain or gzip, without their ends and the last blank ones.

  Raises MissingDataError, or InvalidDataError if the file is damaged, empty or
  larger than the limits.
  """
  blank: list[Line] = []
  is_empty = True
  for number, line in enumerate(_raw_lines(path), 1):
    blank.append((number, line.removesuffix(b'\n').removesuffix(b'\r')))
    if line.strip(b'\r\n '):
      yield from blank
      blank = []
    is_empty = is_empty and not line.strip()
  if is_empty:
    raise InvalidDataError(f'{path} is empty; copy it again')


def _raw_lines(path: Path) -> Iterator[bytes]:
  """Yields lines with their ends, without a byte order mark."""
  total = 0
  with files.damage_of(path), files.opened(path, MAX_TEXT) as plain:
    is_packed = path.suffix.lower() == '.gz'
    file: Any = gzip.GzipFile(fileobj=plain) if is_packed else plain
    try:
      lines = iter(functools.partial(file.readline, MAX_TEXT + 1), b'')
      for number, line in enumerate(lines, 1):
        total += len(line)
        if total > MAX_TEXT or number > MAX_LINES:
          limits = f'at most {MAX_TEXT} bytes, unpacked, and {MAX_LINES} lines'
          message = f'{path}: expected {limits}, got more; split it'
          raise InvalidDataError(message)
        if number == 1 and (line.startswith(_UTF16) or b'\0' in line):
          fix = 'if it is UTF-16, save it as UTF-8; if packed, unpack it'
          raise InvalidDataError(f'{path}: line 1: no text in UTF-8: {fix}')
        yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except (EOFError, OSError, zlib.error) as error:
      message = f'{path} is damaged or cut short, copy it again: {error}'
      raise InvalidDataError(message) from error


def _csv(path: Path, names: Collection[str]) -> Iterator[Read]:
  """Yields the rows of a CSV that are not blank."""
  texts = (
    part.decode(errors='surrogateescape')  # `_picked` finds what is not UTF-8
    for line in _raw_lines(path)
    for part in line.splitlines(keepends=True)  # also at a lone \\r
  )
  first = ['']  # lines up to the names of the columns
  while not first[-1].strip() and (line := next(texts, '')):
    first.append(line)
  rows_by = functools.partial(csv.reader, skipinitialspace=True)
  sizes = [len(next(rows_by(first[-1:], delimiter=d))) for d in DELIMITERS]
  delimiter = DELIMITERS[sizes.index(max(sizes))]
  if stated := _DELIMITER.fullmatch(first[-1].strip()):
    first[-1], delimiter = '\n', stated['delimiter']
  csv.field_size_limit(max(MAX_TEXT, csv.field_size_limit()))  # see `decoded`
  lines = itertools.chain(first[1:], texts)
  rows = rows_by(lines, delimiter=delimiter, strict=True)
  start, width = 1, 0
  try:
    for fields in rows:
      if any(map(str.strip, fields)):
        width = width or len(fields)
        if rows.line_num > start and len(fields) != width:
          raise csv.Error(f'expected {width} columns, got {len(fields)}')
        yield start, fields
      start = rows.line_num + 1
  except csv.Error as bad:
    raise InvalidDataError(f'{path}, line {start}: {_QUOTE} ({bad})') from bad


def _tsv(path: Path, names: Collection[str]) -> Iterator[Read]:
  """Yields the rows of a TSV; each line is decoded by itself."""
  for number, line in read_lines(path):
    try:
      yield number, decoded(line).split('\t')
    except BadRecord as bad:
      yield number, bad


def _json(path: Path, names: Collection[str]) -> Iterator[Read]:
  """Yields the rows of objects, one a line; the columns are those of all."""
  rows: list[Read] = []
  columns: dict[str, None] = {}
  for number, line in read_lines(path):
    if not line.strip():
      continue
    try:
      row = files.loads(decoded(line))
      require(isinstance(row, dict), 'not_json', _OBJECTS)
      columns |= dict.fromkeys(row)
      row = {name: value for name, value in row.items() if name in names}
      rows.append((number, _row(row, {})))
    except BadRecord as bad:
      rows.append((number, bad))
    except ValueError as error:
      message = f'{_OBJECTS}: {error}'
      rows.append((number, BadRecord('not_json', '', message)))
  return itertools.chain([(0, [*columns] or rows[0][1])], rows)


def _arrow(path: Path, names: Collection[str]) -> Iterator[Read]:
  """Yields the rows of a Parquet file, or of a saved `datasets` folder."""
  try:
    from pyarrow import ipc, memory_map, parquet
  except ImportError as error:
    missing = "needs pyarrow: pip install 'adaptive-computation[parquet]'"
    raise MissingDataError(f'{path} {missing}') from error
  root, paths, number, total = path.parent, [path], 0, 0
  with files.damage_of(path):
    if is_saved := path.is_dir():
      saved = files.read_object(path / SAVED)
      root = path
      paths = [path / part['filename'] for part in saved['_data_files']]
      message = 'it selects rows by indices; save `flatten_indices()` of it'
      require(not saved.get('_indices_data_files'), 'indices', message)
    for part in paths:
      files.check_regular(part, root)
      opened = memory_map(str(part))
      file: Any = ipc.open_stream if is_saved else parquet.ParquetFile
      file = file(opened)
      schema = file.schema if is_saved else file.schema_arrow
      if part is paths[0]:
        yield 0, schema.names
      kept = [name for name in schema.names if name in names]
      about = (schema.metadata or {}).get(b'huggingface', b'{}').decode()
      features = (files.loads(about).get('info') or {}).get('features') or {}
      # Few: a file may state a long text once for many rows.
      batches = file if is_saved else file.iter_batches(MAX_BATCH, columns=kept)
      for batch in (batch.select(kept) for batch in batches):
        total += batch.nbytes
        files.check_size(total, MAX_TEXT)
        for row in batch.to_pylist():
          yield number, _row(row, features)
          number += 1


def _row(values: Mapping[str, Any], features: Mapping[str, Any]) -> Any:
  """Returns the texts of a row, see `_text`; a BadRecord if one has none."""
  try:
    return {n: _text(value, features.get(n)) for n, value in values.items()}
  except BadRecord as bad:
    return bad


def _text(value: Any, feature: Any = None) -> str:
  """Returns a text as it is, '' for null and NaN, JSON for other values.

  A `feature` of the `datasets` package may name class ids; -1 has no name.
  """
  if isinstance(feature, list):  # of a list's items, in older versions
    feature = feature[0]
  feature = feature.get('feature', feature) if feature else {}
  if feature.get('_type') == 'ClassLabel' and (names := feature.get('names')):
    ids = value if isinstance(value, list) else [value]
    ids = [number for number in ids if number not in (None, -1)]
    for number in ids:
      message = f'class id {number!r:.40} not in [0, {len(names) - 1}]'
      require(number in range(len(names)), 'illegal_label', message)
    known = [str(names[int(number)]) for number in ids]
    value = known if isinstance(value, list) else ''.join(known)
  if isinstance(value, bytes):  # of a writer that does not tell texts
    return decoded(value)
  if value is None or value != value:
    return ''
  is_json = isinstance(value, (bool, int, float, list, dict))
  return json.dumps(value, default=_text) if is_json else str(value)


_READERS = {
  '.csv': _csv, '.tsv': _tsv, '.jsonl': _json, '.parquet': _arrow,
  FOLDER: _arrow,
}  # fmt: skip
