"""Parity records against plain loops."""

import numpy as np
import pytest

from dataset_lib import builder, parity


def make(length=16, data_seed=0, split='train', **sizes):
  config = dict(name='parity', length=length, data_seed=data_seed, **sizes)
  return builder.build_source(config, split)


@pytest.mark.parametrize('length', [1, 2, 16, 65])
def test_labels_count_the_ones(length):
  records = make(length).records(np.arange(200))
  assert records['tokens'].shape == (200, length)
  assert records['tokens'].dtype == np.int32
  assert records['label'].dtype == np.int32
  for tokens, label in zip(records['tokens'], records['label'], strict=True):
    ones = 0
    for token in tokens:
      if (1, -1, 0)[token] == 1:
        ones += 1
    assert label == ones % 2


def splitmix64_loop(counter):
  """The published algorithm in Python integers."""
  mask = 2**64 - 1
  z = counter * 0x9E3779B97F4A7C15 & mask
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
  return z ^ (z >> 31)


def test_splitmix64_known_values():
  # The reference generator seeded with 0 begins with this number.
  assert splitmix64_loop(1) == 0xE220A8397B1DCDAF
  counters = np.array([1, 2, 12345, 2**64 - 1], np.uint64)
  expected = [splitmix64_loop(int(counter)) for counter in counters]
  assert parity.splitmix64(counters).tolist() == expected


def test_one_record_equals_its_row_in_a_batch():
  source = make()
  batch = source.records(np.array([7, 123456, 3]))
  for row, index in enumerate((7, 123456, 3)):
    record = source.record(index)
    np.testing.assert_array_equal(record['tokens'], batch['tokens'][row])
    assert record['label'] == batch['label'][row]


def test_a_record_does_not_depend_on_the_number_of_records():
  small = make(train_examples=10).records(np.arange(10))
  large = make(train_examples=10**6).records(np.arange(10))
  np.testing.assert_array_equal(small['tokens'], large['tokens'])


def test_symbols_are_uniform_and_independent():
  tokens = make(length=16).records(np.arange(20000))['tokens']
  counts = np.bincount(tokens.ravel(), minlength=3)
  expected = tokens.size / 3
  # 99.9 % quantiles of chi-square with 2 and 8 degrees of freedom.
  assert np.sum((counts - expected) ** 2 / expected) < 13.8
  pairs = np.bincount(tokens[:, 3] * 3 + tokens[:, 4], minlength=9)
  expected = len(tokens) / 9
  assert np.sum((pairs - expected) ** 2 / expected) < 26.1


def test_labels_are_balanced():
  labels = make().records(np.arange(20000))['label']
  assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(20000)


def test_splits_and_seeds_are_separate_streams():
  streams = [
    make(split='train'),
    make(split='test'),
    make(split='train', data_seed=1),
    make(split='test', data_seed=1),
  ]
  rows = {tuple(tokens) for stream in streams for tokens in make_rows(stream)}
  # 3 ** 16 sequences: 4 x 200 draws hardly ever meet.
  assert len(rows) >= 4 * 200 - 2


def make_rows(stream):
  return stream.records(np.arange(200))['tokens'].tolist()


def test_info():
  info = make(length=8, split='test').info
  assert info.input_shape == (8,)
  assert info.input_dtype == 'int32'
  assert info.num_classes == 2
  assert info.vocab_size == 3
  assert info.num_examples == 4096
