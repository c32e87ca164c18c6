"""GLUE and probing: labels, parts of splits, buckets, the real files."""

import contextlib

import numpy as np
import pytest

from core.errors import ConfigError
from dataset_lib import text_tasks
from eval_lib import frontier
from tests.contexts import eval_context
from tests.dataset_lib.word_rows import config, opened, write


@pytest.fixture
def sst2(root):
  """A configuration of 90 rows of train and of dev."""
  rows = ['sentence\tlabel', *(f'w{n % 30}\t{n % 2}' for n in range(90))]
  for name in ('train', 'dev'):
    write(root / 'SST-2' / f'{name}.tsv', rows)
  return config(root, 'sst2')


def rows_of(given, split='train', **fields):
  source = opened(given | fields, split)
  lines = [source.where(index) for index in range(len(source))]
  return [int(line.split('line ')[1]) - 2 for line in lines]


def test_class_names():
  # Those of the others are read by name in text_rows_test.
  assert text_tasks.GLUE['wnli'].class_names == ('not_entailment', 'entailment')
  assert text_tasks.GLUE['sst2'].class_names == ('negative', 'positive')
  assert len(text_tasks.GLUE) == 9


def test_parts_are_of_one_fixed_order(sst2):
  mixed = [rows_of(sst2, f'train[{n}:{n + 1}]')[0] for n in range(90)]
  assert sorted(mixed) == rows_of(sst2) == [*range(90)]
  assert mixed not in ([*range(90)], [*range(90)][::-1])
  # 9 and 85.5 rows.
  assert rows_of(sst2, 'train[10%:95%]') == sorted(mixed[9:86])


def test_a_subset_is_fixed_and_nested(sst2):
  few, more = (rows_of(sst2, max_examples=count) for count in (10, 40))
  assert (len(few), len(more)) == (10, 40)
  assert set(few) < set(more)
  assert few == rows_of(sst2, max_examples=10) != list(range(10))
  assert rows_of(sst2, max_examples=1000) == rows_of(sst2)
  # Evaluation sees all of its split.
  assert len(rows_of(sst2, 'validation', max_examples=10)) == 90


def test_parts_that_overlap_are_not_apart(sst2):
  for shared, trained, split, other in (
    (0, '', 'train[:50%]', 'train[50%:]'), (0, 'train', 'train[:4]', None),
    (0, 'train[:90%]', 'train[:4]', 'train[90%:]'),
    (9, 'train', 'train[:4]', 'train[90%:]'),
    (2, '', 'train[:50%]', 'train[43:]'),
    (3, 'train+dev', 'train[:4]', 'validation[:3]'),  # two names of one split
  ):  # fmt: skip
    words = f'calibration_split: .* it shares {shared}'
    refused = pytest.raises(ConfigError, match=words)
    with refused if shared else contextlib.nullcontext():
      frontier.Evaluator(
        context=eval_context(sst2, train_split=trained), dataset=sst2,
        split=split, calibration_split=other,
      )  # fmt: skip


def test_max_length_is_the_last_bucket(sst2):
  for sizes, expected in (
    ((32, 64, 128), (32, 64, 128)),
    ((32, 64, 128), (32, 64, 100)),
    ((32, 64, 128), (32, 64, 128, 256)),
    ((), (64,)),
  ):
    fields = dict(length_buckets=sizes, max_length=expected[-1])
    info = opened(sst2 | fields).info
    assert info.length_buckets == expected
    assert info.input_shape == expected[-1:]


def real(shared_data, folder, task, name='glue'):
  words = shared_data('vocab', 'bert_base_uncased_vocab.txt')
  places = dict(directory=str(shared_data(folder)), tokenizer=str(words))
  return dict(name=name, task=task, **places)


TRAIN = {  # rows in the shared data
  'cola': 8551, 'sst2': 67349, 'mrpc': 3668, 'stsb': 5749, 'mnli': 22560,
  'rte': 2490, 'wnli': 635, 'qqp': 9997,
}  # fmt: skip
VALIDATION = {
  'cola': 782, 'sst2': 654, 'mrpc': 306, 'stsb': 1125, 'mnli': 7361,
  'rte': 208, 'wnli': 53, 'qqp': 7500, 'qnli': 4097,
}  # fmt: skip


@pytest.mark.parametrize(
  ('split', 'counts'),
  [
    pytest.param('train', TRAIN, marks=pytest.mark.nightly),
    pytest.param('validation', VALIDATION, marks=pytest.mark.slow),
  ],
)
def test_real_rows_are_all_good(shared_data, split, counts):
  for task, count in counts.items():
    folder = 'qqp_part' if task == 'qqp' else 'glue'
    source = opened(real(shared_data, folder, task), split)
    assert (len(source), source.bad_rows) == (count, ()), task
    # Every row begins with [CLS] and ends with [SEP].
    batch = source.records(np.arange(count))
    assert set(batch['tokens'][:, 0]) == {101}
    assert set(batch['tokens'][np.arange(count), batch['length'] - 1]) == {102}


PROBING = {  # rows of train and of test in the shared data, and classes
  'past_present': (9879, 7459, 2), 'subj_number': (9939, 7459, 2),
  'obj_number': (9903, 7474, 2), 'bigram_shift': (9944, 7476, 2),
  'coordination_inversion': (9850, 7405, 2), 'tree_depth': (5000, 3652, 5),
  'sentence_length': (4971, 3674, 6), 'word_content': (9911, 7443, 999),
}  # fmt: skip
# The suite that reads a task; all others are read at night.
SUITES = {'sentence_length': (), 'word_content': pytest.mark.slow}


@pytest.mark.parametrize(
  'task',
  [
    pytest.param(task, marks=SUITES.get(task, pytest.mark.nightly))
    for task in PROBING
  ],
)
def test_real_probing_rows_are_all_good(shared_data, task):
  given = real(shared_data, 'probing_xprobe_en', task, 'probing')
  rows, tests, classes = PROBING[task]
  for split, expected in (('train', rows), ('test', tests)):
    source = opened(given, split)
    assert source.info.num_classes == classes <= text_tasks.PROBING[task][0]
    # Of word_content one word is only tested; its rows are bad ones.
    unknown = (task, split) == ('word_content', 'test')
    assert bool(source.bad_rows) is unknown
    assert len(source) + len(source.bad_rows) == expected
