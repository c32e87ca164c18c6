"""Files of texts and labels of GLUE and SentEval: bad rows, damage."""

import pytest

from dataset_lib import builder
from dataset_lib.errors import (
  ConfigError,
  InvalidDataError,
  MissingDataError,
  TooManyBadRecordsError,
)
from tests.dataset_lib.word_rows import (
  SENTEVAL,
  config,
  probing,
  read,
  read_classes,
  write,
)

BAD_ROWS = {
  'glue': {
    'wrong_columns': 'w1\tw2\t1',
    'empty_text': ' \u00a0 \t1',
    'illegal_label': 'w1\t2',
    'not_utf8': b'w1 \xff\t1',
  },
  'probing': {
    'wrong_columns': 'tr\tPRES',
    'empty_text': 'tr\tPRES\t \u00a0',
    'illegal_label': 'tr\t\tw1',
    'not_utf8': b'tr\tPRES\tw1 \xff',
    'unknown_split': 'xx\tFUT\tw1',
  },
}


def write_bad(root, name, kinds):
  """A file of 96 rows and bad ones: row 5, 15, ...; and the line of row 0."""
  if name == 'glue':
    rows = [f'w{n % 30}\t{n % 2}' for n in range(96)]
  else:
    rows = [f'tr\t{("PRES", "PAST")[n % 2]}\tw{n % 30}' for n in range(96)]
  for place, kind in enumerate(kinds):
    rows.insert(10 * place + 5, BAD_ROWS[name][kind])
  if name == 'glue':
    return write(root / 'train.tsv', ['sentence\tlabel', *rows]), 2
  return write(root / 'past_present.txt', rows), 1


def build(root, name, train=True, **others):
  given = config if name == 'glue' else probing
  task = 'sst2' if name == 'glue' else 'past_present'
  return builder.build(
    given(root, task, **others), split='train', train=train, seed=0,
    batch_size=8,
  )  # fmt: skip


@pytest.mark.parametrize('name', BAD_ROWS)
def test_bad_rows_are_counted_by_kind_with_file_and_row(root, name):
  kinds = BAD_ROWS[name]
  path, first = write_bad(root, name, kinds)
  data = build(root, name, max_bad_share=0.06)
  assert {*data.bad_records} == {*kinds}
  for number, kind in enumerate(kinds):
    entry = data.bad_records[kind]
    row = 10 * number + 5
    assert entry['count'] == 1
    assert entry['first'][0]['file'] == f'{path}, line {row + first}'
    if name == 'glue':
      assert entry['first'][0]['row'] == row
  # All the good rows are there, and know their lines.
  assert len(data.records) == data.info.num_examples == 96
  assert [t for t, _ in read(data.records)] == [f'w{n % 30}' for n in range(96)]
  assert data.records.where(5).endswith(f'line {6 + first}')
  assert data.records.where(95).endswith(f'line {95 + len(kinds) + first}')
  # Evaluation tolerates none.
  with pytest.raises(TooManyBadRecordsError, match='tolerated are 0'):
    build(root, name, train=False, max_bad_share=0.5)


@pytest.mark.parametrize(
  ('name', 'kind'),
  [(name, kind) for name, kinds in BAD_ROWS.items() for kind in kinds],
)
def test_too_many_bad_rows_are_an_error(root, name, kind):
  path, first = write_bad(root, name, [kind])
  with pytest.raises(TooManyBadRecordsError) as error:
    build(root, name)  # one in 97 is more than one in a thousand
  for words in (
    '1 of 97 records are bad', f'{kind}: 1', f'{path}, line {5 + first}',
    'max_bad_share',
  ):  # fmt: skip
    assert words in str(error.value)


@pytest.mark.parametrize('line', [b'\xff\xfe', b'\t\t', b'tr'])
def test_lines_that_are_none(root, line):
  write(root / 'past_present.txt', [*SENTEVAL, line])
  source = builder.build_source(probing(root), 'train')
  assert len(source) == 3
  assert len(source.bad_rows) == 1
  assert len(builder.build_source(probing(root), 'test')) == 2


def test_a_class_that_was_never_trained_is_no_row_to_evaluate(root):
  write(root / 'own.txt', ['tr\ta\tw1', 'tr\tb\tw2', 'te\tc\tw3', 'te\ta\tw4'])
  source = builder.build_source(probing(root, 'own'), 'test')
  assert read_classes(source) == [('w4', 'a')]
  assert [bad.kind for _, bad in source.bad_rows] == ['illegal_label']
  with pytest.raises(TooManyBadRecordsError, match="'c' is none of the train"):
    builder.build(
      probing(root, 'own'), split='test', train=False, seed=0, batch_size=2
    )


HEADER = b'\xff\xfesentence\tlabel'
COLUMNS = 'the columns label, got sentence, class'
UNUSABLE = [
  *(
    ('glue', 'sst2', {'train.tsv': rows}, words)
    for rows, words in [
      ([], 'is empty'),
      (['sentence\tlabel'], 'is empty'),
      (['text\tlabel', 'w1\t1'], 'expected the columns sentence, got text'),
      (['index\tsentence', '0\tw1'], 'the columns label, got index, sentence'),
      ([HEADER], 'line 1 is not UTF-8'),
      (['sentence\tlabel', 'w1\t7'], 'has 1 rows, of which none'),
    ]
  ),
  ('glue', 'cola', {'train.tsv': ['w1\t1']}, 'columns sentence, got w1, 1'),
  *(
    ('probing', task, {f'{task}.txt': rows}, words)
    for task, rows, words in [
      ('past_present', [], 'is empty'),
      ('past_present', ['te\tPRES\tw1'], 'at least 2 .* classes .* got 0'),
      ('own', ['tr\ta\tw1'], 'expected at least 2 .* got 1: a'),
      ('past_present', [*SENTEVAL, 'tr\tPRESS\tw1'],
       'at most 2 classes .*got 3: PAST, PRES, PRESS'),
      ('own', ['tr\ta\t ', 'tr\tb\t '], 'at least 2 .* got 0'),
    ]
  ),
  *(
    ('probing', 'own', {'train.tsv': [header, 'w1\ta', 'w2\tb']}, words)
    for header, words in [
      ('sentence\tclass', COLUMNS),
      ('text\tlabel', 'the columns sentence, got text, label'),
      (HEADER, 'line 1 is not UTF-8'),
    ]
  ),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'task', 'files', 'words'), UNUSABLE)
def test_files_that_are_not_usable(root, name, task, files, words):
  for file, rows in files.items():
    write(root / file, rows)
  with pytest.raises(InvalidDataError, match=words):
    builder.build_source(config(root, task, name=name), 'train')


def test_a_test_file_that_is_not_usable(root):
  write(root / 'own' / 'train.tsv', ['sentence\tlabel', 'w1\ta', 'w2\tb'])
  write(root / 'own' / 'test.tsv', ['sentence\tclass', 'w1\ta', 'w2\tb'])
  with pytest.raises(InvalidDataError, match=COLUMNS):
    builder.build_source(probing(root, 'own'), 'test')
  write(root / 'past_present.txt', SENTEVAL[:3])
  with pytest.raises(InvalidDataError, match="'test' of past_present is empty"):
    builder.build_source(probing(root), 'test')
  write(root / 'test.tsv', ['index\tsentence', '0\tw1'])
  words = 'a split with labels.*test.tsv: expected the columns label or is_acc'
  with pytest.raises(ConfigError, match=words) as error:
    builder.build_source(config(root, 'cola'), 'test')
  assert error.value.field == 'split'


def test_a_damaged_archive(root):
  rows = [f'w{n % 30}\t1' for n in range(100)]
  path = write(root / 'train.tsv.gz', ['sentence\tlabel', *rows])
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(InvalidDataError, match=r'train\.tsv\.gz is damaged'):
    builder.build_source(config(root, 'sst2'), 'train')


@pytest.mark.parametrize(
  ('name', 'task', 'names'),
  [
    ('glue', 'sst2', ['dev.tsv', 'dev.tsv.gz', '/sst2', '/SST-2']),
    ('probing', 'past_present', ['past_present.txt', 'train.tsv', 'tr.tsv.gz']),
  ],
)
def test_missing_files_say_what_was_looked_for(root, name, task, names):
  with pytest.raises(MissingDataError) as error:
    builder.build_source(config(root, task, name=name), 'validation')
  for place in (*names, str(root)):
    assert place in str(error.value)
