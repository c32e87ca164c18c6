"""Texts of one's own: nasty files, kinds of labels, lengths."""

import numpy as np
import pytest

from core.errors import ConfigError, InvalidDataError
from dataset_lib.bad_records import TooManyBadRecordsError
from tests.dataset_lib.batches import build
from tests.dataset_lib.word_rows import opened, read, write

GOOD = [f'w{n},{"ab"[n % 2]}' for n in range(30)]
SPLITS = 'train', 'validation', 'test'
BLANK = ['', '  ', ',,']


def config(path, **fields):
  words = str(path.parent.parent / 'vocabulary')
  return dict(name='texts', path=str(path), tokenizer=words, **fields)


def file(root, rows, header='text,label', end='\n', name='own.csv'):
  return config(write(root / name, [header, *rows], end))


def replaced(old, new):
  return [row.replace(old, new) for row in GOOD]


# Header, rows, line end, and how many rows are read, or the error.
NASTY = {
  'quotes': ('text,label', [*GOOD, '"w1 ""w2"", w3",a'], '\n', 31),
  'newlines in a field': ('text,label', [*GOOD, '"w1\nw2\r\nw3",a'], '\n', 31),
  'byte order mark': ('\ufefftext,label', GOOD, '\n', 30),
  'CRLF': ('text,label', GOOD, '\r\n', 30),
  'CR': ('text,label', GOOD, '\r', 30),
  'semicolons': ('text;label', replaced(',', ';'), '\n', 30),
  'spaces before fields': (
    '"text", label', [f'"w{n}", "{"ab"[n % 2]}"' for n in range(30)], '\n', 30),
  'blank lines before semicolons': (
    '\n\ntext;label', replaced(',', ';'), '\n', 30),
  'bars': ('text|label', replaced(',', '|'), '\n', 30),
  'blank lines': ('text,label', [*BLANK, *GOOD, *BLANK], '\n', 30),
  'an empty column': ('text,label,', [f'{row},' for row in GOOD], '\n', 30),
  'two empty columns': (',text,,label', [
    f',{row.replace(",", ",,")}' for row in GOOD], '\n', 30),
  'a column twice': ('text,label,x,x', [f'{r},1,2' for r in GOOD], '\n', 30),
  'labels with commas': ('text,label', replaced(',a', ',"a, b"'), '\n', 30),
  'a quote within': ('text,label', replaced('w7,', '5" w7,'), '\n', 30),
  'no such column': (
    'Text,label', GOOD, '\n', r"dataset\.text: .*did you mean 'Text'"),
  'no header': ('w1,a', GOOD, '\n', r'dataset\.text: .*columns are w1, a'),
  'one class': (
    'text,label', replaced(',b', ',a'), '\n', 'at least 2 classes.*got 1: a'),
  'one row': ('text,label', GOOD[:1], '\n', 'at least 2 classes.*got 1: a'),
  'no row': ('text,label', [], '\n', 'has no rows'),
  'nothing': ('', [], '', 'is empty'),
  'numbers': (
    'text,label', [f'w1,{n}' for n in range(99)], '\n', 'kind=number'),
  'a stated delimiter': ('sep=;\ntext;label', [
    row.replace(',', ';') for row in GOOD], '\n', len(GOOD)),
  'a long cell': (
    'text,label', replaced('w7,', 'w' * (2**20 + 1) + ','), '\n',
    'line 9: expected at most 1048576 bytes'),
  'an unclosed quote': (
    'text,label', replaced('w7,', '"w7,'), '\n', 'line 9: a quote is not'),
  'closed by the next one': (
    'text,label', [row.replace('w9,', '"w9",') for row in replaced(
      'w7,', '"w7,')], '\n', 'line 9: a quote is not'),
  'closed within a text': (
    'text,label', [row.replace('w9,b', 'w9",b,c') for row in replaced(
      'w7,', '"w7,')], '\n', 'line 9: a quote is not'),
  'UTF-16': (
    'text,label'.encode('utf-16'), [r.encode('utf-16-le') for r in GOOD], '\n',
    'line 1: no text in UTF-8: if it is UTF-16, save it as'),
  'Latin-1': (
    'text,label', [b'w1 \xe9,a', *GOOD], '\n', 'line 2: .*not|line 2: .*UTF-8'),
  'NUL': ('text,label', replaced('w7,', 'w\0,'), '\n', 'line 9: a NUL byte'),
  'ragged': (
    'text,label', replaced('w7,', 'w7, w8,'), '\n', 'line 9: expected 2 col'),
  'an empty text': (
    'text,label', replaced('w7,', ' ,'), '\n', 'line 9: text 1'),
  'an empty label': (
    'text,label', replaced('w7,b', 'w7,'), '\n', 'line 9: the label is empty'),
}  # fmt: skip


@pytest.mark.parametrize('case', NASTY)
def test_nasty_files(case, root):
  header, rows, end, expected = NASTY[case]
  path = write(root / 'own.csv', [*filter(None, [header]), *rows], end)
  given = config(path, max_bad_share=0.0)
  if isinstance(expected, int):
    texts = {text for text, _ in read(opened(given, 'all'))}
    assert len(opened(given, 'all')) == expected
    assert {f'w{n}' for n in range(30) if n != 7} <= texts
    parts = [opened(given, name) for name in SPLITS]
    assert [*map(len, parts)] == [expected - 12, 6, 6]
    return
  kinds = ConfigError, InvalidDataError, TooManyBadRecordsError
  with pytest.raises(kinds, match=expected) as error:
    build(given)
  if 'quote' in expected:
    assert 'max_bad_share' not in str(error.value)


def test_new_rows_and_lists_may_have_many_classes(root):
  rows = [f'w1 w{n % 30},c{n % 40}' for n in range(60)]
  with pytest.raises(ConfigError, match='a column of classes: it has 40 val'):
    opened(file(root, rows))
  assert opened(file(root, rows), 'all').info.num_classes == 40
  lists = file(root, rows) | {'kind': 'classes'}
  assert opened(lists).info.num_classes == 40


def test_bad_rows_are_listed_and_counted_by_kind(root):
  rows = [*(f'w1,{n},x' for n in range(15)), *GOOD * 20, *[',a'] * 15]
  given = file(root, rows)
  with pytest.raises(TooManyBadRecordsError) as error:
    build(given)
  lines = str(error.value).splitlines()
  assert lines[0].startswith(f'all splits: 30 of {len(rows)} records')
  assert len([line for line in lines if 'line ' in line]) == 20
  assert len([line for line in lines if 'own.csv' in line]) == 1
  assert lines[2] == '  line 3: expected 2 columns, got 3'
  assert lines[1].endswith('own.csv, line 2: expected 2 columns, got 3')
  assert 'By kind: empty_text: 15, wrong_columns: 15.' in lines
  # No hint for a file of which much is bad.
  given = file(root, [f'{row},x' for row in GOOD[:9]] + GOOD)
  with pytest.raises(TooManyBadRecordsError) as error:
    build(given)
  assert 'max_bad_share' not in str(error.value)


def test_kinds_of_labels(root):
  rows = [f'w{n},w1,{n / 7 - 2},s{n % 2}' for n in range(30)]
  given = file(root, rows, 'a,b,score,site') | dict(
    text='a', pair='b', label='score', source='site', kind='number'
  )
  source = opened(given, 'all')
  assert read(source)[0] == ('w0 [SEP] w1', pytest.approx(-2))
  assert source.sources == ('s0', 's1') * 15
  assert (source.info.num_classes, source.info.label_kind) == (1, 'number')
  numbers = np.arange(30) / 7 - 2
  assert source.info.label_scale == pytest.approx(
    (numbers.mean(), numbers.std())
  )
  for number in ('1e39', '1_5', 'inf', 'NaN', '"1,5"', ''):
    other = file(root, [*rows, f'w1,w1,{number},s1'], 'a,b,score,site')
    [(_, bad)] = opened(given | other, 'all').bad_rows
    assert 'expected a number like 1.5' in bad.message
  rows = ['w1,a;b', 'w2,"[""b"", null, ""c, d""]"', 'w3,a']
  source = opened(file(root, rows) | dict(kind='classes'), 'all')
  assert source.info.class_names == ('a', 'b', 'c, d')
  labels = source.records(np.arange(3))['label'].tolist()
  assert labels == [[0, 1], [1, 2], [0, -1]]
  assert source.info.max_labels == 2
  with pytest.raises(ConfigError, match=r'dataset\.kind: .*classes: .*lists'):
    opened(file(root, rows), 'all')
  # Not a class: a list of Python, or one that is cut short; [c] is a class.
  rows += '''w4,"['a', 'b']"''', 'w5,"[""a"", ""b"', 'w6,[c]'
  source = opened(file(root, rows) | dict(kind='classes'), 'all')
  assert source.info.class_names == ('[c]', 'a', 'b', 'c, d')
  assert [bad.message[:15] for _, bad in source.bad_rows] == [
    'expected a list'
  ] * 2


def test_classes_that_look_alike_are_named(root, caplog):
  labels = ('a', 'A', 'é', 'e\u0301', '1', '1.0', 'b', 'b\u200b', 'c d',
            'c\u00a0 d', 'NaN')  # fmt: skip
  names = opened(file(root, map('w1,'.__add__, labels)), 'all').info.class_names
  assert {*names} == {*labels}
  assert len(caplog.messages) == 6
  assert "the class 'NaN': a cell of a missing label is empty" in caplog.text
  assert "'A' and 'a' look alike" in caplog.text


def test_repeated_rows_are_told_once(root, caplog):
  given = file(root, [*GOOD, 'w7 w8 w9,a', 'w7 w8 w9,a', 'w7  w8 w9,b'])
  for split in ('train', 'test'):
    opened(given, split)
  assert [message.partition(': ')[2] for message in caplog.messages] == [
    '1 rows are copies of others', '1 texts occur with different labels'
  ]  # fmt: skip


def test_lengths_are_those_of_the_train_rows(root):
  lengths = [*range(1, 21)] * 19 + [38] * 20
  rows = [f'{"w1 " * n}w{k % 30},{"ab"[k % 2]}' for k, n in enumerate(lengths)]
  source = opened(file(root, rows))
  assert source.info.length_buckets == (16, 24, 48)
  assert source.info.input_shape == (48,)
  assert source.info.preprocessing['max_length'] == 48
  assert opened(file(root, rows), 'test').info.length_buckets == (16, 24, 48)
  source = opened(file(root, rows) | dict(max_length=10))
  assert source.info.length_buckets == (10,)
  assert source.lengths.max() == 10


TASKS = dict(label='domain+spam', kind='tasks')


def tasks_file(root, rows, **fields):
  return file(root, rows, 'text,domain,spam') | TASKS | fields


def test_rows_have_a_label_for_each_of_several_tasks(root):
  rows = [f'w{n},{("bank", "art")[n % 2]},{("yes", "no")[n % 3 == 0]}'
          for n in range(30)]  # fmt: skip
  rows[4], rows[5] = 'w4,,no', 'w5,art,'
  source = opened(tasks_file(root, rows), 'all')
  info = source.info
  names = 'domain=art', 'domain=bank', 'spam=no', 'spam=yes'
  assert info.class_names == names
  assert info.tasks == {'domain': slice(0, 2), 'spam': slice(2, 4)}
  assert (info.label_kind, info.label_shape) == ('tasks', (2,))
  labels = dict(read(source))
  assert labels['w0'] == [1, 2]
  assert labels['w4'] == [2, -1]
  assert labels['w5'] == [0, -1]
  splits_of = opened(tasks_file(root, rows), 'train').info.splits
  assert sum(splits_of['rows'].values()) == 30
  assert all(count >= 4 for count in splits_of['rows'].values())


def test_a_row_without_any_label_is_bad(root):
  rows = [f'w{n},{"ab"[n % 2]},{"cd"[n % 2]}' for n in range(20)]
  given = tasks_file(root, [*rows, 'w9 w9,,'], max_bad_share=0.5)
  [(_, bad)] = opened(given, 'all').bad_rows
  assert bad.kind == 'illegal_label'
  # Others may have the classes in another order, or lack some.
  run = opened(given, 'train').info
  other = write(root / 'other.csv', ['text,domain,spam', 'w1,,d', 'w2,b,c'])
  new = build(config(other, **TASKS), 'all', train=False, batch_size=2)
  new.label_as(run)
  [batch] = new.batches()
  assert batch['label'].tolist() == [[3, -1], [1, 2]]
  assert new.info.tasks == run.tasks


@pytest.mark.parametrize(
  ('rows', 'fields', 'error', 'message'),
  [
    (['w1,a,c', 'w2,b,c'], {}, InvalidDataError, "column 'spam', got spam=c"),
    (GOOD, dict(label='domain+label'), ConfigError, r'dataset\.label: .*label'),
    (GOOD, dict(label='domain'), ConfigError, r'dataset\.label: .*columns as'),
    (GOOD, dict(label='a+a'), ConfigError, r'dataset\.label: .*columns as'),
    (GOOD, dict(label='a b+c'), ConfigError, r'dataset\.label: .*rename'),
    ([f'w1,{n},{n % 2}' for n in range(60)], {}, ConfigError, '60 values'),
  ],
)
def test_columns_that_are_no_tasks(rows, fields, error, message, root):
  given = tasks_file(root, rows) | fields
  with pytest.raises(error, match=message):
    opened(given, 'all' if 'label' in fields else 'train')
