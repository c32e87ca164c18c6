"""The files of a checkpoint that hold its tokenizer, and what is beside them.

`tokenizer.json`, or `vocab.txt` (WordPiece) or `spiece.model` (SentencePiece)
with `tokenizer_config.json`.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dataset_lib import sentencepiece_model
from dataset_lib.errors import InvalidDataError, MissingDataError

JSON_FILE, VOCABULARY_FILE = 'tokenizer.json', 'vocab.txt'
MODEL_FILE = sentencepiece_model.MODEL_FILE
CONFIG_FILES = ('special_tokens_map.json', 'tokenizer_config.json')
SPECIAL_TOKENS = {
  'unk_token': '[UNK]',
  'sep_token': '[SEP]',
  'pad_token': '[PAD]',
  'cls_token': '[CLS]',
  'mask_token': '[MASK]',
}
# What tokenizer_config.json calls them: the arguments of BertNormalizer.
_NORMALIZER = {
  'do_lower_case': 'lowercase',
  'strip_accents': 'strip_accents',
  'tokenize_chinese_chars': 'handle_chinese_chars',
}


def find(path: pathlib.Path) -> pathlib.Path:
  """The file of a tokenizer: the path, or one in that directory.

  Raises:
    MissingDataError: there is none.
  """
  if path.is_file():
    return path
  for name in (JSON_FILE, VOCABULARY_FILE, MODEL_FILE):
    if (path / name).is_file():
      return path / name
  raise MissingDataError(
    f'no tokenizer at {path}: expected a directory with {MODEL_FILE}, '
    f'{JSON_FILE} or {VOCABULARY_FILE}, or such a file'
  )


def read(file: pathlib.Path) -> tuple[Any, dict[str, str]]:
  """The library's tokenizer and the names of its special tokens.

  Raises:
    InvalidDataError: the file, or one beside it, is damaged or of another kind.
    UnicodeDecodeError: it is not UTF-8.
  """
  config = _config(file.parent)
  if file.suffix == '.model':
    library = sentencepiece_model.read(file, config)
  elif file.suffix == '.json':
    library = _from_json(file, config)
  else:
    special = _special(config, SPECIAL_TOKENS)
    return _from_vocabulary(file, config, special), special
  if is_word_piece(library):
    special = _special(config, SPECIAL_TOKENS)
  else:
    special = _special(config, sentencepiece_model.SPECIAL_TOKENS)
    sentencepiece_model.keep_as_text(library, special.values())
  framing = {special['cls_token'], special['sep_token']}
  if library.post_processor is None and framing <= {*library.get_vocab()}:
    _add_template(library, special)
  return library, special


def _special(
  config: Mapping[str, Any], defaults: Mapping[str, str]
) -> dict[str, str]:
  return {
    name: _content(config.get(name, default))
    for name, default in defaults.items()
  }


def is_word_piece(library: Any) -> bool:
  """Whether a `tokenizers.Tokenizer` is one of WordPiece."""
  from tokenizers import models

  return isinstance(library.model, models.WordPiece)


def _config(folder: pathlib.Path) -> dict[str, Any]:
  """What the files beside a tokenizer say of it."""
  config: dict[str, Any] = {}
  for name in CONFIG_FILES:
    path = folder / name
    if path.is_file():
      try:
        config |= json.loads(path.read_text(encoding='utf-8'))
      except (ValueError, TypeError) as error:
        raise InvalidDataError(f'{path} is damaged: {error}') from error
  return config


def _content(token: Any) -> str:
  """A special token is a string, or an object with the string in it."""
  return token['content'] if isinstance(token, Mapping) else str(token)


def _from_json(file: pathlib.Path, config: Mapping[str, Any]) -> Any:
  import tokenizers
  from tokenizers import models, normalizers

  text = file.read_text(encoding='utf-8')
  try:
    library = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # the library raises nothing narrower
    raise InvalidDataError(f'{file} is damaged: {error}') from error
  if not isinstance(library.model, (models.WordPiece, models.Unigram)):
    raise InvalidDataError(
      f'{file}: expected a WordPiece tokenizer, got '
      f'{type(library.model).__name__}; a Unigram one (SentencePiece) is read '
      'too'
    )
  normalizer = library.normalizer
  if isinstance(normalizer, normalizers.BertNormalizer):
    for name, field in _NORMALIZER.items():
      if name in config:
        setattr(normalizer, field, config[name])
    library.normalizer = normalizer
  return library


def _from_vocabulary(
  file: pathlib.Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> Any:
  import tokenizers
  from tokenizers import decoders, models, normalizers, pre_tokenizers

  extra = file.parent / 'added_tokens.json'
  if config.get('do_basic_tokenize', True) is not True or extra.is_file():
    raise InvalidDataError(
      f'{file}: do_basic_tokenize=false and added_tokens.json are not '
      f'supported with {VOCABULARY_FILE}; save the tokenizer as {JSON_FILE}'
    )
  with file.open(encoding='utf-8') as lines:
    # A line's number is the token's id; only '\n' ends a line.
    vocabulary = {line.rstrip('\n'): row for row, line in enumerate(lines)}
  library = tokenizers.Tokenizer(
    models.WordPiece(vocabulary, unk_token=special['unk_token'])
  )
  library.normalizer = normalizers.BertNormalizer(
    clean_text=True,
    handle_chinese_chars=config.get('tokenize_chinese_chars', True),
    strip_accents=config.get('strip_accents'),
    lowercase=config.get('do_lower_case', True),
  )
  library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  library.decoder = decoders.WordPiece()
  known = [token for token in special.values() if token in vocabulary]
  library.add_special_tokens(known)
  if {special['cls_token'], special['sep_token']} <= set(known):
    _add_template(library, special)
  return library


def _add_template(library: Any, special: Mapping[str, str]) -> None:
  from tokenizers import processors

  first, last = special['cls_token'], special['sep_token']
  library.post_processor = processors.TemplateProcessing(
    single=f'{first} $A {last}',
    pair=f'{first} $A {last} $B:1 {last}:1',
    special_tokens=[
      (token, library.token_to_id(token)) for token in (first, last)
    ],
  )


def check_template(
  library: Any, file: pathlib.Path, special: Mapping[str, str]
) -> None:
  """Refuses a tokenizer that does not frame a pair as BERT does."""
  got = library.encode('', '').tokens
  last = special['sep_token']
  if got != [special['cls_token'], last, last]:
    raise InvalidDataError(
      f'{file}: expected a pair framed as [CLS] a [SEP] b [SEP], got {got}'
    )
