"""Words and their tokens: WordPiece by hand, limits, whole texts."""

import numpy as np
import pytest

from dataset_lib import conllu, tokenizer
from dataset_lib.conllu import encode_words

VOCABULARY = [
  '[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'un', '##aff', '##able',
  'play', '##ing', 'the', 'cat', '.', "'", 'don', 't', *'abc',
]  # fmt: skip


@pytest.fixture
def given(tmp_path):
  text = ''.join(f'{token}\n' for token in VOCABULARY)
  (tmp_path / 'vocab.txt').write_text(text, encoding='utf-8')
  return tokenizer.load(tmp_path)


def rows(encoded):
  bounds = zip(encoded.offsets[:-1], encoded.offsets[1:], strict=True)
  return [encoded.tokens[start:stop] for start, stop in bounds]


def names_of(given, encoded):
  return [given.names(row.tolist()) for row in rows(encoded)]


def test_pieces_of_words_by_hand(given):
  sentences = [
    ['The', 'unaffable', 'cat', '.'],
    ["don't", '\u200b', 'playing', 'dog'],
    [],
  ]
  encoded, places = encode_words(given, sentences, 16)
  first, second, third = names_of(given, encoded)
  assert first == [
    '[CLS]', 'the', 'un', '##aff', '##able', 'cat', '.', '[SEP]'
  ]  # fmt: skip
  assert places[0].tolist() == [[1, 2], [2, 5], [5, 6], [6, 7]]
  # A word may be several WordPiece words, nothing at all, or unknown.
  assert second == [
    '[CLS]', 'don', "'", 't', 'play', '##ing', '[UNK]', '[SEP]'
  ]  # fmt: skip
  assert places[1].tolist() == [[1, 4], [4, 4], [4, 6], [6, 7]]
  assert third == ['[CLS]', '[SEP]']
  assert places[2].shape == (0, 2)
  assert encoded.lengths.tolist() == [8, 8, 2]
  assert not encoded.token_types.any()


@pytest.mark.parametrize(
  ('max_length', 'words', 'tokens'),
  [
    (5, 1, 'a'),
    (6, 2, "a don ' t"),
    (7, 3, "a don ' t b"),
    (8, 3, "a don ' t b"),
  ],
)
def test_words_that_do_not_fit_are_left_out(given, max_length, words, tokens):
  encoded, places = encode_words(given, [['a', "don't", 'b']], max_length)
  assert names_of(given, encoded) == [['[CLS]', *tokens.split(), '[SEP]']]
  assert places[0].tolist() == [[1, 2], [2, 5], [5, 6]][:words]


def test_a_word_longer_than_the_row(given):
  """Cut to the row's length it would look as if it fitted."""
  encoded, places = encode_words(given, [['a.b.c.a.b', 'cat']], 8)
  assert names_of(given, encoded) == [['[CLS]', '[SEP]']]
  assert places[0].shape == (0, 2)


def test_no_sentences(given):
  encoded, places = encode_words(given, [], 8)
  assert len(encoded.lengths) == 0
  assert places == []


@pytest.mark.parametrize('max_length', [4, 0])
def test_limits_without_room(given, max_length):
  with pytest.raises(ValueError, match='max_length: expected at least 5'):
    encode_words(given, [['a']], max_length)


def test_a_word_that_is_no_text(given):
  with pytest.raises(ValueError, match='cannot be encoded'):
    encode_words(given, [['a', '\ud800']], 8)


VOCABULARIES = ['bert_base_uncased_vocab.txt', 'albert_30k_spiece.model']


@pytest.mark.slow
@pytest.mark.parametrize('name', VOCABULARIES)
def test_the_same_tokens_as_of_the_whole_text(shared_data, name):
  vocabulary = shared_data / 'vocab' / name
  treebank = shared_data / 'ud_english_ewt' / 'dev.conllu.gz'
  if not vocabulary.is_file() or not treebank.is_file():
    pytest.skip(f'no {vocabulary} or no {treebank}')
  given = tokenizer.load(vocabulary)
  sentences = [sentence.forms for sentence in conllu.read(treebank)[0][:300]]
  encoded, places = encode_words(given, sentences, 512)
  whole = given.encode([' '.join(words) for words in sentences], None, 512)
  np.testing.assert_array_equal(encoded.tokens, whole.tokens)
  np.testing.assert_array_equal(encoded.offsets, whole.offsets)
  for words, spans, row in zip(sentences, places, rows(encoded), strict=True):
    assert len(spans) == len(words)
    assert spans[0, 0] == 1
    assert spans[-1, 1] == len(row) - 1
    np.testing.assert_array_equal(spans[1:, 0], spans[:-1, 1])
