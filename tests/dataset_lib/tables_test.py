"""Forms of files give the same rows; nasty files are read or refused."""

import csv
import datetime
import decimal
import gzip
import json
import math

import pytest

from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib import tables

COLUMNS = ['id', 'text', 'label']
ROWS = [['0', 'w1, "w2"\nw3', 'a; b'], ['1', 'é', ''], ['2', "w4 'w5", 'c,d']]


def write_csv(path):
  with path.open('w', newline='') as file:
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([COLUMNS, *ROWS])


def write_json(path):
  rows = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
  rows[1]['label'] = None
  path.write_text('\n'.join(map(json.dumps, rows)))


def as_arrow():
  """The rows as the `datasets` package has them: labels are class ids."""
  pyarrow = pytest.importorskip('pyarrow')
  names = ['a; b', 'c,d']
  columns = dict(zip(COLUMNS, zip(*ROWS, strict=True), strict=True))
  columns['label'] = [names.index(x) if x else -1 for x in columns['label']]
  columns['id'] = [*map(int, columns['id'])]
  label = {'names': names, '_type': 'ClassLabel'}
  about = {'info': {'features': {'label': label}}}
  table = pyarrow.table({k: list(v) for k, v in columns.items()})
  return table.replace_schema_metadata({'huggingface': json.dumps(about)})


def write_parquet(path):
  table = as_arrow()
  import pyarrow.parquet

  pyarrow.parquet.write_table(table, path, row_group_size=2)


def write_saved(path):
  table = as_arrow()
  import pyarrow

  path.mkdir()
  files = []
  for number, part in enumerate((table[:1], table[1:])):
    files.append({'filename': f'data-{number}.arrow'})
    file = path / files[-1]['filename']
    with pyarrow.ipc.new_stream(file, table.schema) as out:
      out.write_table(part)
  (path / 'state.json').write_text(json.dumps({'_data_files': files}))


@pytest.mark.parametrize(
  ('name', 'write', 'places'),
  [
    ('t.csv', write_csv, ['line 2', 'line 4', 'line 5']),
    ('t.jsonl', write_json, ['line 1', 'line 2', 'line 3']),
    ('t.parquet', write_parquet, ['row 0', 'row 1', 'row 2']),
    ('t', write_saved, ['row 0', 'row 1', 'row 2']),
  ],
)
def test_each_form_gives_the_same_rows(name, write, places, tmp_path):
  path = tmp_path / name
  write(path)
  paths = [path]
  if name.endswith(('.csv', '.jsonl')):
    paths += tmp_path / f'{name}.gz', tmp_path / name.upper()
    paths[1].write_bytes(gzip.compress(path.read_bytes()))
    paths[2].write_bytes(path.read_bytes())
  for one in paths:
    table = tables.read(one, {'label', 'text', 'none'})
    assert [*table.columns] == COLUMNS
    found = [table[row] for row in range(len(table))]
    assert found == [{'text': t, 'label': label} for _, t, label in ROWS]
    wheres = [table.where(row) for row in range(3)]
    assert wheres == [f'{one}, {place}' for place in places]


def test_values_of_json_are_its_text(tmp_path):
  path = tmp_path / 't.jsonl'
  rows = '{"a":["x", "y"]}', '{"b":1.5,"a":true}', '{}', '[1]', '{"a":NaN}'
  path.write_text('\n\n'.join((*rows, r'{"a":"\ud800"}')))
  table = tables.read(path, {'a', 'b'})
  assert len(table) == 6  # without the blank lines
  assert table[0] == {'a': '["x", "y"]', 'b': ''}
  assert table[1] == {'a': 'true', 'b': '1.5'}
  assert table[2] == {'a': '', 'b': ''}
  for row in (3, 4):
    with pytest.raises(BadRecord) as error:
      table[row]
    assert error.value.kind == 'not_json'
  with pytest.raises(BadRecord, match='surrogates'):
    table[5]


def test_values_of_parquet_are_texts(tmp_path):
  pyarrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  names = {'names': ['x', 'y'], '_type': 'ClassLabel'}
  about = {'info': {'features': {'one': names, 'some': [names]}}}
  columns = dict(
    price=[decimal.Decimal('1.50'), None, decimal.Decimal('2.00')],
    day=[datetime.date(2020, 1, 2)] * 3, score=[1.0, math.nan, 2.5],
    text=[b'w1', b'w\xc3\xa9', b'w\xe9'],
    word=pyarrow.array(['a', 'b', 'a']).dictionary_encode(),
    one=[0, 1, -1], some=[[0, 1], [1], []],
  )  # fmt: skip
  about, path = {'huggingface': json.dumps(about)}, tmp_path / 't.parquet'

  def read():
    table = pyarrow.table(columns).replace_schema_metadata(about)
    parquet.write_table(table, path)
    return tables.read(path, {*columns})

  rows = read()
  expected = '1.50', '2020-01-02', '1.0', 'w1', 'a', 'x', '["x", "y"]'
  assert rows[0] == dict(zip(columns, expected, strict=True))
  expected = '', '2020-01-02', '', 'wé', 'b', 'y', '["y"]'
  assert rows[1] == dict(zip(columns, expected, strict=True))
  with pytest.raises(BadRecord, match='UTF-8'):
    rows[2]
  for number in (2, -2):  # of no class
    columns['one'] = [0, number, 1]
    with pytest.raises(BadRecord, match=rf'id {number} not in \[0, 1\]'):
      read()[1]


def test_rows_that_are_not_those_of_the_file(tmp_path, monkeypatch):
  path = tmp_path / 'saved'
  write_saved(path)
  state = json.loads((path / 'state.json').read_text())
  state['_indices_data_files'] = [{'filename': 'indices.arrow'}]
  (path / 'state.json').write_text(json.dumps(state))
  with pytest.raises(InvalidDataError, match='flatten_indices'):
    tables.read(path, {'text'})
  write_parquet(tmp_path / 't.parquet')
  monkeypatch.setattr(tables, 'MAX_TEXT', 9)
  with pytest.raises(InvalidDataError, match='at most 9 bytes'):
    tables.read(tmp_path / 't.parquet', {'text'})


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('t.xlsx', r'\.csv, \.tsv, \.jsonl, \.p'),
    ('t.parquet', 'is damaged'),
    ('t.jsonl', r'line 1: expected one object {\.\.\.} on a line'),
  ],
)
def test_files_that_cannot_be_read(name, words, tmp_path):
  path = tmp_path / name
  path.write_bytes(b'text,label\nw1,a')
  with pytest.raises(InvalidDataError, match=words):
    tables.read(path, {'text'})
  path.unlink()
  with pytest.raises(MissingDataError, match='is missing'):
    tables.read(path, {'text'})
