"""Rows of a split at even distances: all lengths, all documents."""

import numpy as np
import pytest

from albert_act import analysis_rows
from dataset_lib import builder
from tests.dataset_lib import corpora


@pytest.mark.parametrize(
  ('rows', 'count', 'expected'),
  [
    (10, 5, [0, 2, 4, 6, 8]),
    (7, 3, [0, 2, 4]),
    (3, 8, [0, 1, 2]),
    (5, 5, [0, 1, 2, 3, 4]),
    (5, 0, []),
    (0, 4, []),
  ],
)
def test_even_distances(rows, count, expected):
  np.testing.assert_array_equal(analysis_rows.spread(rows, count), expected)


def test_no_row_twice():
  for count in range(1, 100):
    chosen = analysis_rows.spread(99, count)
    assert len(set(chosen.tolist())) == count
    assert 0 <= chosen.min() <= chosen.max() < 99


def classification(tmp_path, count):
  """A GLUE source whose row n has 1 + n tokens besides [CLS] and [SEP]."""
  rows = [f'{" ".join(["w1"] * (count - n))}\t{n % 2}' for n in range(count)]
  (tmp_path / 'dev.tsv').write_text('\n'.join(['sentence\tlabel', *rows]))
  return builder.build_source(
    dict(name='glue', task='sst2', directory=str(tmp_path), max_length=32,
         tokenizer=str(corpora.tokenizer(tmp_path / 'words')),
         length_buckets=(8, 16)),
    'validation',
  )  # fmt: skip


def test_rows_of_all_lengths_each_batch_with_those_of_a_length(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(analysis_rows, 'BATCH', 4)
  source = classification(tmp_path, 22)
  batches = list(analysis_rows.batches(source, 0, 11))
  assert [batch['tokens'].shape for batch in batches] == [
    (4, 16), (4, 32), (4, 32)
  ]  # fmt: skip
  mask = np.concatenate([batch['mask'] for batch in batches])
  np.testing.assert_array_equal(mask, [1] * 11 + [0])
  lengths = np.concatenate([batch['length'] for batch in batches])[:11]
  np.testing.assert_array_equal(lengths, np.arange(4, 26, 2))
  index = np.concatenate([batch['index'] for batch in batches])[:11]
  np.testing.assert_array_equal(np.sort(index), np.arange(0, 22, 2))


def test_rows_of_pretraining_are_those_of_evaluation(tmp_path):
  directory, _ = corpora.prepare(tmp_path, corpora.documents(20))
  config = corpora.pretraining_config(directory)
  data = builder.build(
    config, split='train', train=False, seed=3, batch_size=500, num_threads=0
  )
  (whole,) = data.batches()
  source = builder.build_source(config, 'train')
  (batch,) = analysis_rows.batches(source, 3, 5)
  assert set(batch) == set(whole)
  for name, values in batch.items():
    np.testing.assert_array_equal(values, whole[name][batch['index']])
  assert len(batch['mask']) == 5
