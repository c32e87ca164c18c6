"""GLUE: labels, splits, subsets, length buckets, the real files."""

import numpy as np
import pytest

from dataset_lib import builder, glue
from dataset_lib.errors import ConfigError, InvalidDataError
from eval_lib import calibration, frontier, predictions
from tests.contexts import eval_context
from tests.dataset_lib.word_rows import config


def sst2(root, count=40, name='train.tsv'):
  (root / 'SST-2').mkdir(exist_ok=True)
  rows = [f'w{n % 30}\t{n % 2}\n' for n in range(count)]
  (root / 'SST-2' / name).write_text('sentence\tlabel\n' + ''.join(rows))


def test_class_names():
  names = {task: entry.class_names for task, entry in glue.TASKS.items()}
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

  def part(split):
    return builder.build(
      config(root, 'sst2'), split=split, train=False, seed=0, batch_size=8
    )

  half = part('train[:50%]')
  assert len(half.places()) == 20
  predictions.check_apart(half, part('train[50%:]'), 'train[50%:]')
  with pytest.raises(ConfigError, match=r'calibration_split: .* it shares 2'):
    predictions.check_apart(half, part('train[18:]'), 'train[18:]')


def test_rows_of_the_training_are_not_held_out(root):
  sst2(root, 40)
  sst2(root, 40, 'dev.tsv')
  data = config(root, 'sst2')

  def build(train_split, calibration_split):
    return frontier.Evaluator(
      context=eval_context(data, train_split=train_split),
      dataset=data,
      split='train[:4]',
      calibration_split=calibration_split,
    )

  build('train[:90%]', 'train[90%:]')
  with pytest.raises(ConfigError, match='not trained on, it shares 4') as error:
    build('train', 'train[90%:]')
  assert error.value.field == 'calibration_split'
  build('train', None)
  # Two names of one split.
  with pytest.raises(ConfigError, match='not trained on, it shares 3'):
    build('train+dev', 'validation[:3]')


def test_rows_that_certify_are_not_trained_on(root):
  sst2(root, 40)
  data = config(root, 'sst2')
  fields = dict(
    context=eval_context(data, train_split='train[:50%]'), dataset=data,
    split='train[40%:60%]', calibration_split='train[60%:]', epsilon=0.02,
  )  # fmt: skip
  with pytest.raises(ConfigError, match='not trained on, it shares 4') as error:
    calibration.Evaluator(**fields)
  assert error.value.field == 'split'
  calibration.Evaluator(**fields | {'epsilon': 0.0})


@pytest.mark.parametrize(
  'split',
  ['trian', 'train[:', 'train[:101%]', 'train_matched', '', 'a+train', 'x/y'],
)
def test_illegal_splits(root, split):
  with pytest.raises(ConfigError) as error:
    builder.validate(config(root, 'sst2'), split)
  assert error.value.field == 'split'


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


def test_a_split_without_labels_is_refused(root):
  (root / 'test.tsv').write_text('index\tsentence\n0\tw1\n')
  with pytest.raises(ConfigError, match='a split with labels') as error:
    builder.build_source(config(root, 'cola'), 'test')
  assert error.value.field == 'split'
  wanted = 'test.tsv: expected a column label or is_acceptable, got index, sent'
  assert wanted in str(error.value)


def test_a_file_without_its_label_column_says_what_it_has(root):
  (root / 'train.tsv').write_text('index\tsentence\n0\tw1\n')
  with pytest.raises(InvalidDataError) as error:
    builder.build_source(config(root, 'sst2'), 'train')
  assert str(error.value) == (
    f'{root}/train.tsv: expected the columns label, got index, sentence'
  )


@pytest.mark.parametrize('end', ['\n', '\r\n', '  \n\n', '\r\n\r\n'])
def test_blank_lines_at_the_end_are_no_rows(root, end):
  sst2(root, count=3, name='dev.tsv')
  with (root / 'SST-2' / 'dev.tsv').open('a', newline='') as file:
    file.write(end)
  data = builder.build(
    config(root, 'sst2'), split='dev', train=False, seed=0, batch_size=4
  )
  assert data.info.num_examples == 3


@pytest.mark.parametrize(
  ('changes', 'key'),
  [
    (dict(task='sst'), 'dataset.task'),
    (dict(tokenizer=''), 'dataset.tokenizer'),
    (dict(max_length=4), 'dataset.max_length'),
    (dict(length_buckets=(64, 32)), 'dataset.length_buckets'),
    (dict(length_buckets=(32, 32)), 'dataset.length_buckets'),
    (dict(length_buckets=(2,)), 'dataset.length_buckets'),
    (dict(length_buckets=32), 'dataset.length_buckets'),
    (dict(max_examples=-1), 'dataset.max_examples'),
    (dict(max_bad_share=0.9), 'dataset.max_bad_share'),
    (dict(builder='../x'), 'dataset.builder'),
  ],
)
def test_illegal_configurations(root, changes, key):
  with pytest.raises(ConfigError) as error:
    builder.validate(config(root, 'sst2') | changes)
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
