"""The tokenizer files beside a Hugging Face model, from one tokenizer.json."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

# As BERT calls them, and as ALBERT does.
_SPECIAL = {
  'unk_token': ('[UNK]', '<unk>'),
  'sep_token': ('[SEP]',),
  'pad_token': ('[PAD]', '<pad>'),
  'cls_token': ('[CLS]',),
  'mask_token': ('[MASK]',),
}


def tokenizer_files(
  file: str | os.PathLike[str], fields: Mapping[str, Any]
) -> dict[str, str]:
  """The files of a tokenizer by name, with their contents.

  Args:
    file: a tokenizer.json of WordPiece, or of a SentencePiece unigram model.
    fields: of the model; see `huggingface_config.to_fields`.

  Raises:
    ValueError: the file is no such tokenizer.
  """
  text = pathlib.Path(file).read_text(encoding='utf-8')
  try:
    content = json.loads(text)
    vocabulary = _vocabulary(content)
    normalizer = content['normalizer'] or {}
    pieces = isinstance(content['model']['vocab'], list)
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f'{file}: expected a tokenizer.json, got something else: {error!r}'
    ) from error
  files = {'tokenizer.json': text}
  by_id = sorted(vocabulary, key=vocabulary.__getitem__)
  # In vocab.txt a line's number is the id, so there must be no holes; the
  # scores of pieces have no place in it.
  dense = [vocabulary[token] for token in by_id] == list(range(len(by_id)))
  if dense and not pieces:
    files['vocab.txt'] = ''.join(f'{token}\n' for token in by_id)
  inputs = ['input_ids', 'token_type_ids', 'attention_mask']
  if not fields['type_vocab_size']:
    inputs.remove('token_type_ids')
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': fields['max_positions'],
    'model_input_names': inputs,
    'clean_up_tokenization_spaces': False,
    # Text is data: a "[SEP]" that somebody typed is no separator.
    'split_special_tokens': True,
  }
  if not pieces:
    config |= {
      'do_lower_case': normalizer.get('lowercase', False),
      'strip_accents': normalizer.get('strip_accents'),
      'tokenize_chinese_chars': normalizer.get('handle_chinese_chars', False),
    }
  for name, tokens in _SPECIAL.items():
    known = [token for token in tokens if token in vocabulary]
    if known:
      config[name] = known[0]
  files['tokenizer_config.json'] = to_json(config)
  return files


def _vocabulary(content: Mapping[str, Any]) -> dict[str, int]:
  """The ids of the tokens; those of pieces are their places."""
  known = content['model']['vocab']
  if isinstance(known, list):
    known = {piece: place for place, (piece, _) in enumerate(known)}
  added = {token['content']: token['id'] for token in content['added_tokens']}
  return added | known


def to_json(content: Mapping[str, Any]) -> str:
  """The text of a file of JSON."""
  return json.dumps(content, indent=2, ensure_ascii=False) + '\n'
