"""Tokenizers of others that would take for ever, or are of another form."""

import base64
import functools
import json
import struct

import pytest

from core.errors import InvalidDataError
from dataset_lib import tokenizer
from tests.dataset_lib import corpora
from tests.dataset_lib.tokenizer_test import VOCABULARY


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
