"""Pretraining: rows and what they depend on, batches, configurations."""

import shutil

import numpy as np
import pytest

from core.errors import ConfigError, InvalidDataError
from dataset_lib import pretraining, tokenizer
from tests.dataset_lib import batches, corpora
from tests.dataset_lib.corpora import PRETRAINING_KEYS as KEYS
from tests.dataset_lib.corpora import draw, pretraining_source

PAD, CLS, SEP = 0, 2, 3
LENGTH = 32


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  root = tmp_path_factory.mktemp('pretraining')
  return corpora.prepare(root, corpora.documents(80, seed=7))[0]


def unmasked(batch):
  tokens = batch['tokens'].copy()
  row, slot = np.nonzero(batch['mlm_weights'])
  places = batch['mlm_positions'][row, slot]
  tokens[row, places] = batch['mlm_labels'][row, slot]
  return tokens


def segments_of(batch):
  """Per row its two segments as lists, in the order of the document."""
  for row, tokens in enumerate(unmasked(batch)):
    length = batch['length'][row]
    assert tokens[0] == CLS
    assert (tokens[length:] == PAD).all()
    middle, end = np.flatnonzero(tokens == SEP)
    assert end == length - 1
    types = np.zeros(LENGTH, int)
    types[middle + 1 : length] = 1
    np.testing.assert_array_equal(batch['token_types'][row], types)
    parts = tokens[1:middle].tolist(), tokens[middle + 1 : end].tolist()
    assert all(parts)
    yield parts[::-1] if batch['label'][row] else parts


def test_arrays_and_places(directory):
  given = pretraining_source(directory)
  batch = draw(given, indices=[5, 3, 3])
  assert set(batch) == KEYS
  assert batch['mlm_labels'].shape == (3, 7)  # ceil(0.2 * 32)
  assert (given.info.num_classes, given.info.vocab_size) == (
    2, len(corpora.VOCABULARY)
  )  # fmt: skip
  assert given.where(3).endswith('split train, row 3')
  assert draw(given, indices=[])['tokens'].shape == (0, LENGTH)


def test_undone_the_segments_are_the_document(directory):
  given = pretraining_source(directory, short_share=0.0)
  borders = set(np.flatnonzero(given._rows.sentences))
  starts = given._rows.rows.tolist()
  taken: list[set[int]] = [set() for _ in range(len(given))]
  for epoch in range(25):
    parts = list(segments_of(draw(given, epoch)))
    for index, (first, second) in enumerate(parts):
      taken[index].add(starts[index] + len(first))
      assert first + second == given.record(index)['tokens'].tolist()
  # The rows of a document, concatenated, are the document.
  joined = np.concatenate([first + second for first, second in parts])
  np.testing.assert_array_equal(joined, given._rows.tokens)
  # Segments meet at the ends of sentences; where there are several, at all.
  several = complete = 0
  for index, places in enumerate(taken):
    start, stop = starts[index : index + 2]
    inside = {place for place in borders if start < place < stop}
    assert not inside or places <= inside
    several += len(inside) > 1
    complete += len(inside) > 1 and places == inside
  assert several > 20
  assert complete > 0.95 * several


def test_whole_words_are_masked(directory):
  given = pretraining_source(directory, short_share=0.0)
  starts, several = tokenizer.load(directory).word_starts(), 0
  for epoch in range(4):
    batch = draw(given, epoch)
    chosen = np.zeros(batch['tokens'].shape, bool)
    row, slot = np.nonzero(batch['mlm_weights'])
    places = batch['mlm_positions'][row, slot]
    chosen[row, places] = True
    for tokens, own in zip(unmasked(batch), chosen, strict=True):
      assert not own[np.isin(tokens, (PAD, CLS, SEP))].any()
      word = np.cumsum(starts[tokens])
      sizes, masked = np.bincount(word), np.bincount(word, own)
      assert ((masked == 0) | (masked == sizes)).all()
      several += ((masked > 1) & (masked == sizes)).sum()
  assert several > 50
  assert given._ordinary.tolist() == [*range(5, len(corpora.VOCABULARY))]


def test_a_token_that_is_not_in_the_vocabulary(directory, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(directory, copy)
  tokens = np.fromfile(copy / 'train' / 'tokens.bin', np.uint16)
  tokens[3] = 9999
  tokens.tofile(copy / 'train' / 'tokens.bin')
  with pytest.raises(InvalidDataError, match=r'below 208, got .*9999'):
    draw(pretraining_source(copy))


def test_some_rows_are_swapped_or_shorter(directory):
  whole, all_short, some_short = (
    pretraining_source(directory, short_share=share) for share in (0, 1, 0.1)
  )
  lengths = draw(whole)['length']
  np.testing.assert_array_equal(lengths, np.diff(whole._rows.rows) + 3)
  shorter = np.mean([
    draw(all_short, epoch)['length'] < lengths for epoch in range(4)
  ])  # fmt: skip
  # Targets are uniform in [2, 29], rows mostly of 20 to 29 tokens.
  assert shorter > 0.6
  drawn = [draw(some_short, epoch) for epoch in range(12)]
  share = np.mean([batch['length'] < lengths for batch in drawn])
  wanted, count = 0.1 * shorter, 12 * len(lengths)
  assert abs(share - wanted) < 4 * np.sqrt(wanted / count) + 0.01
  labels = np.concatenate([batch['label'] for batch in drawn])
  assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(count)


def test_shortened_rows_are_whole_sentences_or_words(tmp_path):
  texts = corpora.documents(60, seed=8, longest=4)
  directory, _ = corpora.prepare(tmp_path, texts)
  given = pretraining_source(directory, short_share=1.0)
  arrays = given._rows
  borders = set(np.flatnonzero(arrays.sentences))
  begins = tokenizer.load(directory).word_starts()[arrays.tokens]
  begins = np.append(begins, True)
  shorter = at_sentence = 0
  for index, (first, second) in enumerate(segments_of(draw(given, 1))):
    start, stop = arrays.rows[index : index + 2].tolist()
    row, text = arrays.tokens[start:stop].tolist(), first + second
    ats = [
      at
      for at in range(start, stop - len(text) + 1)
      if row[at - start : at - start + len(text)] == text
    ]
    assert ats
    if len(text) == len(row) or len(ats) > 1:
      continue
    end = ats[0] + len(text)
    assert begins[ats[0]]
    assert begins[end]
    shorter += 1
    at_sentence += (ats[0] in borders) + (end in borders)
  assert shorter > 50
  assert at_sentence > shorter / 2


def test_rows_without_a_sentence_border(tmp_path):
  one_sentence = ' '.join(f'w{n}' for n in range(12)) + '.'
  long_sentence = ' '.join(f'w{n % 150}ab' for n in range(40)) + '.'
  texts = [[one_sentence], [long_sentence], ['w' * 300]]
  out, manifest = corpora.prepare(tmp_path, texts, validation_share=0.0)
  given = pretraining_source(out)
  begins = tokenizer.load(out).word_starts()
  # 13, 121 = 4 x 29 + 5 tokens cut at words of 3; one [UNK] is too short.
  assert manifest['faults']['one_sentence_document']['count'] == 2
  assert manifest['faults']['too_short']['count'] == 1
  for epoch in range(5):
    for first, second in segments_of(draw(given, epoch)):
      assert begins[first[0]]
      assert begins[second[0]]


def test_rows_differ_in_another_epoch_and_by_another_seed(directory):
  given = pretraining_source(directory)
  whole = draw(given, 2, seed=5)
  for other in (draw(given, 3, seed=5), draw(given, 2, seed=6)):
    same = (other['mlm_positions'] == whole['mlm_positions']).all(axis=1)
    assert same.mean() < 0.1
    assert (other['label'] != whole['label']).mean() > 0.3


def test_evaluation_is_epoch_0(directory):
  given = pretraining_source(directory, 'validation')
  config = corpora.pretraining_config(directory)
  how = dict(batch_size=len(given), train=False, seed=3)
  data = batches.build(config, 'validation', **how)
  [read] = data.batches()
  assert set(read) == KEYS | {'mask', 'index'}
  expected = draw(given, epoch=0, seed=3)
  for name in KEYS:
    np.testing.assert_array_equal(read[name], expected[name])


def test_rows_were_cut_for_one_length(directory):
  with pytest.raises(ConfigError, match=r'max_length: expected 32, for which'):
    pretraining_source(directory, max_length=64)


def test_no_random_number_is_used_twice():
  epochs, indices = np.divmod(np.arange(400), 80)
  numbers = pretraining.uniform(3, epochs, indices, 83)
  assert numbers.shape == (400, 83)
  assert len(np.unique(numbers)) == numbers.size
  assert 0 <= numbers.min() <= numbers.max() < 1
  # Their mean is 1/2, with a standard deviation of sqrt(1 / 12).
  assert abs(numbers.mean() - 0.5) < 4 / np.sqrt(12 * numbers.size)
