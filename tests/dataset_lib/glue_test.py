"""GLUE and probing: labels, splits, subsets, buckets, the real files."""

import numpy as np
import pytest

from dataset_lib import builder, text_tasks
from dataset_lib.errors import ConfigError, InvalidDataError
from eval_lib import calibration, frontier, predictions
from tests.contexts import eval_context
from tests.dataset_lib.word_rows import config


def sst2(root, count=40, name='train.tsv'):
  (root / 'SST-2').mkdir(exist_ok=True)
  rows = [f'w{n % 30}\t{n % 2}\n' for n in range(count)]
  (root / 'SST-2' / name).write_text('sentence\tlabel\n' + ''.join(rows))


def test_class_names():
  names = {task: entry.class_names for task, entry in text_tasks.GLUE.items()}
  assert names['mnli'] == ('entailment', 'neutral', 'contradiction')
  assert names['rte'] == names['qnli'] == ('entailment', 'not_entailment')
  assert names['wnli'] == ('not_entailment', 'entailment')
  assert names['sst2'] == ('negative', 'positive')
  assert names['stsb'] == ()
  assert len(names) == 9


@pytest.mark.parametrize('count', [40, 41])
def test_parts_of_splits(root, count):
  sst2(root, count)

  def places(split):
    source = builder.build_source(config(root, 'sst2'), split)
    lines = [source.where(index) for index in range(len(source))]
    return [int(line.split('line ')[1]) - 2 for line in lines]

  whole = list(range(count))
  assert places('train') == whole
  mixed = [places(f'train[{n}:{n + 1}]')[0] for n in whole]
  assert sorted(mixed) == whole
  assert mixed not in (whole, whole[::-1])
  assert places('train[:7]') == sorted(mixed[:7])
  assert places('train[7:]') == sorted(mixed[7:])
  assert places('train[-3:]') == sorted(mixed[-3:])
  assert places('train[2:-2]') == sorted(mixed[2:-2])
  assert places('train[:95%]') == sorted(mixed[: 38 + count - 40])
  assert places('train[95%:]') == sorted(mixed[38 + count - 40 :])
  assert places('train[10%:20%]') == sorted(mixed[4:8])
  assert places('train[:2]+train[5:6]') == [*sorted(mixed[:2]), mixed[5]]
  with pytest.raises(InvalidDataError, match='is empty'):
    places('train[3:3]')


def test_parts_that_overlap_are_not_apart(root):
  sst2(root, 40)
  sst2(root, 40, 'dev.tsv')
  data = config(root, 'sst2')

  def part(split):
    return builder.build(data, split=split, train=False, seed=0, batch_size=8)

  half = part('train[:50%]')
  assert len(half.places()) == 20
  predictions.check_apart(half, part('train[50%:]'), 'train[50%:]')
  with pytest.raises(ConfigError, match=r'calibration_split: .* it shares 2'):
    predictions.check_apart(half, part('train[18:]'), 'train[18:]')

  def check(evaluator, trained, split, calibration_split, **fields):
    evaluator.Evaluator(
      context=eval_context(data, train_split=trained), dataset=data,
      split=split, calibration_split=calibration_split, **fields,
    )  # fmt: skip

  check(frontier, 'train[:90%]', 'train[:4]', 'train[90%:]')
  check(frontier, 'train', 'train[:4]', None)
  certify = calibration, 'train[:50%]', 'train[40%:60%]', 'train[60%:]'
  check(*certify, epsilon=0.0)
  for shared, field, arguments, fields in (
    (4, 'calibration_split', (frontier, 'train', 'train[:4]', 'train[90%:]'),
     {}),
    # Two names of one split.
    (3, 'calibration_split',
     (frontier, 'train+dev', 'train[:4]', 'validation[:3]'), {}),
    (4, 'split', certify, {'epsilon': 0.02}),
  ):  # fmt: skip
    words = f'trained on, it shares {shared}'
    with pytest.raises(ConfigError, match=words) as error:
      check(*arguments, **fields)
    assert error.value.field == field


def test_a_subset_is_fixed_and_nested(root):
  sst2(root, count=90)
  sst2(root, count=90, name='dev.tsv')

  def places(split='train', **others):
    source = builder.build_source(config(root, 'sst2', **others), split)
    return [source.where(index) for index in range(len(source))]

  few, more = places(max_examples=10), places(max_examples=40)
  assert (len(few), len(more)) == (10, 40)
  assert set(few) < set(more)
  assert few == places(max_examples=10)
  assert few != places()[:10]
  assert places(max_examples=1000) == places()
  # Evaluation sees all of its split.
  assert len(places('validation', max_examples=10)) == 90


@pytest.mark.parametrize('end', ['\n', '\r\n', '  \n\n', '\r\n\r\n'])
def test_blank_lines_at_the_end_are_no_rows(root, end):
  sst2(root, count=3, name='dev.tsv')
  with (root / 'SST-2' / 'dev.tsv').open('a', newline='') as file:
    file.write(end)
  data = builder.build(
    config(root, 'sst2'), split='dev', train=False, seed=0, batch_size=4
  )
  assert data.info.num_examples == 3


BUCKETS = 'dataset.length_buckets'
ILLEGAL = [
  *(
    ('glue', 'sst2', changes, 'train', key)
    for changes, key in [
      (dict(task='sst'), 'dataset.task'),
      (dict(tokenizer=''), 'dataset.tokenizer'),
      (dict(max_length=4), 'dataset.max_length'),
      *(
        (dict(length_buckets=given), BUCKETS)
        for given in ((64, 32), (32, 32), (2,), 32)
      ),
      (dict(max_examples=-1), 'dataset.max_examples'),
      (dict(max_bad_share=0.9), 'dataset.max_bad_share'),
      (dict(builder='../x'), 'dataset.builder'),
    ]
  ),
  *(
    ('glue', 'sst2', {}, split, 'split')
    for split in (
      'trian', 'train[:', 'train[:101%]', 'train_matched', '', 'a+train', 'x/y'
    )
  ),
  *(
    ('probing', 'past_present', dict(task=task), 'train', 'dataset.task')
    for task in ('', '../secret', 'a/b')
  ),
  ('probing', 'own', dict(directory=''), 'train', 'dataset.directory'),
  ('probing', 'own', dict(max_length=4), 'train', 'dataset.max_length'),
  *(
    ('probing', 'own', {}, split, 'split')
    for split in ('trian', 'train[:101%]', 'validation_matched')
  ),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'task', 'changes', 'split', 'key'), ILLEGAL)
def test_illegal_configurations(root, name, task, changes, split, key):
  with pytest.raises(ConfigError) as error:
    builder.validate(config(root, task, name=name) | changes, split)
  assert error.value.field == key


@pytest.mark.parametrize(
  ('sizes', 'max_length', 'expected'),
  [
    ((32, 64, 128), 128, (32, 64, 128)),
    ((32, 64, 128), 100, (32, 64, 100)),
    ((32, 64, 128), 256, (32, 64, 128, 256)),
    ((), 64, (64,)),
  ],
)
def test_max_length_is_the_last_bucket(root, sizes, max_length, expected):
  sst2(root)
  given = config(root, 'sst2', length_buckets=sizes, max_length=max_length)
  info = builder.build_source(given, 'train').info
  assert info.length_buckets == expected
  assert info.input_shape == (max_length,)


REAL = {  # rows of train and of validation in the shared data
  'cola': (8551, 782), 'sst2': (67349, 654), 'mrpc': (3668, 306),
  'stsb': (5749, 1125), 'mnli': (22560, 7361), 'rte': (2490, 208),
  'wnli': (635, 53), 'qqp': (9997, 7500), 'qnli': (0, 4097),
}  # fmt: skip


def real_config(shared_data, task):
  folder = shared_data / ('qqp_part' if task == 'qqp' else 'glue')
  vocabulary = shared_data / 'vocab' / 'bert_base_uncased_vocab.txt'
  if not folder.is_dir() or not vocabulary.is_file():
    pytest.skip(f'no {folder} or no {vocabulary}')
  return dict(
    name='glue', task=task, directory=str(folder), tokenizer=str(vocabulary)
  )


@pytest.mark.slow
@pytest.mark.parametrize('task', REAL)
def test_real_validation_rows_are_all_good(shared_data, task):
  given = real_config(shared_data, task)
  data = builder.build(
    given, split='validation', train=False, seed=0, batch_size=64
  )
  batches = list(data.batches())
  rows = sum(int(batch['mask'].sum()) for batch in batches)
  assert rows == data.info.num_examples == REAL[task][1]
  for batch in batches:
    # Every row begins with [CLS] and ends with [SEP].
    real = batch['mask'] > 0
    assert set(batch['tokens'][real, 0]) == {101}
    ends = batch['length'][real] - 1
    assert set(batch['tokens'][np.flatnonzero(real), ends]) == {102}


@pytest.mark.nightly
@pytest.mark.parametrize('task', [task for task in REAL if REAL[task][0]])
def test_real_training_rows_are_all_good(shared_data, task):
  source = builder.build_source(real_config(shared_data, task), 'train')
  assert len(source) == REAL[task][0]
  assert source.bad_rows == ()


PROBING = {  # rows of train and of test in the shared data, and classes
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
    for task in PROBING
  ],
)
def test_real_probing_rows_are_all_good(shared_data, task):
  folder = shared_data / 'probing_xprobe_en'
  vocabulary = shared_data / 'vocab' / 'bert_base_uncased_vocab.txt'
  if not folder.is_dir() or not vocabulary.is_file():
    pytest.skip(f'no {folder} or no {vocabulary}')
  given = dict(
    name='probing', task=task, directory=str(folder), tokenizer=str(vocabulary)
  )
  rows, tests, classes = PROBING[task]
  for split, expected in (('train', rows), ('test', tests)):
    source = builder.build_source(given, split)
    assert source.info.num_classes == classes <= text_tasks.PROBING[task][0]
    # Of word_content one word is only tested; its rows are bad ones.
    unknown = (task, split) == ('word_content', 'test')
    assert bool(source.bad_rows) is unknown
    assert len(source) + len(source.bad_rows) == expected
