"""Files of texts and labels: the layouts of GLUE and of SentEval."""

import numpy as np
import pytest

from dataset_lib import builder
from dataset_lib.errors import (
  ConfigError,
  MissingDataError,
)
from tests.dataset_lib.word_rows import (
  SENTEVAL,
  VOCABULARY,
  config,
  probing,
  read,
  read_classes,
  write,
)

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


@pytest.mark.parametrize('end', ['\n', '\r\n'])
@pytest.mark.parametrize('name', ['past_present.txt', 'past_present.txt.gz'])
def test_a_file_of_senteval(root, name, end):
  path = write(root / name, ['\ufeff' + SENTEVAL[0], *SENTEVAL[1:]], end)
  train = builder.build_source(probing(root), 'train')
  assert read_classes(train) == [
    ('w1 w2', 'PRES'),
    ('w3 " w4', 'PAST'),
    ('w5', 'PRES'),
  ]
  assert train.where(1) == f'{path}, line 2'
  assert train.info.class_names == ('PAST', 'PRES')
  assert train.info.num_classes == 2
  assert train.info.vocab_size == len(VOCABULARY)
  for split in ('validation', 'dev'):
    source = builder.build_source(probing(root), split)
    assert read_classes(source) == [('w6', 'PAST')]
  test = builder.build_source(probing(root), 'test')
  assert read_classes(test) == [('w7', 'PRES'), ('w8 w9', 'PAST')]
  assert test.where(0) == f'{path}, line 5'
  both = builder.build_source(probing(root), 'validation+test[:1]')
  assert len(both) == 2


TSV = ['idx\tsentence\tlabel', '0\tw1 w2\tSing', '3\tw3\tPlur']


@pytest.mark.parametrize('suffix', ['.tsv', '.tsv.gz'])
@pytest.mark.parametrize('folder', ['subj_number', '.'])
def test_files_with_named_columns(root, folder, suffix):
  write(root / folder / f'train{suffix}', TSV)
  path = write(root / folder / f'te{suffix}', [TSV[0], '7\tw4\tPlur'])
  given = probing(root, 'subj_number')
  train = builder.build_source(given, 'train')
  assert read_classes(train) == [('w1 w2', 'Sing'), ('w3', 'Plur')]
  test = builder.build_source(given, 'test')
  assert read_classes(test) == [('w4', 'Plur')]
  assert test.where(0) == f'{path}, line 2'
  with pytest.raises(
    MissingDataError, match=r"'validation' of subj_number.*90"
  ):
    builder.build_source(given, 'validation')


def test_classes_are_those_of_the_whole_train_split(root):
  rows = [f'tr\t{n % 4 + 9}\tw{n}' for n in range(12)]
  write(root / 'own.txt', [*rows, 'te\t9\tw1', 'te\t11\tw2'])
  for split in ('train', 'train[:2]', 'test'):
    info = builder.build_source(probing(root, 'own'), split).info
    # Sorted as text, as SentEval does.
    assert info.class_names == ('10', '11', '12', '9')
  source = builder.build_source(probing(root, 'own', max_examples=1), 'train')
  assert source.info.num_classes == 4
  assert len(source) == 1
  test = builder.build_source(probing(root, 'own'), 'test')
  labels = test.records(np.arange(2))['label']
  assert labels.tolist() == [3, 1]


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
