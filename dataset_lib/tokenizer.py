"""WordPiece and SentencePiece tokenizers, by the `tokenizers` library.

Read from a checkpoint's directory: `tokenizer.json`, or `vocab.txt` (BERT) or
`spiece.model` (ALBERT) with its `tokenizer_config.json`. Ids equal those of
Hugging Face's `BertTokenizer` with `split_special_tokens=True` and
`AlbertTokenizer`: text is data, so a typed "[SEP]" is a bracket, a word and a
bracket, never the separator.
"""

import itertools
import json
import os
import pathlib
import threading
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from dataset_lib import atomic_file, sentencepiece_model
from dataset_lib.errors import InvalidDataError, MissingDataError
from dataset_lib.source import Encoded

MIN_LENGTH = 5  # [CLS] a [SEP] b [SEP]
# Texts encoded at once: the library's own objects take a hundred times the
# memory of the ids, so they are not kept for a whole data set.
CHUNK = 4096
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
# Names in tokenizer_config.json of the arguments of BertNormalizer.
_NORMALIZER = {
  'do_lower_case': 'lowercase',
  'strip_accents': 'strip_accents',
  'tokenize_chinese_chars': 'handle_chinese_chars',
}
_WITHOUT_SPACES = (
  *('CJK', 'HIRAGANA', 'KATAKANA', 'KHMER', 'LAO', 'MYANMAR', 'THAI'),
  'TIBETAN',
)


class Tokenizer:
  """A WordPiece or SentencePiece tokenizer; threads may share it.

  Attributes:
    vocab_size: number of token ids that a model must embed.
    pad_id: id of [PAD]; likewise cls_id, sep_id, unk_id, and mask_id, which is
      None if there is no [MASK].
    special_ids: all of these and other tokens that no text gives, ascending.

  Args:
    library: a `tokenizers.Tokenizer` without truncation and padding.
    special: names of the special tokens, by the keys of `SPECIAL_TOKENS`.
  """

  def __init__(self, library: Any, special: Mapping[str, str]):
    vocabulary = library.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocabulary.values()) + 1
    ids = {name: vocabulary.get(token) for name, token in special.items()}
    self.pad_id: int = ids['pad_token']
    self.cls_id: int = ids['cls_token']
    self.sep_id: int = ids['sep_token']
    self.unk_id: int = ids['unk_token']
    self.mask_id: int | None = ids['mask_token']
    added = library.get_added_tokens_decoder()
    named = {number for number, token in added.items() if token.special}
    self.special_ids = tuple(sorted(named | {*ids.values()} - {None}))
    self._library = library
    self._truncating: dict[int, Any] = {}
    self._lock = threading.Lock()

  def encode(
    self,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    max_length: int = 512,
  ) -> Encoded:
    """Returns token ids of texts, or of pairs, with [CLS] and [SEP].

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
    tokens, types, lengths = _encode(library, items, special=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Encoded(tokens, types, offsets)

  def encode_plain(
    self, texts: Sequence[str]
  ) -> tuple[Int32[np.ndarray, ' M'], Int32[np.ndarray, ' N']]:
    """Returns token ids of whole texts, without [CLS] and [SEP].

    Returns:
      The ids of all texts, concatenated, and the length of each.
    """
    tokens, _, lengths = _encode(self._library, texts, special=False)
    return tokens, lengths

  def word_starts(self) -> Bool[np.ndarray, ' V']:
    """Returns for each id whether the token begins a word.

    A word of WordPiece is a token and the "##" tokens after it. A word of
    SentencePiece is a token that begins with a space and those after it with
    letters or digits; as in ALBERT's data generator, punctuation begins a word
    of its own, and so does text of a script without spaces between words.
    """
    names = [self._library.id_to_token(n) for n in range(self.vocab_size)]
    is_word_piece = _is_word_piece(self._library)
    result = np.array(
      [name is None or begins_word(name, is_word_piece) for name in names]
    )
    result[list(self.special_ids)] = True
    return result

  def names(self, ids: Iterable[int]) -> list[str]:
    """Returns the tokens of some ids as in the vocabulary: 'play', '##ing'."""
    return [self._library.id_to_token(int(token)) for token in ids]

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes one `tokenizer.json` from which `load` gives this tokenizer."""
    atomic_file.write_text(path, self._library.to_str(pretty=True) + '\n')

  def _truncated_at(self, max_length: int) -> Any:
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


def _encode(
  library: Any, items: Sequence[Any], special: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  parts: tuple[list[Any], ...] = [], [], []
  for start in range(0, len(items), CHUNK):
    chunk = list(items[start : start + CHUNK])
    try:
      rows = library.encode_batch_fast(chunk, add_special_tokens=special)
    except (TypeError, UnicodeError) as error:
      culprit = _culprit(chunk)
      raise ValueError(f'a text cannot be encoded: {culprit}') from error
    parts[0].append(_flat(row.ids for row in rows))
    if isinstance(chunk[0], tuple):
      parts[1].append(_flat(row.type_ids for row in rows))
    parts[2].append(np.array([len(row) for row in rows], np.int32))
  empty = np.zeros(0, np.int32)
  tokens, types, lengths = (np.concatenate([empty, *part]) for part in parts)
  return tokens, types if len(types) else np.zeros_like(tokens), lengths


def _culprit(items: list[Any]) -> str:
  for number, item in enumerate(items):
    try:
      ''.join(item).encode()
    except (TypeError, UnicodeError) as error:
      return f'number {number} of {len(items)}: {error}'
  return 'none of them alone'


def _flat(rows: Iterable[list[int]]) -> Int32[np.ndarray, ' M']:
  return np.fromiter(itertools.chain.from_iterable(rows), np.int32)


def begins_word(name: str, is_word_piece: bool) -> bool:
  """Returns whether a token begins a word; see `Tokenizer.word_starts`."""
  if is_word_piece:
    return not name.startswith('##')
  if name.startswith(sentencepiece_model.SPACE):
    return True
  scripts = [unicodedata.name(letter, '') for letter in name]
  stands_alone = any(name.startswith(_WITHOUT_SPACES) for name in scripts)
  return stands_alone or not any(map(str.isalnum, name))


def load(path: str | os.PathLike[str]) -> Tokenizer:
  """Reads a tokenizer.

  Args:
    path: a directory with `tokenizer.json`, `vocab.txt` or `spiece.model`, or
      such a file; `tokenizer_config.json` beside it is obeyed.

  Raises:
    MissingDataError: there is none.
    InvalidDataError: it is damaged, or no WordPiece tokenizer like BERT's and
      no SentencePiece tokenizer like ALBERT's.
  """
  folder = pathlib.Path(path).expanduser()
  names = (JSON_FILE, VOCABULARY_FILE, MODEL_FILE)
  files = [folder, *(folder / name for name in names)]
  file = next((file for file in files if file.is_file()), None)
  if not file:
    raise MissingDataError(
      f'no tokenizer at {folder}: expected a directory with {MODEL_FILE}, '
      f'{JSON_FILE} or {VOCABULARY_FILE}, or such a file'
    )
  try:
    library, special = _read(file)
  except UnicodeDecodeError as error:
    raise InvalidDataError(f'{file} is not UTF-8: {error}') from error
  library.no_truncation()
  library.no_padding()
  library.encode_special_tokens = True
  ids = {name: library.token_to_id(token) for name, token in special.items()}
  missing = [special[name] for name in special if ids[name] is None]
  # Nothing here needs [MASK].
  if set(missing) - {special['mask_token']}:
    raise InvalidDataError(
      f'{file}: expected the special tokens {", ".join(special.values())}, '
      f'got a vocabulary without {", ".join(missing)}; name its own in '
      'tokenizer_config.json'
    )
  pair = library.encode('', '')
  if pair.ids != [ids['cls_token'], ids['sep_token'], ids['sep_token']]:
    raise InvalidDataError(
      f'{file}: expected a pair framed as [CLS] a [SEP] b [SEP], got '
      f'{pair.tokens}'
    )
  return Tokenizer(library, special)


def _read(file: pathlib.Path) -> tuple[Any, dict[str, str]]:
  """Returns the library's tokenizer and the names of its special tokens."""
  from tokenizers import processors

  config: dict[str, Any] = {}
  for name in CONFIG_FILES:
    path = file.with_name(name)
    if path.is_file():
      try:
        config |= json.loads(path.read_text(encoding='utf-8'))
      except (ValueError, TypeError) as error:
        raise InvalidDataError(f'{path} is damaged: {error}') from error
  if file.suffix == '.model':
    library = sentencepiece_model.read(file, config)
  elif file.suffix == '.json':
    library = _from_json(file, config)
  else:
    library = _from_vocabulary(file, config)
  is_word_piece = _is_word_piece(library)
  special = dict(
    SPECIAL_TOKENS if is_word_piece else sentencepiece_model.SPECIAL_TOKENS
  )
  for name in special:
    # A string, or an object with the string in it.
    given = config.get(name, special[name])
    is_object = isinstance(given, Mapping)
    special[name] = given['content'] if is_object else str(given)
  vocabulary = library.get_vocab()
  if file.suffix not in ('.model', '.json'):
    known = [token for token in special.values() if token in vocabulary]
    library.add_special_tokens(known)
  if not is_word_piece:
    sentencepiece_model.keep_as_text(library, special.values())
  framing = special['cls_token'], special['sep_token']
  if library.post_processor is None and {*framing} <= {*vocabulary}:
    first, last = framing
    library.post_processor = processors.TemplateProcessing(
      single=f'{first} $A {last}',
      pair=f'{first} $A {last} $B:1 {last}:1',
      special_tokens=[(name, library.token_to_id(name)) for name in framing],
    )
  return library, special


def _is_word_piece(library: Any) -> bool:
  from tokenizers import models

  return isinstance(library.model, models.WordPiece)


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


def _from_vocabulary(file: pathlib.Path, config: Mapping[str, Any]) -> Any:
  import tokenizers
  from tokenizers import decoders, models, normalizers, pre_tokenizers

  extra = file.with_name('added_tokens.json')
  if config.get('do_basic_tokenize', True) is not True or extra.is_file():
    raise InvalidDataError(
      f'{file}: do_basic_tokenize=false and added_tokens.json are not '
      f'supported with {VOCABULARY_FILE}; save the tokenizer as {JSON_FILE}'
    )
  with file.open(encoding='utf-8') as lines:
    # A line's number is the token's id; only '\n' ends a line.
    vocabulary = {line.rstrip('\n'): row for row, line in enumerate(lines)}
  unknown = config.get('unk_token', SPECIAL_TOKENS['unk_token'])
  if isinstance(unknown, Mapping):
    unknown = unknown['content']
  library = tokenizers.Tokenizer(
    models.WordPiece(vocabulary, unk_token=unknown)
  )
  library.normalizer = normalizers.BertNormalizer(
    clean_text=True,
    handle_chinese_chars=config.get('tokenize_chinese_chars', True),
    strip_accents=config.get('strip_accents'),
    lowercase=config.get('do_lower_case', True),
  )
  library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  library.decoder = decoders.WordPiece()
  return library
