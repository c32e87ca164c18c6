"""Probing tasks: SentEval's files, TSV files, classes, faults, real ones."""

import numpy as np
import pytest

from dataset_lib import builder, probing
from dataset_lib.errors import (
  ConfigError,
  InvalidDataError,
  MissingDataError,
  TooManyBadRecordsError,
)
from tests.dataset_lib import word_rows
from tests.dataset_lib.tsv_rows import write
from tests.dataset_lib.word_rows import VOCABULARY, WORDS

# The third column of four is something that the task was made with.
OFFICIAL = [
  'tr\tPRES\tw1 w2',
  'tr\tPAST\tseen\tw3 "w4',
  'tr\tPRES\tw5',
  'va\tPAST\tw6',
  'te\tPRES\tw7',
  'te\tPAST\tw8 w9',
]


def config(root, task='past_present', **others):
  return word_rows.config(root, task, name='probing', **others)


def read(source):
  """(words, name of the class) of every record."""
  names = source.info.class_names
  return [(words, names[label]) for words, label in word_rows.read(source)]


@pytest.mark.parametrize('end', ['\n', '\r\n'])
@pytest.mark.parametrize('name', ['past_present.txt', 'past_present.txt.gz'])
def test_a_file_of_senteval(root, name, end):
  path = write(root / name, ['\ufeff' + OFFICIAL[0], *OFFICIAL[1:]], end)
  train = builder.build_source(config(root), 'train')
  assert read(train) == [('w1 w2', 'PRES'), ('w3 " w4', 'PAST'), ('w5', 'PRES')]
  assert train.where(1) == f'{path}, line 2'
  assert train.info.class_names == ('PAST', 'PRES')
  assert train.info.num_classes == 2
  assert train.info.vocab_size == len(VOCABULARY)
  for split in ('validation', 'dev'):
    source = builder.build_source(config(root), split)
    assert read(source) == [('w6', 'PAST')]
  test = builder.build_source(config(root), 'test')
  assert read(test) == [('w7', 'PRES'), ('w8 w9', 'PAST')]
  assert test.where(0) == f'{path}, line 5'
  both = builder.build_source(config(root), 'validation+test[:1]')
  assert len(both) == 2


TSV = ['idx\tsentence\tlabel', '0\tw1 w2\tSing', '3\tw3\tPlur']


@pytest.mark.parametrize('suffix', ['.tsv', '.tsv.gz'])
@pytest.mark.parametrize('folder', ['subj_number', '.'])
def test_files_with_named_columns(root, folder, suffix):
  write(root / folder / f'train{suffix}', TSV)
  path = write(root / folder / f'te{suffix}', [TSV[0], '7\tw4\tPlur'])
  given = config(root, 'subj_number')
  train = builder.build_source(given, 'train')
  assert read(train) == [('w1 w2', 'Sing'), ('w3', 'Plur')]
  test = builder.build_source(given, 'test')
  assert read(test) == [('w4', 'Plur')]
  assert test.where(0) == f'{path}, line 2'
  with pytest.raises(
    MissingDataError, match=r"'validation' of subj_number.*90"
  ):
    builder.build_source(given, 'validation')


def test_classes_are_those_of_the_whole_train_split(root):
  rows = [f'tr\t{n % 4 + 9}\tw{n}' for n in range(12)]
  write(root / 'own.txt', [*rows, 'te\t9\tw1', 'te\t11\tw2'])
  for split in ('train', 'train[:2]', 'test'):
    info = builder.build_source(config(root, 'own'), split).info
    # Sorted as text, as SentEval does.
    assert info.class_names == ('10', '11', '12', '9')
  source = builder.build_source(config(root, 'own', max_examples=1), 'train')
  assert source.info.num_classes == 4
  assert len(source) == 1
  test = builder.build_source(config(root, 'own'), 'test')
  labels = test.records(np.arange(2))['label']
  assert labels.tolist() == [3, 1]


def test_parts_are_apart_and_everything(root):
  rows = [f'tr\t{n % 2}\tw{n}' for n in range(20)]
  write(root / 'own.txt', rows)

  def words(split):
    return [
      word for word, _ in read(builder.build_source(config(root, 'own'), split))
    ]

  first, second = words('train[:90%]'), words('train[90%:]')
  assert len(first) == 18
  assert len(second) == 2
  assert sorted(first + second) == sorted(WORDS[:20])
  assert first != WORDS[:18]


def test_batches_are_those_of_texts(root):
  rows = [f'tr\t{n % 2}\t{" ".join(WORDS[: n + 1])}' for n in range(12)]
  write(root / 'own.txt', rows)
  data = builder.build(
    config(root, 'own', max_length=16, length_buckets=(8,)),
    split='train', train=False, seed=0, batch_size=4,
  )  # fmt: skip
  batches = list(data.batches())
  assert {batch['tokens'].shape for batch in batches} == {(4, 8), (4, 16)}
  keys = {'tokens', 'token_types', 'length', 'label', 'mask', 'index'}
  assert set(batches[0]) == keys
  lengths = np.sort(np.concatenate([batch['length'] for batch in batches]))
  assert lengths.tolist() == [n + 3 for n in range(12)]


BAD = {
  'wrong_columns': 'tr\tPRES',
  'empty_text': 'tr\tPRES\t \u00a0',
  'illegal_label': 'tr\t\tw1',
  'not_utf8': b'tr\tPRES\tw1 \xff',
  'unknown_split': 'xx\tFUT\tw1',
}


def test_bad_rows_are_counted_by_kind_with_their_lines(root):
  rows = [f'tr\t{"PAST" if n % 2 else "PRES"}\tw{n}' for n in range(20)]
  path = write(root / 'past_present.txt', [*rows, *BAD.values()])
  data = builder.build(
    config(root, max_bad_share=0.3),
    split='train', train=True, seed=0, batch_size=4,
  )  # fmt: skip
  assert list(data.bad_records) == list(BAD)
  for number, entry in enumerate(data.bad_records.values()):
    assert entry['count'] == 1
    assert entry['first'][0]['file'] == f'{path}, line {number + 21}'
  assert data.info.num_examples == 20
  assert data.info.class_names == ('PAST', 'PRES')
  with pytest.raises(TooManyBadRecordsError, match='of 25 records are bad'):
    builder.build(config(root), split='train', train=True, seed=0, batch_size=4)


@pytest.mark.parametrize('line', [b'\xff\xfe', b'\t\t', b'tr'])
def test_lines_that_are_none(root, line):
  write(root / 'past_present.txt', [*OFFICIAL, line])
  source = builder.build_source(config(root), 'train')
  assert len(source) == 3
  assert len(source.bad_rows) == 1
  assert len(builder.build_source(config(root), 'test')) == 2


def test_a_class_that_was_never_trained_is_no_row_to_evaluate(root):
  write(root / 'own.txt', ['tr\ta\tw1', 'tr\tb\tw2', 'te\tc\tw3', 'te\ta\tw4'])
  source = builder.build_source(config(root, 'own'), 'test')
  assert read(source) == [('w4', 'a')]
  assert [bad.kind for _, bad in source.bad_rows] == ['illegal_label']
  with pytest.raises(TooManyBadRecordsError, match="'c' is none of the train"):
    builder.build(
      config(root, 'own'), split='test', train=False, seed=0, batch_size=2
    )


@pytest.mark.parametrize(
  ('task', 'content', 'words'),
  [
    ('past_present', [], 'is empty'),
    ('past_present', ['te\tPRES\tw1'], r'at least 2 .* classes .* got 0'),
    ('own', ['tr\ta\tw1'], 'expected at least 2 .* got 1: a'),
    (
      'past_present',
      [*OFFICIAL, 'tr\tPRESS\tw1'],
      'at most 2 classes .*got 3: PAST, PRES, PRESS',
    ),
    ('own', ['tr\ta\t ', 'tr\tb\t '], 'none of its 2 rows can be used'),
  ],
)
def test_files_that_are_not_usable(root, task, content, words):
  write(root / f'{task}.txt', content)
  with pytest.raises(InvalidDataError, match=words):
    builder.build_source(config(root, task), 'train')


def test_a_split_that_the_file_lacks(root):
  write(root / 'past_present.txt', OFFICIAL[:3])
  with pytest.raises(InvalidDataError, match="'test' of past_present is empty"):
    builder.build_source(config(root), 'test')


@pytest.mark.parametrize(
  ('split', 'header', 'words'),
  [
    (
      'train',
      'sentence\tclass',
      'the columns sentence, label, got sentence, c',
    ),
    ('test', 'sentence\tclass', 'the columns sentence, label, got sentence, c'),
    ('train', 'text\tlabel', 'the columns sentence, got text, label'),
    ('train', b'\xffsentence\tlabel', 'line 1 is not UTF-8'),
  ],
)
def test_columns_that_are_not_there(root, split, header, words):
  write(root / 'own' / 'train.tsv', ['sentence\tlabel', 'w1\ta', 'w2\tb'])
  write(root / 'own' / f'{split}.tsv', [header, 'w1\ta', 'w2\tb'])
  with pytest.raises(InvalidDataError, match=words):
    builder.build_source(config(root, 'own'), split)


def test_missing_files_say_what_was_looked_for(root):
  with pytest.raises(MissingDataError) as error:
    builder.build_source(config(root), 'train')
  for name in ('past_present.txt', 'train.tsv', 'tr.tsv.gz', str(root)):
    assert name in str(error.value)


@pytest.mark.parametrize(
  ('changes', 'split', 'key'),
  [
    (dict(task=''), 'train', 'dataset.task'),
    (dict(task='../secret'), 'train', 'dataset.task'),
    (dict(task='a/b'), 'train', 'dataset.task'),
    (dict(directory=''), 'train', 'dataset.directory'),
    (dict(max_length=4), 'train', 'dataset.max_length'),
    ({}, 'trian', 'split'),
    ({}, 'train[:101%]', 'split'),
    ({}, 'validation_matched', 'split'),
  ],
)
def test_illegal_configurations(root, changes, split, key):
  with pytest.raises(ConfigError) as error:
    builder.validate(config(root) | changes, split)
  assert error.value.field == key


REAL = {  # rows of train and of test in the shared data, and classes
  'past_present': (9879, 7459, 2), 'subj_number': (9939, 7459, 2),
  'obj_number': (9903, 7474, 2), 'bigram_shift': (9944, 7476, 2),
  'coordination_inversion': (9850, 7405, 2), 'tree_depth': (5000, 3652, 5),
  'sentence_length': (4971, 3674, 6), 'word_content': (9911, 7443, 999),
}  # fmt: skip


# The default suite reads two of them, CI all.
QUICK = ('sentence_length', 'tree_depth')


@pytest.mark.parametrize(
  'task',
  [
    pytest.param(task, marks=() if task in QUICK else pytest.mark.slow)
    for task in REAL
  ],
)
def test_real_rows_are_all_good(shared_data, task):
  folder = shared_data / 'probing_xprobe_en'
  vocabulary = shared_data / 'vocab' / 'bert_base_uncased_vocab.txt'
  if not folder.is_dir() or not vocabulary.is_file():
    pytest.skip(f'no {folder} or no {vocabulary}')
  given = dict(
    name='probing', task=task, directory=str(folder), tokenizer=str(vocabulary)
  )
  rows, tests, classes = REAL[task]
  for split, expected in (('train', rows), ('test', tests)):
    source = builder.build_source(given, split)
    assert source.info.num_classes == classes <= probing.TASKS[task][0]
    # Of word_content one word is only tested; its rows are bad ones.
    unknown = (task, split) == ('word_content', 'test')
    assert bool(source.bad_rows) is unknown
    assert len(source) + len(source.bad_rows) == expected
