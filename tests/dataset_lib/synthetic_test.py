"""Data sets without files: functions of (split, index), which can be learnt."""

import string

import numpy as np
import pytest
from sklearn import datasets

from dataset_lib import builder, synthetic

CONFIGS = {
  'parity': dict(name='parity', length=16),
  'letters': dict(name='parity', length=16, letters=26),
}


def make(kind, split='train', **fields):
  return builder.build_source(CONFIGS[kind] | fields, split)


@pytest.mark.parametrize('kind', CONFIGS)
def test_records_are_a_function_of_split_and_index(kind):
  def row(split='train', index=7, **fields):
    return make(kind, split, **fields).record(index)['tokens'].tolist()

  assert row() == row() == row(train_examples=100)
  assert row() not in (row('test'), row(index=8), row(data_seed=1))
  assert make(kind).info.class_names == ('even', 'odd')


@pytest.mark.parametrize(
  ('length', 'letters'),
  [
    (1, 0), (2, 0), (16, 0), (65, 0), (16, 26), (16, 15), (1, 1), (2, 1),
    (53, 52),
  ],
)  # fmt: skip
def test_labels_count_the_ones_and_letters_hide_them(length, letters):
  source = make('parity', length=length, letters=letters)
  assert source.info.input_shape == (length,)
  assert source.info.vocab_size == 3 + letters
  records = source.records(np.arange(300))
  assert {str(values.dtype) for values in records.values()} == {'int32'}
  assert records['tokens'].shape == (300, length)
  for row, tokens in enumerate(records['tokens']):
    names = [synthetic.NAMES[token] for token in tokens]
    assert records['label'][row] == names.count('1') % 2
    hidden = [name for name in names if name != '1']
    if letters:
      assert records['difficulty'][row] == length - len(hidden) >= 1
      assert len(set(hidden)) == len(hidden)
    legal = string.ascii_letters[:letters] if letters else ('-1', '0')
    assert all(name in legal for name in hidden)


def test_places_letters_and_difficulties_are_uniform():
  count = 20_000
  records = make('letters').records(np.arange(count))
  tokens, difficulty = records['tokens'], records['difficulty']

  def assert_uniform(counts, share):
    # Five standard deviations of a binomial count.
    spread = 5 * np.sqrt(count * share * (1 - share))
    np.testing.assert_allclose(counts, count * share, atol=spread)

  assert_uniform(np.bincount(difficulty)[1:], 1 / 16)
  assert_uniform(np.bincount(records['label']), 1 / 2)
  # 8.5 of 16 places hold 1 in the mean.
  assert_uniform((tokens == 0).sum(0), 8.5 / 16)
  assert not np.isin(tokens, (1, 2)).any()
  # 7.5 of 26 letters are in a row in the mean.
  present = [(tokens == letter).sum() for letter in range(3, 29)]
  assert_uniform(present, 7.5 / 26)


@pytest.mark.parametrize('split', ['train', 'test'])
def test_digits_are_a_stratified_part_of_the_table(split):
  table = datasets.load_digits()
  source = builder.build_source(dict(name='digits'), split)
  rows, others = (
    synthetic.stratified_rows(table.target, name)
    for name in (split, 'train' if split == 'test' else 'test')
  )
  assert sorted([*rows, *others]) == list(range(1797))
  assert len(source) == len(rows) == {'train': 1438, 'test': 359}[split]
  share = {'train': 0.8, 'test': 0.2}[split]
  counts = np.bincount(table.target[rows]) - np.bincount(table.target) * share
  assert np.abs(counts).max() <= 0.5
  for index in (0, 1, len(rows) - 1):
    record = source.record(index)
    expected = np.round(table.images[rows[index]] * 255 / 16)
    expected = np.repeat(expected[..., None], 3, axis=2).astype(np.uint8)
    np.testing.assert_array_equal(record['image'], expected, strict=True)
    assert record['label'] == table.target[rows[index]]
    assert source.where(index) == f'sklearn digits, row {rows[index]}'
