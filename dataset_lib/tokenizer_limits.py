"""Limits of what a `tokenizer.json` of others makes of a text."""

import base64
import json
import math
import re
from typing import Any

from dataset_lib import text_files

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
  """Raises ValueError where steps of a `tokenizer.json` may take for ever.

  Patterns must be matched in linear time, and all steps together make a text
  longer `MAX_GROWTH` times at most.
  """
  text_files.parse(content)  # refuses values that are nested too deeply
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
