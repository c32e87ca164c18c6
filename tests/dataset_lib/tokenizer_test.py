"""WordPiece ids by hand, against Hugging Face, saved and loaded, truncated."""

import concurrent.futures
import json
import shutil

import numpy as np
import pytest

from core.errors import InvalidDataError, MissingDataError
from dataset_lib import tokenizer
from dataset_lib.tagged_words import encode_words
from tests.dataset_lib import corpora

VOCABULARY = [
  '[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'un', '##aff', '##able',
  'play', '##ing', '##ed', 'resume', 'cafe', 'the', 'cat', 'sat', '!', ',',
  '[', ']', 'sep', 'mask', 'cls', *'abcdef', '北', '京', 'The', 'Café',
]  # fmt: skip
ID = {token: number for number, token in enumerate(VOCABULARY)}


@pytest.fixture
def directory(tmp_path):
  return corpora.tokenizer(tmp_path, [*VOCABULARY, ''])


def rows(encoded):
  return [x.tolist() for x in np.split(encoded.tokens, encoded.offsets[1:-1])]


def ids(given, text, pair=None, max_length=64):
  pairs = None if pair is None else [pair]
  return rows(given.encode([text], pairs, max_length))[0]


def by_name(names):
  return [ID[name] for name in names.split()]


@pytest.mark.parametrize(
  ('text', 'names'),
  [
    ('unaffable', 'un ##aff ##able'), ('the dog', 'the [UNK]'), ('', ''),
    ('PLAYING, played!', 'play ##ing , play ##ed !'), ('北京', '北 京'),
    ('Résumé  CAFÉ\t\n', 'resume cafe'), ('\x00\ufffd\u200b', ''),
    ('a' * 101, '[UNK]'),
  ],
)  # fmt: skip
def test_ids_by_hand(directory, text, names):
  given = tokenizer.load(directory)
  found, names = ids(given, text), f'[CLS] {names} [SEP]'
  assert given.names(found) == names.split()
  assert found == by_name(names)


def test_pairs_have_two_segments(directory):
  given = tokenizer.load(directory)
  encoded = given.encode(['the cat', ''], ['sat', 'a b'], 16)
  assert rows(encoded) == [
    by_name('[CLS] the cat [SEP] sat [SEP]'),
    by_name('[CLS] [SEP] a b [SEP]'),
  ]
  assert encoded.token_types.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
  assert encoded.lengths.tolist() == [6, 5]
  inside = given.names(np.flatnonzero(~given.word_starts()).tolist())
  assert inside == [name for name in VOCABULARY if name[:2] == '##']


@pytest.mark.parametrize('saved', [False, True])
def test_a_typed_special_token_is_text(directory, tmp_path, saved):
  given = tokenizer.load(directory)
  texts = ['Playing Résumé', 'the [SEP] cat ' * 9, '', 'unaffable 北京']
  expected = rows(given.encode(texts, texts))
  if saved:
    ids(given, 'a', max_length=5)
    path = tmp_path / 'saved' / 'tokenizer.json'
    given.save(path)
    assert list(path.parent.iterdir()) == [path]
    content = json.loads(path.read_text(encoding='utf-8'))
    assert content['truncation'] is content['padding'] is None
    given = tokenizer.load(path)
  assert rows(given.encode(texts, texts)) == expected
  assert (given.vocab_size, given.pad_id) == (len(VOCABULARY), 0)
  names = '[CLS] a [ sep ] b [ mask ] [ cls ] [SEP]'
  assert ids(given, 'a [SEP] b[MASK][CLS]') == by_name(names)
  # Also where the limit makes another copy of the library's object.
  assert ids(given, 'a [SEP]', max_length=5) == by_name('[CLS] a [ sep [SEP]')


@pytest.mark.parametrize('max_length', range(5, 15))
def test_truncation_takes_from_the_longer_text(directory, max_length):
  given = tokenizer.load(directory)
  for one, other in (('abcdef', 'abc'), ('abc', 'abcdef'), ('abcd', 'abcd')):
    kept = [list(one), list(other)]
    while len(kept[0]) + len(kept[1]) + 3 > max_length:
      # Where both have as many left, the text that was longer (or the second
      # one) may keep one more.
      difference = len(kept[0]) - len(kept[1]) or len(other) - len(one) + 0.5
      kept[0 if difference > 0 else 1].pop()
    names = ['[CLS]', *kept[0], '[SEP]', *kept[1], '[SEP]']
    got = ids(given, ' '.join(one), ' '.join(other), max_length)
    assert given.names(got) == names
  single = ids(given, 'a b c d e f ' * 3, None, max_length)
  assert (len(single), single[-1]) == (max_length, ID['[SEP]'])


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize(
  ('text', 'is_cut'),
  [
    ('the cat sat! ' * 9_000, True), ('.' * 100_000, True),
    ('北京' * 50_000, True), ('un' * 45 + '! unaffable ' * 9_000, True),
    ('cat ' * 900 + 'e' * 100_000, True), ('é' * 60 + ' cat' * 9_000, True),
    # Few tokens in many characters.
    ('e' * 100_000, False), ('cat ' + ' ' * 100_000 + 'sat', False),
    ('cat\u0301\u0301' + '\u200b' * 20_000 + ' sat', False),
    (('the' * 34 + ' ') * 5, False), ('', False),
  ],
  ids=range(11),
)  # fmt: skip
def test_a_part_of_a_long_text_gives_its_row(directory, text, is_cut, side):
  given = tokenizer.load(directory)
  given.truncation_side = side
  if side == 'left':
    text = text[::-1]
  part, whole = given.shortened(text, 16), given.encode_plain([text])[0]
  found = given.encode_plain([part])[0]
  kept = slice(16) if side == 'right' else slice(-16, None)
  np.testing.assert_array_equal(found[kept], whole[kept])
  assert min(len(found), 17) == min(len(whole), 17)
  assert (len(part) < 20_000 < len(text)) >= is_cut
  assert is_cut or part == text


def test_chunks_do_not_show(directory, monkeypatch):
  given = tokenizer.load(directory)
  texts = [' '.join('abcdef'[: n % 7]) for n in range(25)]
  whole = given.encode(texts, texts[::-1], 10)
  monkeypatch.setattr(tokenizer, 'CHUNK', 4 * tokenizer.CHUNK_TEXT)
  parts = given.encode(texts, texts[::-1], 10)
  np.testing.assert_equal(vars(parts), vars(whole))
  assert given.encode([], None, 10).offsets.tolist() == [0]


def test_threads_with_different_limits(directory):
  given = tokenizer.load(directory)
  texts = ['a b c d e f'] * 50
  lengths = [5 + n % 4 for n in range(64)]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    encoded = pool.map(lambda n: given.encode(texts, None, n), lengths)
    found = [set(one.lengths) for one in encoded]
  assert found == [{length} for length in lengths]


@pytest.mark.parametrize('form', ['json', 'vocabulary'])
def test_the_configuration_is_obeyed(directory, form):
  if form == 'json':
    tokenizer.load(directory).save(directory / 'tokenizer.json')
  config = {'do_lower_case': False, 'tokenize_chinese_chars': False}
  for more, names in (
    ({}, 'The the Café [UNK]'), ({'strip_accents': True}, 'The the [UNK] [UNK]')
  ):  # fmt: skip
    path = directory / 'tokenizer_config.json'
    path.write_text(json.dumps(config | more))
    found = ids(tokenizer.load(directory), 'The the Café 北京')
    assert found == by_name(f'[CLS] {names} [SEP]')


def test_other_names_of_special_tokens(tmp_path):
  with pytest.raises(MissingDataError, match=r'tokenizer\.json or vocab\.txt'):
    tokenizer.load(tmp_path)
  names = ['<pad>', '<unk>', '<s>', '</s>', 'a', 's', '<', '>', '/']
  (tmp_path / 'vocab.txt').write_text('\n'.join(names))
  with pytest.raises(InvalidDataError, match=r'without \[PAD\], \[UNK\]'):
    tokenizer.load(tmp_path)
  special = {'pad_token': '<pad>', 'cls_token': '<s>', 'sep_token': '</s>',
             'mask_token': None,
             'unk_token': {'content': '<unk>', 'lstrip': False}}  # fmt: skip
  (tmp_path / 'special_tokens_map.json').write_text(json.dumps(special))
  given = tokenizer.load(tmp_path)
  assert ids(given, 'a x </s>') == [2, 4, 1, 6, 8, 5, 7, 3]
  assert (given.pad_id, given.vocab_size) == (0, len(names))
  # Alone, the saved file knows the names; other names are another tokenizer.
  given.save(tmp_path / 'saved' / 'tokenizer.json')
  copy = tokenizer.load(tmp_path / 'saved')
  roles = 'pad_id', 'unk_id', 'cls_id', 'sep_id', 'mask_id', 'special_ids'
  assert [getattr(copy, n) for n in roles] == [getattr(given, n) for n in roles]
  assert ids(copy, 'a x </s>') == ids(given, 'a x </s>')
  assert copy.digest == given.digest
  swapped = special | {'cls_token': '</s>', 'sep_token': '<s>'}
  (tmp_path / 'special_tokens_map.json').write_text(json.dumps(swapped))
  assert tokenizer.load(tmp_path).digest != given.digest
  # As in Hugging Face: newer versions do not read the older file.
  for more, is_used in (({}, False), ({'added_tokens_decoder': {}}, True)):
    stated = json.dumps(special | more)
    (tmp_path / 'tokenizer_config.json').write_text(stated)
    assert (tokenizer.load(tmp_path).digest == given.digest) == is_used


def test_a_vocabulary_of_another_system(directory):
  path = directory / 'vocab.txt'
  text, expected = path.read_bytes(), tokenizer.load(directory).digest
  path.write_bytes(b'\xef\xbb\xbf' + text.replace(b'\n', b'\r\n'))
  assert tokenizer.load(directory).digest == expected


@pytest.mark.parametrize(
  ('name', 'content', 'words'),
  [
    ('tokenizer.json', b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, '
     b'"unk_token": "a"}}', r'expected a WordPiece, BPE .* got WordLevel'),
    ('vocab.txt', b'[PAD]\n[UNK]\nthe\n', r'without \[CLS\], \[SEP\]'),
    ('vocab.txt', b'[PAD]\n\xff\xfe\n', 'is damaged: .*utf-8'),
    ('tokenizer_config.json', b'{', r'tokenizer_config\.json is damaged'),
    ('added_tokens.json', b'{"x": 99}', "json: expected 'x' in added_tokens"),
    ('tokenizer_config.json', b'{"tokenizer_class": "BertJapaneseTokenizer"}',
     'tokenizer_class=BertJapaneseTokenizer is not'),
  ],
)  # fmt: skip
def test_damaged_files_are_named(directory, name, content, words):
  (directory / name).write_bytes(content)
  with pytest.raises(InvalidDataError, match=words) as error:
    tokenizer.load(directory)
  assert str(directory) in str(error.value)


@pytest.mark.parametrize('form', ['config', 'json', 'saved'])
def test_the_left_is_cut_off(directory, form):
  config = {'truncation_side': 'left'}
  if form != 'json':
    (directory / 'tokenizer_config.json').write_text(json.dumps(config))
  given = tokenizer.load(directory)
  if form == 'saved':
    given = tokenizer.from_json(given.to_json().encode(), 'x')
  elif form == 'json':
    content = json.loads(given.to_json())
    how = {'strategy': 'LongestFirst', 'max_length': 9, 'stride': 0}
    content['truncation'] = how | {'direction': 'Left'}
    given = tokenizer.from_json(json.dumps(content).encode(), 'x')
  assert given.truncation_side == 'left'
  assert ids(given, 'a b c d', None, 5) == by_name('[CLS] b c d [SEP]')
  pair = ids(given, 'a b c d e', 'f', 7)
  assert pair == by_name('[CLS] c d e [SEP] f [SEP]')
  encoded, places = encode_words(given, [['a', 'b c', 'd'], ['e']], 5)
  assert rows(encoded)[0] == by_name('[CLS] b c d [SEP]')
  assert places[0].tolist() == [[1, 1], [1, 3], [3, 4]]
  assert rows(encoded)[1] == by_name('[CLS] e [SEP]')


@pytest.mark.parametrize(
  ('number', 'content', 'legal'),
  [
    (len(ID), '<user>', True), (ID['cat'], 'cat', True), (3, '<user>', False),
    (len(ID) + 1, 'x', False), (ID['cat'], 'sat', False),
  ],
)  # fmt: skip
def test_added_tokens_of_the_configuration(directory, number, content, legal):
  config = {'added_tokens_decoder': {str(number): {'content': content}}}
  (directory / 'tokenizer_config.json').write_text(json.dumps(config))
  if not legal:
    with pytest.raises(InvalidDataError, match=f'have the id {number}'):
      tokenizer.load(directory)
    return
  given = tokenizer.load(directory)
  found = ids(given, f'a {content} b')[1:-1]
  assert found == [ID['a'], number, ID['b']]
  assert given.vocab_size == max(len(ID), number + 1)


def test_what_cannot_be_encoded(directory):
  given = tokenizer.load(directory)
  for words, arguments in {
    'lone surrogate': (['a', '\ud800'],),
    'max_length: expected at least 5': (['a'], None, 4),
    'shorter': (['a', 'b'], ['a']),
  }.items():
    with pytest.raises(ValueError, match=words):
      given.encode(*arguments)


@pytest.mark.parametrize(
  ('name', 'size', 'text', 'expected', 'words', 'pieces'),
  [  # From the documentation of the tokenizers.
    ('bert_base_uncased_vocab.txt', 30_522, 'hello world!',
     [101, 7592, 2088, 999, 102], 'Embeddings', 'em ##bed ##ding ##s'),
    # A comma behind a number is a piece of its own, as in Google's tokenizer.
    ('albert_30k_spiece.model', 30_000, 'Hello, my dog is cute',
     [2, 10975, 15, 51, 1952, 25, 10901, 3], 'In 1999, 2,000',
     '▁in ▁1999 , ▁2,000'),
  ],
)  # fmt: skip
def test_published(shared_data, name, size, text, expected, words, pieces):
  given = tokenizer.load(shared_data('vocab', name))
  assert (given.vocab_size, given.pad_id) == (size, 0)
  assert ids(given, text) == expected
  assert given.names(ids(given, words)[1:-1]) == pieces.split()


STRANGE = (
  'Naïve café — “quotes” … 3.14 €5 e-mail@x.org',
  '日本語 tokyo 서울 Ωmega straße ﬁne İstanbul',
  '[SEP] [CLS] [MASK] [unused1] <s>',
  'x' * 120 + ' y\u00a0z\u3000w\x07 \t tab',
  "don't can't I'M shouldn't've",
  '👍🏽 emoji 🇩🇪 \u202eRTL',
)


@pytest.mark.peers
@pytest.mark.parametrize('lower', [True, False])
def test_ids_are_those_of_hugging_face(shared_data, tmp_path, lower):
  transformers = pytest.importorskip('transformers')
  vocabulary = shared_data('vocab', 'bert_base_uncased_vocab.txt')
  shutil.copy(vocabulary, tmp_path / 'vocab.txt')
  config = {'do_lower_case': lower, 'tokenizer_class': 'BertTokenizer'}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  peer = transformers.BertTokenizer.from_pretrained(tmp_path)
  given = tokenizer.load(tmp_path)
  for pairs in (None, list(STRANGE[::-1])):
    for max_length in (8, 13, 128):
      expected = peer(
        list(STRANGE), pairs, max_length=max_length, truncation='longest_first',
        split_special_tokens=True,
      )  # fmt: skip
      encoded = given.encode(STRANGE, pairs, max_length)
      assert rows(encoded) == expected['input_ids']
      types = np.concatenate(expected['token_type_ids'])
      np.testing.assert_array_equal(encoded.token_types, types)
