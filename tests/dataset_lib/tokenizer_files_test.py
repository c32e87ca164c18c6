"""Tokenizers of others: byte-level, without limits, or of another form."""

import base64
import functools
import json
import struct

import pytest
import tokenizers

from core.errors import InvalidDataError
from dataset_lib import tokenizer
from serve_lib.chain import InputError
from serve_lib.items import TextReader
from tests.dataset_lib import corpora
from tests.dataset_lib.tokenizer_test import VOCABULARY, ids


@pytest.fixture
def directory(tmp_path):
  return corpora.tokenizer(tmp_path, VOCABULARY)


BOMBS = (
  '(a+)+$', '(a|a)*b', 'a*a*b', 'a?a?a?aaa', r'(\w+\s?)+$', 'a{1,9}b', '(a',
)  # fmt: skip
# Of published tokenizers.
LINEAR = ' {2,}', r'\s+', r'\<(?=pad\>)|\[(?=CLS\])', r'[()*+]', 'a|b'
REGEX = {'type': 'Split', 'behavior': 'Isolated', 'invert': False}
REPLACE, BYTES = {'type': 'Replace'}, {
  'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
  'use_regex': False,
}  # fmt: skip
DOUBLE = REPLACE | {'pattern': {'String': 'a'}, 'content': 'aa'}
RULES = base64.b64encode(struct.pack('<2I', 4, 0) + b'a' * 200).decode()
GROWING = (
  [DOUBLE] * 8, [DOUBLE] * 40, [BYTES] * 4, [{'type': 'Lowercase'}] * 130,
  [REPLACE | {'pattern': {'Regex': '.'}, 'content': 'aa'}] * 8,
  [{'type': 'Prepend', 'prepend': 'a' * 20}] * 2,
  [{'type': 'Precompiled', 'precompiled_charsmap': RULES}],
)  # fmt: skip
MUTATIONS = (
  *(('pre_tokenizer', REGEX | {'pattern': {'Regex': bomb}}) for bomb in BOMBS),
  *(('normalizer', {'type': 'Sequence', 'normalizers': n}) for n in GROWING),
  ('normalizer', REPLACE | {'pattern': {'String': 'a'}, 'content': 'a' * 129}),
  ('pre_tokenizer', {'type': 'Sequence', 'pretokenizers': [BYTES] * 9}),
  ('decoder', {'type': 'Sequence', 'decoders': [DOUBLE] * 9}),
  ('model.vocab.a', 0), ('model.vocab.a', 2**22), ('model.vocab.a', -1),
  ('model.vocab', []), ('model.vocab', {}), ('model.unk_token', 7),
  ('model.max_input_chars_per_word', 10**9), ('model.type', 'WordLevel'),
  ('added_tokens.0.id', 2**32), ('added_tokens.0', 1), ('normalizer', 7),
  ('post_processor.single', [{'SpecialToken': {'id': 'x', 'type_id': 0}}]),
  ('post_processor.pair.3.Sequence.type_id', 7), ('post_processor', []),
  # Types of a text alone, of [CLS], and a text twice.
  ('post_processor.single.1.Sequence.type_id', 1),
  ('post_processor.pair.0.SpecialToken.type_id', 1),
  ('post_processor.single.2', {'Sequence': {'id': 'A', 'type_id': 0}}),
  ('decoder', 'x'), ('truncation', {'direction': 'up'}), ('version', '9'),
)  # fmt: skip


@pytest.mark.parametrize(('place', 'value'), MUTATIONS)
def test_a_hostile_file_is_a_line(directory, place, value):
  content = json.loads(tokenizer.load(directory).to_json())
  *groups, name = (int(k) if k.isdecimal() else k for k in place.split('.'))
  node = functools.reduce(lambda one, key: one[key], groups, content)
  assert name in range(9) or name in node
  node[name] = value
  path = directory / 'hostile.json'
  path.write_text(json.dumps(content))
  with pytest.raises(InvalidDataError, match=r'hostile\.json') as error:
    tokenizer.load(path)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('pattern', LINEAR)
def test_a_pattern_of_linear_time_is_read(directory, pattern):
  content = json.loads(tokenizer.load(directory).to_json())
  content['pre_tokenizer'] = REGEX | {'pattern': {'Regex': pattern}}
  given = tokenizer.from_json(json.dumps(content).encode(), 'x')
  assert given.encode(['a']).tokens[1] == VOCABULARY.index('a')


def byte_level_bpe(special):
  """A small one, with special tokens."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=special[1]))
  library.normalizer = tokenizers.normalizers.NFC()
  library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  library.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300, show_progress=False, special_tokens=special,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  library.train_from_iterator(['the cat sat', 'the cafe', 'a cat'] * 9, trainer)
  return library


def test_a_byte_level_bpe_like_that_of_modern_bert(tmp_path):
  library = byte_level_bpe(corpora.SPECIAL)
  library.save(str(tmp_path / 'tokenizer.json'))
  given = tokenizer.load(tmp_path)
  library.encode_special_tokens = True
  for text in ('the cat!', 'Café 北京', 'the [SEP] cat', ''):
    want = library.encode(text).ids
    assert ids(given, text) == [2, *want, 3]
    assert ids(given, text, 'a cat')[: len(want) + 2] == [2, *want, 3]
  found = ids(given, 'the cat')
  assert given.names(found) == ['[CLS]', 'the', 'Ġcat', '[SEP]']
  assert given.word_starts()[found].tolist() == [True, False, True, True]
  again = tokenizer.from_json(given.to_json().encode(), 'x')
  assert again.digest == given.digest


def test_a_pair_of_roberta_has_two_separators_and_one_type(tmp_path):
  roles = 'pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token'
  names = ['<pad>', '<unk>', '<s>', '</s>', '<mask>']
  config = json.dumps(dict(zip(roles, names, strict=True)))
  (tmp_path / 'tokenizer_config.json').write_text(config)
  library = byte_level_bpe(names)
  ends = ('</s>', 3), ('<s>', 2)
  library.post_processor = tokenizers.processors.RobertaProcessing(*ends)
  library.save(str(tmp_path / 'tokenizer.json'))
  given = tokenizer.load(tmp_path)
  again = tokenizer.from_json(given.to_json().encode(), 'x')
  assert again.digest == given.digest
  library.encode_special_tokens = True
  for text, pair in (('the cat!', 'a cafe'), ('a </s> cat', ''), ('', 'the')):
    for one in (given, again):
      encoded = one.encode([text], [pair], 64)
      assert encoded.tokens.tolist() == library.encode(text, pair).ids
      assert not encoded.token_types.any()
    assert ids(given, text) == library.encode(text).ids
  (tmp_path / 'tokenizer_config.json').write_text('{"model_max_length": 512}')
  assert tokenizer.load(tmp_path).digest == given.digest  # names are usual
  reader = TextReader(given, 64, num_texts=2, num_types=1)
  encoded = reader.read({'text': 'the', 'pair': 'a cat'}, '').inputs
  expected = library.encode('the', 'a cat').ids
  assert encoded['tokens'].tolist() == expected
  for key in ('text', 'pair'):
    with pytest.raises(InputError, match=f'{key}: expected at least one'):
      reader.read({'text': 'the', 'pair': 'a cat', key: ''}, '')
  library.post_processor = tokenizers.processors.BertProcessing(*ends)
  library.save(str(tmp_path / 'tokenizer.json'))
  assert tokenizer.load(tmp_path).digest != given.digest
