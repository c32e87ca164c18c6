"""SentencePiece vocabularies: trained, read, saved, against their peers."""

import gzip
import json
import shutil

import numpy as np
import pytest
import sentencepiece

from core.errors import ConfigError, InvalidDataError
from dataset_lib import tokenizer, tokenizer_files
from tests.dataset_lib import tokenizer_test
from tests.dataset_lib.tokenizer_test import ids

TEXT = (
  'the cat sat on a mat and played with 12 balls, resting (often) on "it". '
  "Unplayable! restarted naive cats' mats; 1999 5-6 £7"
)
STEMS = ['play', 'rest', 'start', 'load', 'paint', 'walk']
ENDINGS = ['', 's', 'ed', 'ing', 'er']
WORDS = [*TEXT.split(), *(stem + end for stem in STEMS for end in ENDINGS)]


def text_of(count, seed=0):
  rng = np.random.default_rng(seed)
  return [' '.join(rng.choice(WORDS, 12)) for _ in range(count)]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The path of a small model."""
  path = tmp_path_factory.mktemp('trained') / 'spiece.model'
  path.write_bytes(tokenizer_files.train(text_of(300), 80, 10_000))
  return path


@pytest.fixture
def albert(shared_data):
  return shared_data('vocab', 'albert_30k_spiece.model')


def test_training_gives_alberts_special_tokens_and_no_others(trained):
  given = tokenizer.load(trained.parent)
  assert given.vocab_size == 80
  assert given.names(range(5)) == ['<pad>', '<unk>', '[CLS]', '[SEP]', '[MASK]']
  assert given.special_ids == (
    given.pad_id, given.unk_id, given.cls_id, given.sep_id, given.mask_id
  ) == (0, 1, 2, 3, 4)  # fmt: skip
  # "Often" and "(often)" are one word: lower case, brackets apart.
  names = given.names(ids(given, 'The Cat (Often)'))
  assert names[:3] == ['[CLS]', '▁the', '▁cat']
  assert {'(', ')'} < set(names)
  assert ''.join(names[1:-1]) == '▁the▁cat▁(often)'


@pytest.mark.parametrize(
  ('vocab_size', 'words'), [(5000, r'value <= \d\d+'), (20, r'20 vs \d\d+')]
)
def test_a_vocabulary_that_does_not_fit_the_texts(vocab_size, words):
  with pytest.raises(ConfigError, match=words) as error:
    tokenizer_files.train(text_of(50), vocab_size, 1000)
  assert error.value.field == 'vocab_size'


@pytest.mark.parametrize('kind', [KeyboardInterrupt, OSError])
def test_what_is_raised_while_texts_are_read_is_not_about_the_size(kind):
  def texts():
    yield 'the cat'
    raise kind

  with pytest.raises(kind):
    tokenizer_files.train(texts(), 80, 1000)


def test_texts_that_grow_when_they_are_normalised_are_not_lost(tmp_path):
  # Each syllable becomes three letters of three bytes.
  path = tmp_path / 'spiece.model'
  path.write_bytes(tokenizer_files.train(['각' * 1500], 20, 1000))
  given = tokenizer.load(path)
  assert given.unk_id not in given.encode_plain(['각각'])[0]
  with pytest.raises(InvalidDataError, match='no text'):
    tokenizer_files.train(['', ' '], 20, 1000)


@pytest.mark.parametrize('which', ['trained', 'albert'])
def test_ids_are_those_of_the_library(which, request, shared_data):
  path = request.getfixturevalue(which)
  given = tokenizer.load(path)
  peer = sentencepiece.SentencePieceProcessor(model_file=str(path))
  normalizer = tokenizer_files.normalizer_of()
  texts = [*text_of(50, 3), "RESTarting  naïve ``quotes'' ﬁne", 'xyz 日本 ß']
  book = shared_data('corpus_eltec_eng', 'valid.txt.gz')
  if which == 'albert':
    with gzip.open(book, 'rt', encoding='utf-8') as file:
      texts += [next(file) for _ in range(150)]
  expected = [peer.encode(normalizer.normalize_str(text)) for text in texts]
  tokens, lengths = given.encode_plain(texts)
  assert lengths.tolist() == [len(row) for row in expected]
  np.testing.assert_array_equal(tokens, np.concatenate(expected))


@pytest.mark.parametrize('which', ['trained', 'albert'])
def test_a_saved_model_has_its_digest(which, request, tmp_path):
  given = tokenizer.load(request.getfixturevalue(which))
  given.save(tmp_path / 'tokenizer.json')
  again = tokenizer.load(tmp_path)
  again.save(tmp_path / 'tokenizer.json')
  assert again.digest == tokenizer.load(tmp_path).digest == given.digest


def test_typed_special_tokens_are_text_also_when_saved(trained, tmp_path):
  given, path = tokenizer.load(trained), tmp_path / 'tokenizer.json'
  given.save(path)
  again = tokenizer.load(path)
  for text in ('<pad>', 'a<unk>b', '[SEP]', '[MASK][CLS] <pad>', '[cls]'):
    tokens, _ = given.encode_plain([text])
    assert not {0, 2, 3, 4} & set(tokens.tolist()), text
    np.testing.assert_array_equal(tokens, again.encode_plain([text])[0])
  # "<" is not in the vocabulary, and so unknown; "pad" is.
  names = given.names(given.encode_plain(['<pad>'])[0].tolist())
  assert names == ['▁', '<unk>', *names[2:-1], '<unk>']
  assert ''.join(names[2:-1]) == 'pad'
  texts, pairs = text_of(20, 5), text_of(20, 6)
  one, other = (each.encode(texts, pairs, 32) for each in (given, again))
  np.testing.assert_equal(vars(one), vars(other))
  row = one.tokens[: one.offsets[1]].tolist()
  assert [row[0], row[-1], row.count(3)] == [2, 3, 2]
  # Saved again and again, it does not grow.
  again.save(tmp_path / 'again.json')
  files = path, tmp_path / 'again.json'
  steps = [json.loads(file.read_text())['pre_tokenizer'] for file in files]
  assert steps[0] == steps[1]


def test_the_configuration_is_obeyed(trained, tmp_path):
  shutil.copy(trained, tmp_path)
  config = {'do_lower_case': False, 'keep_accents': True}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  given = tokenizer.load(tmp_path)
  assert given.unk_id in ids(given, 'The')
  assert given.unk_id not in ids(tokenizer.load(trained), 'Thé')


def test_a_model_that_was_cut_short_or_is_of_another_type(trained, tmp_path):
  path, data = tmp_path / 'spiece.model', trained.read_bytes()
  # Between two pieces: each begins with the key of field 1 and its length.
  end = 0
  for _ in range(40):
    assert data[end] == 0x0A
    end += 2 + data[end + 1]
  shares = 0.0, 0.001, 0.02, 0.3, 0.5, 0.99, 0.9999
  for size in (end, *(int(share * len(data)) for share in shares)):
    path.write_bytes(data[:size])
    with pytest.raises(InvalidDataError, match='is damaged'):
      tokenizer.load(path)

  with path.open('wb') as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(text_of(50)), model_writer=file,
      model_type='bpe', vocab_size=60, minloglevel=2,
    )  # fmt: skip
  with pytest.raises(InvalidDataError, match='UNIGRAM, got BPE'):
    tokenizer.load(path)


@pytest.mark.parametrize(
  ('begins', 'pieces'),
  [
    (True, '▁play ▁ , ." \' ▁9, 北 東京 の ไทย “'),
    (False, 'ing 84 s é мир ##ing'),
  ],
)
def test_pieces_that_begin_a_word(begins, pieces):
  found = {*map(tokenizer_files.begins_word, pieces.split())}
  assert found == {begins}


@pytest.mark.peers
@pytest.mark.parametrize('which', ['albert', 'trained'])
def test_ids_are_those_of_hugging_face(which, request, tmp_path):
  transformers = pytest.importorskip('transformers')
  transformers.logging.set_verbosity_error()
  path = request.getfixturevalue(which)
  given = tokenizer.load(path)
  given.save(tmp_path / 'tokenizer.json')
  peer = transformers.AlbertTokenizer.from_pretrained(tmp_path)
  texts = [*tokenizer_test.STRANGE, '', ' ', 'the cat_sat ▁x', *text_of(20)]
  pairs = [text or 'a' for text in texts[::-1]]
  for text, pair in zip(texts, pairs, strict=True):
    expected = peer(text, pair, split_special_tokens=True)
    encoded = given.encode([text], [pair])
    assert encoded.tokens.tolist() == expected['input_ids']
