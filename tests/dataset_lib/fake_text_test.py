"""Fake rows of tokens are seeded, learnable and say that they are fake."""

import numpy as np
import pytest

from dataset_lib import builder, fake_text

CONFIG = dict(name='fake_text', max_length=24, length_buckets=(8, 16))


def tokens_of(source, index):
  return source.record(index)['tokens']


def test_records_are_a_function_of_split_and_index():
  first, again, other = (
    builder.build_source(CONFIG, split) for split in ('train', 'train', 'test')
  )
  np.testing.assert_array_equal(tokens_of(first, 7), tokens_of(again, 7))
  assert tokens_of(first, 7).tolist() != tokens_of(other, 7).tolist()


def test_rows_look_like_rows_of_a_tokenizer():
  source = builder.build_source(CONFIG, 'train')
  info = source.info
  assert info.length_buckets == (8, 16, 24)
  assert info.input_shape == (24,)
  assert source.lengths.min() == fake_text.MIN_LENGTH
  assert source.lengths.max() == 24
  for index in range(50):
    tokens = tokens_of(source, index)
    assert (tokens[0], tokens[-1]) == (fake_text.CLS, fake_text.SEP)
    assert tokens[1:-1].min() >= fake_text.FIRST_TOKEN
    assert tokens.max() < info.vocab_size
    types = source.record(index)['token_types'].tolist()
    assert types == sorted(types)
    assert set(types) == {0, 1}


def test_the_names_say_fake():
  source = builder.build_source(CONFIG, 'train')
  assert source.info.class_names == ('fake_0', 'fake_1')
  assert source.where(3) == 'fake_text/train'


@pytest.mark.parametrize('classes', [2, 3])
def test_the_part_of_the_vocabulary_tells_the_class(classes):
  config = CONFIG | dict(num_classes=classes)
  source = builder.build_source(config, 'train')
  part = (source.info.vocab_size - fake_text.FIRST_TOKEN) // classes
  correct = []
  for index in range(300):
    tokens = tokens_of(source, index)[1:-1] - fake_text.FIRST_TOKEN
    counts = np.bincount(tokens // part, minlength=classes)[:classes]
    correct.append(counts.argmax() == source.record(index)['label'])
  assert np.mean(correct) > 0.7


def test_a_regression_has_scores():
  source = builder.build_source(CONFIG | dict(num_classes=1), 'train')
  info = source.info
  assert (info.num_classes, info.label_dtype) == (1, 'float32')
  assert info.class_names == ()
  batch = source.records(np.arange(500))
  assert batch['label'].dtype == np.float32
  assert 0.0 <= batch['label'].min() < 0.5 < 4.5 < batch['label'].max() <= 5.0
  middle = (info.vocab_size - fake_text.FIRST_TOKEN) // 2
  upper = [
    np.mean(tokens_of(source, index)[1:-1] - fake_text.FIRST_TOKEN >= middle)
    for index in range(500)
  ]
  assert np.corrcoef(upper, batch['label'])[0, 1] > 0.5
