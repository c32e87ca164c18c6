"""Tagged words: columns of CoNLL files, labels of pieces, real treebanks."""

import gzip

import numpy as np
import pytest

from core import errors
from core.errors import BadRecord, InvalidDataError, MissingDataError
from dataset_lib import tokenizer
from dataset_lib.tagged_words import TaggedFile, encode_words
from tests.dataset_lib import corpora
from tests.dataset_lib.batches import build, take
from tests.dataset_lib.tokenizer_test import rows
from tests.dataset_lib.word_rows import opened, write
from tests.marks import first_is_slow

VOCABULARY = [
  '[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'un', '##aff', '##able',
  'play', '##ing', 'the', 'cat', '.', "'", 'don', 't', *'abc',
]  # fmt: skip


@pytest.fixture
def given(tmp_path):
  return tokenizer.load(corpora.tokenizer(tmp_path, VOCABULARY))


def names_of(given, encoded):
  return [given.names(row) for row in rows(encoded)]


def test_pieces_of_words_by_hand(given):
  words = ['The', 'unaffable', 'cat', '.']
  sentences = [words, ["don't", '\u200b', 'playing', 'dog'], []]
  encoded, places = encode_words(given, sentences, 16)
  first, second, third = map(' '.join, names_of(given, encoded))
  assert first == '[CLS] the un ##aff ##able cat . [SEP]'
  assert places[0].tolist() == [[1, 2], [2, 5], [5, 6], [6, 7]]
  # A word may be several WordPiece words, nothing at all, or unknown.
  assert second == "[CLS] don ' t play ##ing [UNK] [SEP]"
  assert places[1].tolist() == [[1, 4], [4, 4], [4, 6], [6, 7]]
  assert third == '[CLS] [SEP]'
  assert places[2].shape == (0, 2)
  assert encoded.lengths.tolist() == [8, 8, 2]
  assert not encoded.token_types.any()


@pytest.mark.parametrize(
  ('max_length', 'words', 'kept', 'tokens'),
  [
    (5, "a don't b", 1, 'a'), (6, "a don't b", 2, "a don ' t"),
    (7, "a don't b", 3, "a don ' t b"), (8, "a don't b", 3, "a don ' t b"),
    (8, 'a.b.c.a.b cat', 0, ''),
  ],
)  # fmt: skip
def test_words_that_do_not_fit(given, max_length, words, kept, tokens):
  encoded, places = encode_words(given, [words.split()], max_length)
  assert names_of(given, encoded) == [['[CLS]', *tokens.split(), '[SEP]']]
  assert places[0].tolist() == [[1, 2], [2, 5], [5, 6]][:kept]


def test_words_that_are_no_text(given):
  encoded, places = encode_words(given, [], 8)
  assert (len(encoded.lengths), places) == (0, [])
  with pytest.raises(ValueError, match='cannot be encoded'):
    encode_words(given, [['\ud800']], 8)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['bert_base_uncased_vocab.txt', 'albert_30k_spiece.model']
)
def test_the_same_tokens_as_of_the_whole_text(shared_data, name):
  given = tokenizer.load(shared_data('vocab', name))
  file = TaggedFile(shared_data('ud_english_ewt', 'dev.conllu.gz'), 'upos')
  sentences = [[word for word, _ in file[row]] for row in range(300)]
  encoded, places = encode_words(given, sentences, 512)
  whole = given.encode([' '.join(words) for words in sentences], None, 512)
  np.testing.assert_array_equal(encoded.tokens, whole.tokens)
  np.testing.assert_array_equal(encoded.offsets, whole.offsets)
  for words, spans, row in zip(sentences, places, rows(encoded), strict=True):
    assert len(spans) == len(words)
    assert spans[0, 0] == 1
    assert spans[-1, 1] == len(row) - 1
    np.testing.assert_array_equal(spans[1:, 0], spans[:-1, 1])


CONLLU = [
  '# text = w1 "w2 w3',
  '1\tw1\t_\tNOUN\tNN\t_\t3\tnsubj\t_\tSpaceAfter=No|NER=B-PER',
  '2-3\t"w2\t_\t_\t_\t_\t_\t_\t_\tNER=O',
  '2\t"w2\t_\tX\t``\t_\t1\tnmod:poss\t_\tNER=I-PER',
  '2.1\tw9\t_\tX\tX\t_\t_\t_\t_\tNER=O',
  '3\tw3\t_\tVERB\tVB\t_\t_\t_\t_\t_',
  '',
  '1\tw4\t_\t_\tNN\t_\t_\t_\t_\t_',
]
CONLL = ['-DOCSTART- -X- O', '', 'w1 NN B-PER', 'w2 NN I-PER ', ' ',
         'w3\tVB\tO', 'w4\u00a0w5\tNN\tB-LOC']  # fmt: skip


def config(root, **others):
  words = str(root.parent / 'vocabulary')
  return dict(name='tags', directory=str(root), tokenizer=words, **others)


def tags_of(source):
  """Names of the labels of every row; '' for a token without a tag."""
  names = [*source.info.class_names, '']
  records = map(source.record, range(len(source)))
  return [[names[label] for label in one['label']] for one in records]


@pytest.mark.parametrize(
  ('file', 'column', 'expected'),
  [
    # Only the first piece of a word, here a quote, has its tag.
    ('train.conllu', 'upos', [['NOUN', 'X', '', 'VERB'], ['']]),
    ('en-ud-train.conllu.gz', 'xpos', [['NN', '``', '', 'VB'], ['NN']]),
    ('train.conllu', 'NER', [['B-PER', 'I-PER', '', ''], ['']]),
    ('train.conllu', 'deprel', [['nsubj', 'nmod:poss', '', ''], ['']]),
    ('train.txt', '-1', [['B-PER', 'I-PER'], ['O', 'B-LOC', '']]),
    ('train.conll.gz', '1', [['NN', 'NN'], ['VB', 'NN', '']]),
  ],
)  # fmt: skip
def test_columns_of_both_formats(root, file, column, expected):
  path = write(root / file, CONLLU if 'conllu' in file else CONLL, '\r\n')
  source = opened(config(root, column=column))
  assert tags_of(source) == [['', *tags, ''] for tags in expected]
  assert source.where(1) == f'{path}, line {8 if "conllu" in file else 6}'
  # One file is a train split.
  given = config(root, column=column) | {'directory': str(path)}
  halves = [[['', *tags, '']] for tags in expected]
  assert tags_of(opened(given, 'train[:50%]')) in halves
  with pytest.raises(MissingDataError, match='without a validation split take'):
    opened(given, 'validation')


def test_batches_and_words_that_do_not_fit(root):
  write(root / 'train.tsv', ['w1\tA', '\u200b\tB', 'w2\tB', 'w3\tA', 'w4\tA'])
  write(root / 'dev.tsv', ['w5\tB', 'w6\tA', '', 'w7\tA'])
  given = config(root, max_length=5, length_buckets=(5,))
  data = build(given, batch_size=2)
  [batch] = take(data, 1)
  # A word without a piece, and the one after the first three.
  assert batch['left_out'].tolist() == [2, 2]
  assert batch['label'].tolist() == [[-1, 0, 1, 0, -1]] * 2
  assert data.row_shapes()['label'] == ((5,), 'int32')
  [batch] = build(given, 'validation', train=False, batch_size=3).batches()
  by_index = dict(zip(batch['index'].tolist(), batch['label'], strict=True))
  assert by_index[0].tolist() == [-1, 1, 0, -1, -1]
  assert by_index[-1].tolist() == [-1] * 5  # of the padding
  assert batch['label'].dtype == np.int32


def test_a_digest_tells_tags_apart(root):
  digests = set()
  for tags in 'AB', 'BA', 'AB':
    write(root / 'train.tsv', [f'w{n}\t{tag}' for n, tag in enumerate(tags)])
    digests.add(opened(config(root)).info.digest)
  assert len(digests) == 2


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('w1 O', 'wrong_columns.*line 3: expected 3 columns, got 2'),
    (b'w1 \xff O', 'not_utf8.*line 3'),
    ('\tNN\tO', 'empty_form.*line 3'),
    ('w1 NN C', "illegal_label.*line 2: tag 'C' is not in the train split"),
  ],
)
def test_a_bad_line_costs_its_sentence(root, line, message):
  write(root / 'train.conll', ['w1 NN A', 'w2 NN B'])
  write(root / 'valid.conll', ['', 'w1 NN A', line, '', 'w2 NN B'])
  source = opened(config(root), 'dev')
  assert tags_of(source) == [['', 'B', '']]
  [(row, bad)] = source.bad_rows
  assert row == 0
  with pytest.raises(ValueError, match=message):
    raise bad


@pytest.mark.parametrize(
  ('line', 'kind', 'message'),
  [
    (b'3\tw\xff' + b'\t_' * 8, 'not_utf8', 'decode'),
    ('3\tw3\t_', 'wrong_columns', 'expected 10 columns, got 3'),
    ("2-3\tw3\t_", 'wrong_columns', 'expected 10 columns, got 3'),
    ('3\t ' + '\t_' * 8, 'empty_form', 'expected a form'),
    ('4\tw3' + '\t_' * 8, 'wrong_order', 'expected number 3, got 4'),
    ('2\tw3' + '\t_' * 8, 'wrong_order', 'expected number 3, got 2'),
    *((f'{number}\tw3' + '\t_' * 8, 'illegal_id', f"got '{number[:9]}")
      for number in ('3a', '9' * 5000, '03', '0', '²')),
  ],
)  # fmt: skip
def test_a_bad_line_of_a_treebank_is_named(root, line, kind, message):
  path = write(root / 'a.conllu', [*CONLLU[:5], line, *CONLLU[6:]])
  file = TaggedFile(path, 'deprel')
  assert file[1] == [('w4', '_')]
  words = f'^{kind}: {path}, line 6: .*{message}'
  with pytest.raises(BadRecord, match=words):
    file[0]


@pytest.mark.parametrize(
  ('column', 'error', 'words'),
  [
    ('1', InvalidDataError, '2 to 1000 tags.*got 1: A'),
    ('3', InvalidDataError, 'line 1: expected a word and column 3, got 3'),
    ('-4', InvalidDataError, 'column -4, got 3 columns; no row can be'),
    ('upos', MissingDataError, r'train\.conllu, train\.conllu\.gz'),
    ('1.5', errors.ConfigError, r'dataset\.column: expected upos, xpos'),
  ],
)
def test_files_and_columns_that_do_not_fit(root, column, error, words):
  write(root / 'train.conll', ['w1 A A', 'w2 A B'])
  with pytest.raises(error, match=words):
    opened(config(root, column=column))


@pytest.mark.parametrize(
  ('column', 'place'), first_is_slow(('upos', 3), ('deprel', 7))
)
def test_a_real_treebank(shared_data, column, place):
  path = shared_data('ud_english_ewt', 'dev.conllu.gz')
  words = str(shared_data('vocab', 'bert_base_uncased_vocab.txt'))
  given = dict(name='tags', directory=str(path.parent), tokenizer=words)
  source = opened(given | {'column': column, 'max_length': 512}, 'dev')
  lines = gzip.decompress(path.read_bytes()).decode().split('\n')
  columns = [line.split('\t') for line in lines]
  expected = [one[place] for one in columns if one[0].isdigit()]
  found = [tag for row in tags_of(source) for tag in row if tag]
  assert found == expected
  assert not source.bad_rows
