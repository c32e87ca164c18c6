"""Computed data sets: functions of (split, index) that a model can learn."""

import numpy as np
import pytest
from sklearn import datasets

from dataset_lib import builder, synthetic
from tests import fakes

CONFIGS = {
  'parity': dict(name='parity', length=16),
  'images': dict(name='tests.fakes:FakeImages', image_size=8, num_classes=3),
  'text': dict(
    name='tests.fakes:FakeText', max_length=24, length_buckets=(8, 16)
  ),
}


def make(kind, split='train', **fields):
  return builder.build_source(CONFIGS[kind] | fields, split)


@pytest.mark.parametrize(
  ('kind', 'key', 'classes'),
  [
    ('parity', 'tokens', ('even', 'odd')),
    ('images', 'image', ('fake_0', 'fake_1', 'fake_2')),
    ('text', 'tokens', ('fake_0', 'fake_1')),
  ],
)
def test_records_are_a_function_of_split_and_index(kind, key, classes):
  first, again, other = (make(kind, s) for s in ('train', 'train', 'test'))
  assert first.info.class_names == classes
  values = [given.record(7)[key].tolist() for given in (first, again, other)]
  assert values[0] == values[1] != values[2]
  assert values[0] != first.record(8)[key].tolist()
  if kind == 'parity':
    assert values[0] != make(kind, data_seed=1).record(7)[key].tolist()
  assert first.record(7)['label'] == again.record(7)['label']
  few = make(kind, train_examples=100)
  if kind != 'text':  # its rows are drawn together
    assert few.record(7)[key].tolist() == values[0]


@pytest.mark.parametrize('length', [1, 2, 16, 65])
def test_labels_of_parity_count_the_ones(length):
  source = make('parity', length=length)
  assert source.info.input_shape == (length,)
  records = source.records(np.arange(200))
  assert records['tokens'].shape == (200, length)
  assert records['tokens'].dtype == records['label'].dtype == np.int32
  for row, tokens in enumerate(records['tokens']):
    ones = sum((1, -1, 0)[token] == 1 for token in tokens)
    assert records['label'][row] == ones % 2
    assert source.record(row)['tokens'].tolist() == tokens.tolist()


def test_fake_classes_differ_in_colour_by_more_than_the_noise():
  source = make('images')
  images = [source.record(index)['image'] for index in range(30)]
  assert {(image.shape, image.dtype.name) for image in images} == {
    ((8, 8, 3), 'uint8')
  }
  colours = np.array([image.mean(axis=(0, 1)) for image in images])
  labels = np.arange(30) % 3
  means = np.stack([colours[labels == label].mean(0) for label in range(3)])
  nearest = np.argmin(((colours[:, None] - means) ** 2).sum(-1), axis=1)
  assert np.mean(nearest == labels) > 0.95


def test_fake_rows_look_like_rows_of_a_tokenizer():
  source = make('text')
  info = source.info
  assert (info.length_buckets, info.input_shape) == ((8, 16, 24), (24,))
  assert (source.lengths.min(), source.lengths.max()) == (4, 24)
  assert source.where(3) == 'fake_text/train'
  for index in range(50):
    record = source.record(index)
    tokens, types = record['tokens'], record['token_types'].tolist()
    assert (tokens[0], tokens[-1]) == (fakes.CLS, fakes.SEP)
    assert tokens[1:-1].min() >= fakes.FIRST_TOKEN
    assert tokens.max() < info.vocab_size
    assert types == sorted(types)
    assert set(types) == {0, 1}


@pytest.mark.parametrize('classes', [2, 3])
def test_the_part_of_the_vocabulary_tells_the_class(classes):
  source = make('text', num_classes=classes)
  part = (source.info.vocab_size - fakes.FIRST_TOKEN) // classes
  correct = []
  for index in range(300):
    record = source.record(index)
    tokens = record['tokens'][1:-1] - fakes.FIRST_TOKEN
    counts = np.bincount(tokens // part, minlength=classes)[:classes]
    correct.append(counts.argmax() == record['label'])
  assert np.mean(correct) > 0.7


def test_a_fake_regression_has_scores():
  source = make('text', num_classes=1)
  info = source.info
  assert (info.num_classes, info.label_dtype) == (1, 'float32')
  assert info.class_names == ()
  labels = source.records(np.arange(500))['label']
  assert labels.dtype == np.float32
  assert 0.0 <= labels.min() < 0.5 < 4.5 < labels.max() <= 5.0
  middle = (info.vocab_size - fakes.FIRST_TOKEN) // 2
  upper = [
    np.mean(source.record(i)['tokens'][1:-1] - fakes.FIRST_TOKEN >= middle)
    for i in range(500)
  ]
  assert np.corrcoef(upper, labels)[0, 1] > 0.5


def test_the_split_of_the_digits_is_disjoint_complete_and_stratified():
  target = datasets.load_digits().target
  train, test = (
    synthetic.stratified_rows(target, s) for s in ('train', 'test')
  )
  assert sorted([*train, *test]) == list(range(1797))
  assert len(test) == 359
  for label in range(10):
    total = int(np.sum(target == label))
    assert int(np.sum(target[test] == label)) == round(total / 5)


@pytest.mark.parametrize('split', ['train', 'test'])
def test_digits_are_the_table(split):
  table = datasets.load_digits()
  source = builder.build_source(dict(name='digits'), split)
  rows = synthetic.stratified_rows(table.target, split)
  assert len(source) == len(rows)
  for index in (0, 1, len(rows) - 1):
    record = source.record(index)
    expected = np.round(table.images[rows[index]] * 255 / 16)
    expected = np.repeat(expected[..., None], 3, axis=2).astype(np.uint8)
    np.testing.assert_array_equal(record['image'], expected, strict=True)
    assert record['label'] == table.target[rows[index]]
