"""The bundled digits: a stratified, disjoint, fixed split."""

import numpy as np
import pytest
from sklearn import datasets

from dataset_lib import builder, digits


@pytest.fixture(scope='module')
def table():
  return datasets.load_digits()


def test_the_split_is_disjoint_complete_and_stratified(table):
  train = digits.stratified_rows(table.target, 'train')
  test = digits.stratified_rows(table.target, 'test')
  assert sorted([*train, *test]) == list(range(1797))
  for label in range(10):
    total = int(np.sum(table.target == label))
    in_test = int(np.sum(table.target[test] == label))
    assert in_test == round(total / 5)


def test_the_split_never_changes(table):
  rows = digits.stratified_rows(table.target, 'test')
  again = digits.stratified_rows(table.target, 'test')
  np.testing.assert_array_equal(rows, again)
  assert len(rows) == 359


@pytest.mark.parametrize('split', ['train', 'test'])
def test_records_are_the_table(table, split):
  source = builder.build_source(dict(name='digits'), split)
  rows = digits.stratified_rows(table.target, split)
  assert len(source) == len(rows)
  for index in (0, 1, len(rows) - 1):
    record = source.record(index)
    assert record['image'].shape == (8, 8, 3)
    assert record['image'].dtype == np.uint8
    expected = np.round(table.images[rows[index]] * 255 / 16)
    for channel in range(3):
      np.testing.assert_array_equal(record['image'][..., channel], expected)
    assert record['label'] == table.target[rows[index]]


def test_images_are_shown_whole_and_resized():
  config = dict(name='digits', image_size=16)
  data = builder.build(config, split='test', train=False, seed=0, batch_size=4)
  batch = next(data.batches())
  assert batch['image'].shape == (4, 16, 16, 3)
  small = builder.build_source(config, 'test').record(0)['image']
  expected = twice_as_large(twice_as_large(small.astype(float)).swapaxes(0, 1))
  np.testing.assert_allclose(
    batch['image'][0], expected.swapaxes(0, 1), atol=1.0
  )


def twice_as_large(rows):
  """Bilinear: each half of a row leans a quarter towards its neighbour."""
  before = np.concatenate([rows[:1], rows[:-1]])
  after = np.concatenate([rows[1:], rows[-1:]])
  halves = [0.75 * rows + 0.25 * before, 0.75 * rows + 0.25 * after]
  return np.stack(halves, axis=1).reshape(-1, *rows.shape[1:])
