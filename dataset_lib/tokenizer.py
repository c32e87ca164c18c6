"""WordPiece tokenizers of BERT-like checkpoints, by the `tokenizers` library.

Read from what a checkpoint's directory holds: `tokenizer.json`, or `vocab.txt`
with its `tokenizer_config.json`. Ids equal those of Hugging Face's
`BertTokenizer` with `split_special_tokens=True`: text is data, so a "[SEP]"
that somebody typed is a bracket, a word and a bracket, never the separator.
"""

import itertools
import json
import os
import pathlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from dataset_lib import atomic_file
from dataset_lib.errors import InvalidDataError, MissingDataError
from dataset_lib.source import Encoded

JSON_FILE, VOCABULARY_FILE = 'tokenizer.json', 'vocab.txt'
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
MIN_LENGTH = 5  # [CLS] a [SEP] b [SEP]
# Texts encoded at once: the library's own objects take a hundred times the
# memory of the ids, so they are not kept for a whole data set.
CHUNK = 4096


class Tokenizer:
  """A WordPiece tokenizer; threads may share it.

  Attributes:
    vocab_size: number of token ids that a model must embed.
    pad_id: id of the padding token.

  Args:
    library: a `tokenizers.Tokenizer` without truncation and padding.
    pad_token: name of the padding token.
  """

  def __init__(self, library: Any, pad_token: str):
    vocabulary = library.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocabulary.values()) + 1
    self.pad_id = vocabulary[pad_token]
    self._library = library
    self._truncating: dict[int, Any] = {}
    self._lock = threading.Lock()

  def encode(
    self,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    max_length: int = 512,
  ) -> Encoded:
    """Token ids of texts, or of pairs of texts, with [CLS] and [SEP].

    Args:
      texts: the texts, or the first of each pair.
      pairs: the second of each pair, as many as `texts`.
      max_length: longest row; a longer one loses tokens from the end of its
        longer text first.

    Raises:
      ValueError: a text cannot be encoded (a lone surrogate), the numbers of
        texts differ, or max_length has no room for the special tokens.
    """
    library = self._truncated_at(max_length)
    items: Sequence[Any] = texts
    if pairs is not None:
      items = list(zip(texts, pairs, strict=True))
    tokens, types, lengths = [], [], []
    for start in range(0, len(items), CHUNK):
      chunk = _encode_batch(library, list(items[start : start + CHUNK]))
      ids = [encoding.ids for encoding in chunk]
      lengths += [len(row) for row in ids]
      tokens.append(_flat(ids))
      if pairs is not None:
        types.append(_flat(encoding.type_ids for encoding in chunk))
    flat = np.concatenate([np.zeros(0, np.int32), *tokens])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat_types = np.concatenate(types) if types else np.zeros_like(flat)
    return Encoded(flat, flat_types, offsets)

  def names(self, ids: Iterable[int]) -> list[str]:
    """The tokens of some ids as a person reads them: 'play', '##ing'."""
    return [self._library.id_to_token(int(token)) for token in ids]

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes one `tokenizer.json` from which `load` gives this tokenizer.

    The file is replaced at once: the old one or the new one.
    """
    atomic_file.write_text(path, self._library.to_str(pretty=True) + '\n')

  def _truncated_at(self, max_length: int) -> Any:
    """The library's tokenizer with this limit, made once.

    The limit is a state of the library's object; changing it while another
    thread encodes would be an error or, worse, that thread's limit.
    """
    import tokenizers

    if max_length < MIN_LENGTH:
      raise ValueError(
        f'max_length: expected at least {MIN_LENGTH}, got {max_length}'
      )
    with self._lock:
      if max_length not in self._truncating:
        library = tokenizers.Tokenizer.from_str(self._library.to_str())
        library.encode_special_tokens = True
        library.enable_truncation(max_length, strategy='longest_first')
        self._truncating[max_length] = library
      return self._truncating[max_length]


def _encode_batch(library: Any, items: list[Any]) -> list[Any]:
  try:
    return library.encode_batch_fast(items)
  except (TypeError, UnicodeError) as error:
    raise ValueError(f'a text cannot be encoded: {_culprit(items)}') from error


def _culprit(items: list[Any]) -> str:
  for number, item in enumerate(items):
    for text in item if isinstance(item, tuple) else (item,):
      try:
        text.encode('utf-8')
      except (AttributeError, UnicodeError) as error:
        return f'number {number} of {len(items)}: {error}'
  return 'none of them alone'


def _flat(rows: Iterable[list[int]]) -> Int32[np.ndarray, ' M']:
  return np.fromiter(itertools.chain.from_iterable(rows), np.int32)


def load(path: str | os.PathLike[str]) -> Tokenizer:
  """Reads a tokenizer.

  Args:
    path: a directory with `tokenizer.json` or `vocab.txt`, or such a file;
      `tokenizer_config.json` beside it is obeyed.

  Raises:
    MissingDataError: there is none.
    InvalidDataError: it is damaged, or no WordPiece tokenizer like BERT's.
  """
  file = _find(pathlib.Path(path).expanduser())
  config = _config(file.parent)
  special = {
    name: _content(config.get(name, default))
    for name, default in SPECIAL_TOKENS.items()
  }
  try:
    if file.suffix == '.json':
      library = _from_json(file, config, special)
    else:
      library = _from_vocabulary(file, config, special)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    missing = [
      name for name in special.values() if library.token_to_id(name) is None
    ]
    # Nothing here needs [MASK].
    if set(missing) - {special['mask_token']}:
      raise InvalidDataError(
        f'{file}: expected the special tokens {", ".join(special.values())}, '
        f'got a vocabulary without {", ".join(missing)}; name its own in '
        'tokenizer_config.json'
      )
    _check_template(library, file, special)
    return Tokenizer(library, special['pad_token'])
  except UnicodeDecodeError as error:
    raise InvalidDataError(f'{file} is not UTF-8: {error}') from error


def _find(path: pathlib.Path) -> pathlib.Path:
  if path.is_file():
    return path
  for name in (JSON_FILE, VOCABULARY_FILE):
    if (path / name).is_file():
      return path / name
  raise MissingDataError(
    f'no tokenizer at {path}: expected a directory with {JSON_FILE} or '
    f'{VOCABULARY_FILE}, or such a file'
  )


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


def _from_json(
  file: pathlib.Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> Any:
  import tokenizers
  from tokenizers import models, normalizers

  text = file.read_text(encoding='utf-8')
  try:
    library = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # the library raises nothing narrower
    raise InvalidDataError(f'{file} is damaged: {error}') from error
  if not isinstance(library.model, models.WordPiece):
    raise InvalidDataError(
      f'{file}: expected a WordPiece tokenizer, got '
      f'{type(library.model).__name__}'
    )
  normalizer = library.normalizer
  if isinstance(normalizer, normalizers.BertNormalizer):
    for name, field in _NORMALIZER.items():
      if name in config:
        setattr(normalizer, field, config[name])
    library.normalizer = normalizer
  if library.post_processor is None:
    _add_template(library, special)
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


def _check_template(
  library: Any, file: pathlib.Path, special: Mapping[str, str]
) -> None:
  """Refuses a tokenizer that does not frame a pair as BERT does."""
  got = library.encode('', '').tokens
  last = special['sep_token']
  if got != [special['cls_token'], last, last]:
    raise InvalidDataError(
      f'{file}: expected a pair framed as [CLS] a [SEP] b [SEP], got {got}'
    )
