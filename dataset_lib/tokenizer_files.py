"""Reads the files of a tokenizer within limits."""

import base64
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from core import files
from core.errors import InvalidDataError
from dataset_lib import sentencepiece_model

JSON_FILE, VOCABULARY_FILE = 'tokenizer.json', 'vocab.txt'
WORD_PIECE, UNIGRAM, BYTES = 'WordPiece', 'Unigram', 'BPE'
SPECIAL = {
  WORD_PIECE: ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'),
  BYTES: ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'),  # of ModernBERT
  UNIGRAM: sentencepiece_model.SPECIAL_TOKENS,
}
ROLES = ('pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token')
# Classes with a vocab.txt that do not tokenize as BERT's.
_OTHERS = re.compile('.*Japanese|RoFormer|Bertweet|Phobert|Herbert|CpmAnt')
MAX_STEPS = 128  # of normalizer, pre_tokenizer and decoder
MAX_GROWTH = 128.0  # of a text; the rules of SentencePiece give up to 33
# Matched in time linear in the text: only the end may be repeated, only a
# lookahead has parentheses. (Without escaped characters and sets.)
_LINEAR = re.compile(
  r'([^()*+?{]|\(\?[=!][^()*+?{|]*\))*([*+]|\{\d*,?\d*\})?', re.DOTALL
)
_ESCAPED_OR_SET = re.compile(r'\\.|\[(\\.|[^\]\\])*\]', re.DOTALL)
# Spaces around a character; characters for the bytes of one.
_GROWTH = {'BertNormalizer': 3.0, 'ByteLevel': 4.0}


def check(content: bytes) -> None:
  """Raises ValueError unless a `tokenizer.json` takes linear time and memory.

  That of its patterns, and a text grows `MAX_GROWTH` times at most.
  """
  files.parse(content)  # refuses values that are nested too deeply
  objects: list[dict[str, Any]] = []

  def keep(one: dict[str, Any]) -> dict[str, Any]:
    objects.append(one)
    return one

  json.loads(content, object_hook=keep)
  for one in objects:
    regex = one.get('Regex', '')
    if not _LINEAR.fullmatch(_ESCAPED_OR_SET.sub('x', str(regex))):
      expected = 'a regular expression that repeats its end at most'
      raise ValueError(f'expected {expected}, got {regex!r:.100}')
  steps = [one for one in objects if isinstance(one.get('type'), str)]
  if len(steps) > MAX_STEPS:
    raise ValueError(f'expected at most {MAX_STEPS} steps, got {len(steps)}')
  growth = math.prod(map(_growth, steps))
  if growth > MAX_GROWTH:
    expected = f'steps that make a text {MAX_GROWTH:.0f} times longer at most'
    raise ValueError(f'expected {expected}, got {growth:.1e} times')


def _growth(step: dict[str, Any]) -> float:
  """Returns how many times longer a step makes a text at most."""
  kind = step['type']
  if kind == 'Replace':
    size, new = len(step['pattern'].get('String', '')), len(step['content'])
    return max(1.0, new / size) if size else 1.0 + new
  if kind == 'Prepend':
    return 1.0 + len(step['prepend'])
  if kind == 'Precompiled':
    rules = base64.b64decode(step['precompiled_charsmap'] or '')
    end = 4 + int.from_bytes(rules[:4], 'little')  # of the trie
    return max(1.0, *(float(len(one)) for one in rules[end:].split(b'\0')))
  return _GROWTH.get(kind, 1.0)


def word_piece(file: pathlib.Path, config: Mapping[str, Any]) -> Any:
  """Returns the library's tokenizer of a vocab.txt; InvalidDataError."""
  for name, is_legal in (
    ('do_basic_tokenize', config.get('do_basic_tokenize', True) is True),
    ('tokenizer_class', not _OTHERS.match(config.get('tokenizer_class') or '')),
  ):
    if not is_legal:
      problem = f'{name}={config[name]} is not supported'
      raise InvalidDataError(f'{file}: {problem}; save it as {JSON_FILE}')
  text = files.read_bytes(file).decode('utf-8-sig').replace('\r\n', '\n')
  # A line's number is the token's id; `splitlines` also splits elsewhere.
  lines = text.removesuffix('\n').split('\n')
  vocabulary = {line: row for row, line in enumerate(lines)}
  special = special_tokens(config, WORD_PIECE)
  model = models.WordPiece(vocabulary, unk_token=special[1])
  library = tokenizers.Tokenizer(model)
  library.normalizer = normalizers.BertNormalizer()
  library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  library.decoder = decoders.WordPiece()
  library.add_special_tokens([name for name in special if name in vocabulary])
  return library


def special_tokens(config: Mapping[str, Any], kind: str) -> list[str]:
  """Returns the names of the special tokens, in the order of `ROLES`."""
  defaults = zip(ROLES, SPECIAL[kind], strict=True)
  stated = [config.get(role) or default for role, default in defaults]
  return [one['content'] if isinstance(one, Mapping) else one for one in stated]


def saved_roles(library: Any) -> dict[str, str]:
  """Returns the special tokens by role that `Tokenizer.save` has stated."""
  frame = library.post_processor
  stated = json.loads(frame.__getstate__()) if frame else {}
  tokens = stated.get('special_tokens', {})
  return {role: tokens[role]['tokens'][0] for role in ROLES if role in tokens}


def add_tokens(
  library: Any, file: pathlib.Path, config: Mapping[str, Any]
) -> None:
  """Adds `added_tokens_decoder`, {id: token}; InvalidDataError if it cannot.

  Older files, added_tokens.json, may state the same tokens.
  """
  entries = config.get('added_tokens_decoder', {})
  added = library.get_added_tokens_decoder()
  for number, entry in sorted((int(key), one) for key, one in entries.items()):
    content = str(entry['content'])
    if number not in added:
      library.add_tokens([tokenizers.AddedToken(**entry)])
    if library.token_to_id(content) != number:
      expected = f'expected {content!r:.40} to have the id {number}'
      raise InvalidDataError(f'{file}: added_tokens_decoder: {expected}')
  older = file.with_name('added_tokens.json')
  if file.suffix == '.json' or not older.is_file():
    return
  for content, number in files.read_object(older).items():
    if library.token_to_id(content) != number:
      expected = f'expected {content!r:.40} in added_tokens_decoder, too'
      raise InvalidDataError(f'{older}: {expected}')
