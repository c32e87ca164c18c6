"""Files of texts and labels of GLUE and SentEval: layouts, bad rows, damage."""

import numpy as np
import pytest

from core.errors import ConfigError, InvalidDataError, MissingDataError
from dataset_lib.bad_records import TooManyBadRecordsError
from tests.dataset_lib import word_rows
from tests.dataset_lib.batches import build
from tests.dataset_lib.word_rows import config, opened, probing, read, write

# The third column of four is something that the task was made with.
SENTEVAL = [
  'tr\tPRES\tw1 w2', 'tr\tPAST\tseen\tw3 "w4', 'tr\tPRES\tw5',
  'va\tPAST\tw6', 'te\tPRES\tw7', 'te\tPAST\tw8 w9',
]  # fmt: skip
# GLUE's official files: header, rows and their labels.
OFFICIAL = {
  'cola': (None, ['gj04\t1\t\tw1 w2', 'gj04\t0\t*\tw3'], [1, 0]),
  'sst2': ('sentence\tlabel', ['w1 w2\t1', 'w3\t0'], [1, 0]),
  'mrpc': ('\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String',
           ['1\t7\t8\tw1\tw2', '0\t9\t10\tw3\tw4'], [1, 0]),
  'qqp': ('id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate',
          ['1\t2\t3\tw1\tw2\t1', '2\t2\t3\tw3\tw4\t0'], [1, 0]),
  'stsb': ('index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\t'
           'sentence1\tsentence2\tscore',
           ['0\tg\tf\t2012\t1\tn\tn\tw1\tw2\t4.75',
            '1\tg\tf\ty\t1\tn\tn\tw3\tw4\t0'], [4.75, 0.0]),
  'mnli': ('index\tgenre\tsentence1_parse\tsentence1\tsentence2\tlabel1\t'
           'gold_label',
           ['0\tg\t(w0)\tw1\tw2\tneutral\tcontradiction',
            '1\tg\t(w0)\tw3\tw4\tneutral\tentailment'], [2, 0]),
  'qnli': ('index\tquestion\tsentence\tlabel',
           ['0\tw1\tw2\tnot_entailment', '1\tw3\tw4\tentailment'], [1, 0]),
  'rte': ('index\tsentence1\tsentence2\tlabel',
          ['0\tw1\tw2\tentailment', '1\tw3\tw4\tnot_entailment'], [0, 1]),
  'wnli': ('index\tsentence1\tsentence2\tlabel',
           ['0\tw1\tw2\t1', '1\tw3\tw4\t0'], [1, 0]),
}  # fmt: skip
FOLDERS = {'sst2': 'SST-2', 'cola': 'CoLA', 'stsb': 'STS-B'}
PAIR = ['w1 [SEP] w2', 'w3 [SEP] w4']
SINGLE = ['w1 w2', 'w3']


def read_classes(source):
  """(words, name of the class) of every record."""
  names = source.info.class_names
  return [(words, names[label]) for words, label in read(source)]


@pytest.mark.parametrize('end', ['\n', '\r\n'])
@pytest.mark.parametrize('task', OFFICIAL)
def test_the_official_files(root, task, end):
  header, rows, labels = OFFICIAL[task]
  folder = root / FOLDERS.get(task, task.upper())
  dev = 'dev_matched.tsv' if task == 'mnli' else 'dev.tsv'
  head = [] if header is None else [header]
  write(folder / 'train.tsv', [*head, *rows], end)
  write(folder / dev, [*head, *rows[::-1]], end)
  texts = SINGLE if task in ('cola', 'sst2') else PAIR
  expected = list(zip(texts, labels, strict=True))
  given = config(root, task)
  assert read(opened(given)) == expected
  assert read(opened(given | dict(directory=str(folder)))) == expected
  for split in ('validation', 'dev'):
    source = opened(given, split)
    assert read(source) == expected[::-1]
  info = source.info
  assert info.num_classes == max(1, len(info.class_names))
  assert info.vocab_size == len(word_rows.VOCABULARY)


@pytest.mark.parametrize(
  ('task', 'header', 'row', 'source'),
  [
    ('mnli', 'idx\tpremise\thypothesis\tlabel\tgenre', '0\tw1\tw2\t1\tx', 'x'),
    ('mnli', 'premise\thypothesis\tlabel\tgenre\tsource',
     'w1\tw2\t1\tx\ty', 'x'),
    ('sst2', 'sentence\tlabel\tsource', 'w1\t1\tnews', 'news'),
    ('sst2', 'sentence\tlabel\tsource', 'w1\t1\t', ''),
    ('rte', 'sentence1\tsentence2\tlabel', 'w1\tw2\t1', ''),
    ('cola', None, 'gj04\t1\t\tw1', 'gj04'),
  ],
)  # fmt: skip
@pytest.mark.parametrize('end', ['', '.gz'])
def test_named_columns_and_sources(root, task, header, row, source, end):
  bad = row.replace('w1', ' ')
  rows = [*filter(None, [header]), bad, row]
  path = write(root / task / f'train.tsv{end}', rows)
  found = opened(config(root, task))
  text, types = ('w1', [0, 0, 0])
  if 'w2' in row:
    text, types = 'w1 [SEP] w2', [0, 0, 0, 1, 1]
  assert (read(found), found.sources) == ([(text, 1)], (source,))
  assert found.where(0) == f'{path}, line {len(rows)}'
  assert found.record(0)['token_types'].tolist() == types


def test_mnli_has_two_validation_splits(root):
  header, rows, _ = OFFICIAL['mnli']
  write(root / 'MNLI' / 'dev_matched.tsv', [header, rows[0]])
  write(root / 'MNLI' / 'dev_mismatched.tsv', [header, rows[1]])
  for split, labels in {
    'validation': [2], 'validation_matched': [2], 'dev_mismatched': [0],
    'validation_mismatched': [0], 'validation+validation_mismatched': [2, 0],
  }.items():  # fmt: skip
    source = opened(config(root, 'mnli'), split)
    assert [label for _, label in read(source)] == labels
  with pytest.raises(ConfigError, match='sst2 has no validation_matched'):
    opened(config(root, 'sst2'), 'validation_matched')


@pytest.mark.parametrize('end', ['\n', '  \n\n', '\r\n\r\n'])
def test_quotes_and_blank_last_lines_lose_and_add_no_row(root, end):
  rows = ['"w1\t1', 'w2" w3\t0', '""w4\t1', 'w5\t0', 'w6 "" "\t1']
  path = write(root / 'train.tsv', ['sentence\tlabel', *rows])
  path.write_bytes(path.read_bytes() + end.encode())
  source = opened(config(root, 'sst2'))
  texts = ['" w1', 'w2 " w3', '" " w4', 'w5', 'w6 " " "']
  assert read(source) == list(zip(texts, [1, 0, 1, 0, 1], strict=True))
  assert not source.bad_rows


@pytest.mark.parametrize('end', ['\n', '\r\n'])
@pytest.mark.parametrize('name', ['past_present.txt', 'past_present.txt.gz'])
def test_a_file_of_senteval(root, name, end):
  # Lines of no split are bad training rows.
  unknown = [b'\xff\xfe', b'\t\t', b'tr']
  lines = ['\ufeff' + SENTEVAL[0], *SENTEVAL[1:], *unknown]
  path = write(root / name, lines, end)
  train = opened(probing(root))
  assert len(train.bad_rows) == 3
  rows = [('w1 w2', 'PRES'), ('w3 " w4', 'PAST'), ('w5', 'PRES')]
  assert read_classes(train) == rows
  assert train.where(1) == f'{path}, line 2'
  assert train.info.class_names == ('PAST', 'PRES')
  assert train.info.vocab_size == len(word_rows.VOCABULARY)
  for split in ('validation', 'dev'):
    assert read_classes(opened(probing(root), split)) == [('w6', 'PAST')]
  test = opened(probing(root), 'test')
  assert read_classes(test) == [('w7', 'PRES'), ('w8 w9', 'PAST')]
  assert test.where(0) == f'{path}, line 5'
  assert len(opened(probing(root), 'validation+test[:1]')) == 2


@pytest.mark.parametrize('suffix', ['.tsv', '.tsv.gz'])
@pytest.mark.parametrize('folder', ['subj_number', '.'])
def test_files_with_named_columns(root, folder, suffix):
  rows = ['idx\tsentence\tlabel', '0\tw1 w2\tSing', '3\tw3\tPlur']
  write(root / folder / f'train{suffix}', rows)
  path = write(root / folder / f'te{suffix}', [rows[0], '7\tw4\tPlur'])
  given = probing(root, 'subj_number')
  assert read_classes(opened(given)) == [('w1 w2', 'Sing'), ('w3', 'Plur')]
  test = opened(given, 'test')
  assert read_classes(test) == [('w4', 'Plur')]
  assert test.where(0) == f'{path}, line 2'
  with pytest.raises(MissingDataError, match=r"'validation' of subj_num.*90"):
    opened(given, 'validation')


def test_classes_are_those_of_the_whole_train_split(root):
  rows = [f'tr\t{n % 4 + 9}\tw{n}' for n in range(12)]
  write(root / 'own.txt', [*rows, 'te\t9\tw1', 'te\t11\tw2', 'te\tc\tw3'])
  for split in ('train', 'train[:2]', 'test'):
    source = opened(probing(root, 'own'), split)
    # Sorted as text, as SentEval does.
    assert source.info.class_names == ('10', '11', '12', '9')
  assert source.records(np.arange(2))['label'].tolist() == [3, 1]
  # A class that was never trained is no row to evaluate.
  assert [bad.kind for _, bad in source.bad_rows] == ['illegal_label']
  assert "'c' not in the train" in str(source.bad_rows[0][1])
  source = opened(probing(root, 'own', max_examples=1))
  assert (source.info.num_classes, len(source)) == (4, 1)


def test_scores(root):
  header, rows, _ = OFFICIAL['stsb']
  legal, illegal = ('5.000', '0'), ('5.01', '-0.1', 'nan', 'inf', '', 'four')
  lines = [rows[1].removesuffix('0') + score for score in (*legal, *illegal)]
  write(root / 'train.tsv', [header, *lines])
  source = opened(config(root, 'stsb'))
  assert source.records(np.arange(2))['label'].tolist() == [5.0, 0.0]
  kinds = [(row, bad.kind) for row, bad in source.bad_rows]
  assert kinds == [(row, 'illegal_label') for row in range(2, 8)]
  assert source.info.label_dtype == 'float32'


BAD_ROWS = {
  'sst2': {
    'wrong_columns': 'w1\tw2\t1', 'empty_text': ' \u00a0 \t1',
    'illegal_label': 'w1\t2', 'not_utf8': b'w1 \xff\t1',
    'too_large': 'w1 ' * 2**19 + '\t1',
  },
  'past_present': {
    'wrong_columns': 'tr\tPRES', 'empty_text': 'tr\tPRES\t \u00a0',
    'illegal_label': 'tr\t\tw1', 'not_utf8': b'tr\tPRES\tw1 \xff',
    'unknown_split': 'xx\tFUT\tw1',
  },
}  # fmt: skip


def write_bad(root, task, kinds):
  """96 rows and bad ones, row 5, 15, ...: the data, the file, its first row."""
  form = 'w{0}\t{1}' if task == 'sst2' else 'tr\tC{1}\tw{0}'
  rows = [form.format(n % 30, n % 2) for n in range(96)]
  for place, kind in enumerate(kinds):
    rows.insert(10 * place + 5, BAD_ROWS[task][kind])
  if task == 'sst2':
    path = write(root / 'train.tsv', ['sentence\tlabel', *rows])
    return config(root, task), path, 2
  return probing(root, task), write(root / 'past_present.txt', rows), 1


@pytest.mark.parametrize('task', BAD_ROWS)
def test_bad_rows_are_counted_by_kind_with_file_and_row(root, task):
  kinds = BAD_ROWS[task]
  given, path, first = write_bad(root, task, kinds)
  data = build(given | dict(max_bad_share=0.06))
  assert {*data.bad_records} == {*kinds}
  for number, kind in enumerate(kinds):
    entry, row = data.bad_records[kind], 10 * number + 5
    assert entry['count'] == 1
    assert entry['first'][0]['file'] == f'{path}, line {row + first}'
    assert entry['first'][0]['row'] == row
  # All the good rows are there, and know their lines.
  source = data.source
  assert len(source) == data.info.num_examples == 96
  assert [text for text, _ in read(source)] == [f'w{n % 30}' for n in range(96)]
  assert source.where(5).endswith(f'line {6 + first}')
  assert source.where(95).endswith(f'line {95 + len(kinds) + first}')
  with pytest.raises(TooManyBadRecordsError, match='tolerated are 0') as error:
    build(given | dict(max_bad_share=0.5), train=False)
  assert f'{path}, line {5 + first}' in str(error.value)
  with pytest.raises(TooManyBadRecordsError, match='max_bad_share'):
    build(given)  # more than one in a thousand


HEADER = b'\xff\xfesentence\tlabel'
UNUSABLE = [
  ('own', 'test.tsv', ['sentence\tclass', 'w1\ta'],
   'the columns label, got sentence, class'),
  ('past_present', 'past_present.txt', SENTEVAL[:3],
   "'test' of past_present is empty"),
  ('past_present', 'past_present.txt', [], 'is empty'),
  ('past_present', 'past_present.txt', ['te\tPRES\tw1'],
   '2 to 2 classes .* got 0'),
  ('past_present', 'past_present.txt', [*SENTEVAL, 'tr\tPRESS\tw1'],
   '2 to 2 classes .*got 3: PAST, PRES, PRESS'),
  ('own', 'own.txt', [b'tr\ta\tw\xf6'],
   "own.txt, line 1: .* can't decode .*; no row can be read"),
  ('own', 'own.txt', ['tr\ta\tw1'], 'expected at least 2 classes .*, got 1: a'),
  ('cola', 'train.tsv', ['w1\t1'], 'columns sentence, got w1, 1'),
  *(('sst2', 'train.tsv', rows, words) for rows, words in (
    ([], 'is empty'),
    (['sentence\tlabel'], 'is empty'),
    (['text\tlabel', 'w1\t1'], 'expected the columns sentence, got text'),
    (['index\tsentence', '0\tw1'], 'the columns label, got index, sentence'),
    ([HEADER], 'line 1: no text in UTF-8: if it is UTF-16, save it as'),
    ([HEADER[1:]], "line 1: .*'utf-8' codec can't decode"),
    (['label\tsentence' + '\tx' * 2**19], 'line 1: expected at most'),
    ([b'\xef\xbb\xbf'], 'is empty'),
    ([b'\xef\xbb\xbf \r', b'\t'], 'is empty'),
    ([b'\r\r\r'], 'is empty'),
    ([bytes(99)], 'if packed, unpack it'),
    (['sentence\tlabel\tlabel', 'w1\t1\t0'], "one column 'label'"),
    (['label\tsentence\tsentence', '1\tw1\tw2'], "one column 'sentence'"),
    (['label\tsentence\tgenre\tgenre', '1\tw1\ta\tb'], "one column 'genre'"),
    (['sentence\tlabel', 'w1\t7'], 'has 1 rows, of which none can be used'),
  )),
]  # fmt: skip


@pytest.mark.parametrize(('task', 'file', 'rows', 'words'), UNUSABLE)
def test_files_that_are_not_usable(root, task, file, rows, words):
  write(root / 'train.tsv', ['sentence\tlabel', 'w1\ta', 'w2\tb'])
  write(root / file, rows)
  given = config if task in ('sst2', 'cola') else probing
  split = 'test' if 'test' in file + words else 'train'
  with pytest.raises(InvalidDataError, match=words):
    opened(given(root, task), split)


def test_glues_test_files_without_labels(root):
  write(root / 'test.tsv', ['index\tsentence', '0\tw1'])
  words = 'a split with labels.*test.tsv: expected the columns label or is_acc'
  with pytest.raises(ConfigError, match=words) as error:
    opened(config(root, 'cola'), 'test')
  assert error.value.field == 'split'


def test_texts_are_read_without_labels(root):
  kind = dict(name='dataset_lib.text_tasks:GlueTexts')
  header = 'index\tgenre\tsentence1\tsentence2'
  for place, word in (
    ('MNLI/test_matched', 'w1'), ('MNLI/test_mismatched', 'w2'),
    ('diagnostic/diagnostic', 'w3'),
  ):  # fmt: skip
    rows = [f'0\tg\t{word}\tw4', f'1\tg\t \t{word}', f'2\tg\tw5\t{word}']
    write(root / f'{place}.tsv', [header, *rows])
  given = config(root, 'mnli') | kind
  for split, word in (
    ('test', 'w1'), ('test_matched', 'w1'), ('test_mismatched', 'w2'),
    ('ax', 'w3'),
  ):  # fmt: skip
    # A row of the server may have an empty text.
    texts = [f'{word} [SEP] w4', f'[SEP] {word}', f'w5 [SEP] {word}']
    source = opened(given, split)
    assert read(source) == [(text, -1) for text in texts]
    assert not source.bad_rows
  with pytest.raises(ConfigError, match='a split with labels'):
    opened(config(root, 'mnli'), 'ax')
  with pytest.raises(ConfigError, match='TFDS changes the order'):
    opened(given | dict(directory=''), 'test')
  with pytest.raises(ConfigError, match='sst2 has no ax'):
    opened(config(root, 'sst2') | kind, 'ax')
  # The index of a row is its place, so none may be left out.
  write(root / 'MNLI/test_matched.tsv', [header, '0\tg\tw1\tw2', '1\tg\tw1'])
  with pytest.raises(TooManyBadRecordsError, match='wrong_columns'):
    build(given, train=False, split='test')
  # Labels that are there are not read.
  header, rows, _ = OFFICIAL['cola']
  write(root / 'CoLA' / 'dev.tsv', [rows[0].replace('\t1\t', '\t7\t')])
  assert read(opened(config(root, 'cola') | kind, 'dev')) == [('w1 w2', -1)]


def test_damaged_and_missing_files(root):
  path = write(root / 'train.tsv.gz', ['sentence\tlabel', 'w1\t1'] * 50)
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(InvalidDataError, match=r'train\.tsv\.gz is damaged'):
    opened(config(root, 'sst2'))
  path.unlink()
  for given, names in (
    (config(root, 'sst2'), ['dev.tsv', 'dev.tsv.gz', '/sst2', '/SST-2']),
    (probing(root), ['past_present.txt', 'train.tsv', 'tr.tsv.gz']),
  ):
    with pytest.raises(MissingDataError) as error:
      opened(given, 'validation')
    for place in (*names, str(root)):
      assert place in str(error.value)
