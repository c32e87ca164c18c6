"""GLUE's TSV files: their layouts, quotes, bad rows, damage."""

import numpy as np
import pytest

from dataset_lib import builder
from dataset_lib.errors import (
  ConfigError,
  InvalidDataError,
  MissingDataError,
  TooManyBadRecordsError,
)
from tests.dataset_lib.tsv_rows import write
from tests.dataset_lib.word_rows import VOCABULARY, config, read

OFFICIAL = {
  'cola': (None, ['gj04\t1\t\tw1 w2', 'gj04\t0\t*\tw3'], [1, 0]),
  'sst2': ('sentence\tlabel', ['w1 w2\t1', 'w3\t0'], [1, 0]),
  'mrpc': (
    '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String',
    ['1\t7\t8\tw1\tw2', '0\t9\t10\tw3\tw4'],
    [1, 0],
  ),
  'qqp': (
    'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate',
    ['1\t2\t3\tw1\tw2\t1', '2\t2\t3\tw3\tw4\t0'],
    [1, 0],
  ),
  'stsb': (
    'index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\t'
    'sentence1\tsentence2\tscore',
    ['0\tg\tf\t2012\t1\tn\tn\tw1\tw2\t4.75', '1\tg\tf\ty\t1\tn\tn\tw3\tw4\t0'],
    [4.75, 0.0],
  ),
  'mnli': (
    'index\tgenre\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label',
    [
      '0\tg\t(w0)\tw1\tw2\tneutral\tcontradiction',
      '1\tg\t(w0)\tw3\tw4\tneutral\tentailment',
    ],
    [2, 0],
  ),
  'qnli': (
    'index\tquestion\tsentence\tlabel',
    ['0\tw1\tw2\tnot_entailment', '1\tw3\tw4\tentailment'],
    [1, 0],
  ),
  'rte': (
    'index\tsentence1\tsentence2\tlabel',
    ['0\tw1\tw2\tentailment', '1\tw3\tw4\tnot_entailment'],
    [0, 1],
  ),
  'wnli': (
    'index\tsentence1\tsentence2\tlabel',
    ['0\tw1\tw2\t1', '1\tw3\tw4\t0'],
    [1, 0],
  ),
}
FOLDERS = {'sst2': 'SST-2', 'cola': 'CoLA', 'stsb': 'STS-B'}
PAIR = ['w1 [SEP] w2', 'w3 [SEP] w4']
SINGLE = ['w1 w2', 'w3']


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
  assert read(builder.build_source(config(root, task), 'train')) == expected
  for split in ('validation', 'dev'):
    source = builder.build_source(config(root, task), split)
    assert read(source) == expected[::-1]
  own_folder = config(root, task) | dict(directory=str(folder))
  assert read(builder.build_source(own_folder, 'train')) == expected
  info = source.info
  assert info.num_classes == max(1, len(info.class_names))
  assert info.vocab_size == len(VOCABULARY)


@pytest.mark.parametrize('name', ['train.tsv', 'train.tsv.gz'])
def test_named_columns(root, name):
  write(
    root / 'mnli' / name,
    ['idx\tpremise\thypothesis\tlabel\tgenre', '0\tw1\tw2\t1\tx'],
  )
  source = builder.build_source(config(root, 'mnli'), 'train')
  assert read(source) == [('w1 [SEP] w2', 1)]
  assert source.where(0) == f'{root}/mnli/{name}, line 2'
  assert source.record(0)['token_types'].tolist() == [0, 0, 0, 1, 1]


def test_mnli_has_two_validation_splits(root):
  header, rows, _ = OFFICIAL['mnli']
  write(root / 'MNLI' / 'dev_matched.tsv', [header, rows[0]])
  write(root / 'MNLI' / 'dev_mismatched.tsv', [header, rows[1]])

  def labels(split):
    source = builder.build_source(config(root, 'mnli'), split)
    return [label for _, label in read(source)]

  assert labels('validation') == labels('validation_matched') == [2]
  assert labels('validation_mismatched') == labels('dev_mismatched') == [0]
  assert labels('validation+validation_mismatched') == [2, 0]
  with pytest.raises(ConfigError, match='sst2 has no validation_matched'):
    builder.build_source(config(root, 'sst2'), 'validation_matched')


def test_mrpc_as_microsoft_gives_it(root):
  header = '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String'
  folder = root / 'MRPC'
  rows = ['1\t1\t2\tw1\tw2', '0\t3\t4\tw3\tw4', '1\t3\t2\tw5\tw6']
  write(folder / 'msr_paraphrase_train.txt', [header, *rows], '\r\n')
  write(folder / 'msr_paraphrase_test.txt', [header, '0\t5\t6\tw7\tw8'], '\r\n')
  with pytest.raises(MissingDataError, match=r'dev_ids\.tsv'):
    builder.build_source(config(root, 'mrpc'), 'train')
  write(folder / 'dev_ids.tsv', ['3\t4'])
  # GLUE's own test file is there too, without labels.
  write(folder / 'test.tsv', ['index\t#1 String\t#2 String', '0\tw7\tw8'])

  def rows_of(split):
    return read(builder.build_source(config(root, 'mrpc'), split))

  assert rows_of('train') == [('w1 [SEP] w2', 1), ('w5 [SEP] w6', 1)]
  assert rows_of('validation') == [('w3 [SEP] w4', 0)]
  assert rows_of('test') == [('w7 [SEP] w8', 0)]


def test_no_good_row_is_lost_to_quotes(root):
  rows = ['"w1\t1', 'w2" w3\t0', '""w4\t1', 'w5\t0', 'w6 "" "\t1']
  write(root / 'train.tsv', ['sentence\tlabel', *rows])
  data = builder.build(
    config(root, 'sst2'), split='train', train=True, seed=0, batch_size=2
  )
  texts = ['" w1', 'w2 " w3', '" " w4', 'w5', 'w6 " " "']
  assert read(data.records) == list(zip(texts, [1, 0, 1, 0, 1], strict=True))
  assert data.bad_records == {}


BAD_ROWS = {
  'wrong_columns': 'w1\tw2\t1',
  'empty_text': ' \u00a0 \t1',
  'illegal_label': 'w1\t2',
  'not_utf8': b'w1 \xff\t1',
}


def bad_file(root, kinds, good=96):
  rows = [f'w{n % 30}\t{n % 2}' for n in range(good)]
  for place, kind in enumerate(kinds):
    rows.insert(10 * place + 5, BAD_ROWS[kind])
  return write(root / 'train.tsv', ['sentence\tlabel', *rows])


def build(root, train=True, **others):
  return builder.build(
    config(root, 'sst2', **others),
    split='train',
    train=train,
    seed=0,
    batch_size=8,
  )


def test_bad_rows_are_counted_by_kind_with_file_and_row(root):
  path = bad_file(root, BAD_ROWS)
  data = build(root, max_bad_share=0.04)
  assert list(data.bad_records) == list(BAD_ROWS)
  for number, entry in enumerate(data.bad_records.values()):
    row = 10 * number + 5
    assert entry['count'] == 1
    assert entry['first'][0]['row'] == row
    assert entry['first'][0]['file'] == f'{path}, line {row + 2}'
  # All the good rows are there, and know their lines.
  assert len(data.records) == data.info.num_examples == 96
  assert [t for t, _ in read(data.records)] == [f'w{n % 30}' for n in range(96)]
  assert data.records.where(5).endswith('line 8')
  assert data.records.where(95).endswith('line 101')


@pytest.mark.parametrize('kind', BAD_ROWS)
def test_too_many_bad_rows_are_an_error(root, kind):
  path = bad_file(root, [kind])
  with pytest.raises(TooManyBadRecordsError) as error:
    build(root)  # one in 97 is more than one in a thousand
  message = str(error.value)
  assert '1 of 97 records are bad' in message
  assert f'{kind}: 1' in message
  assert f'{path}, line 7 (row 5)' in message
  assert 'max_bad_share' in message


def test_evaluation_tolerates_no_bad_row(root):
  bad_file(root, ['empty_text'])
  assert build(root, max_bad_share=0.5)
  with pytest.raises(TooManyBadRecordsError, match='tolerated are 0'):
    build(root, train=False, max_bad_share=0.5)


@pytest.mark.parametrize(
  ('score', 'legal'),
  [
    ('5.000', True), ('0', True), ('5.01', False), ('-0.1', False),
    ('nan', False), ('inf', False), ('', False), ('four', False),
  ],
)  # fmt: skip
def test_scores(root, score, legal):
  header, rows, _ = OFFICIAL['stsb']
  row = rows[1].removesuffix('0') + score
  write(root / 'train.tsv', [header, rows[0], row])
  source = builder.build_source(config(root, 'stsb'), 'train')
  assert len(source) == 1 + legal
  assert [bad.kind for _, bad in source.bad_rows] == (
    [] if legal else ['illegal_label']
  )
  assert source.records(np.array([0]))['label'].tolist() == [4.75]
  assert source.info.label_dtype == 'float32'


@pytest.mark.parametrize(
  ('content', 'words'),
  [
    ([], 'is empty'),
    (['text\tlabel', 'w1\t1'], 'expected the columns sentence, got text'),
    ([b'\xff\xfesentence\tlabel'], 'line 1 is not UTF-8'),
    (['sentence\tlabel', 'w1\t7'], 'none of its 1 rows can be used'),
    (['sentence\tlabel'], 'is empty'),
  ],
)
def test_files_that_are_not_usable(root, content, words):
  write(root / 'train.tsv', content)
  with pytest.raises(InvalidDataError, match=words):
    builder.build_source(config(root, 'sst2'), 'train')


def test_a_damaged_archive(root):
  rows = [f'w{n % 30}\t1' for n in range(100)]
  path = write(root / 'train.tsv.gz', ['sentence\tlabel', *rows])
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(InvalidDataError, match=r'train\.tsv\.gz is damaged'):
    builder.build_source(config(root, 'sst2'), 'train')


def test_cola_without_header_needs_its_four_columns(root):
  write(root / 'train.tsv', ['w1\t1'])
  with pytest.raises(InvalidDataError, match='a header, or the 4 columns'):
    builder.build_source(config(root, 'cola'), 'train')


def test_missing_files_say_what_was_looked_for(root):
  with pytest.raises(MissingDataError) as error:
    builder.build_source(config(root, 'sst2'), 'validation')
  for name in ('dev.tsv', 'dev.tsv.gz', 'sst2/', 'SST-2/', str(root)):
    assert name in str(error.value)
