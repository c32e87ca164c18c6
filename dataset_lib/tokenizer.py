"""WordPiece, SentencePiece and byte-level BPE, by the `tokenizers` library.

Ids equal those of Hugging Face's `BertTokenizer`, `AlbertTokenizer` and others
with `split_special_tokens=True`: a typed "[SEP]" is never the separator.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Bool, Int32, Int64
from tokenizers import normalizers, processors

from core import files
from core.errors import InvalidDataError, MissingDataError
from dataset_lib import tokenizer_files
from dataset_lib.tokenizer_files import BYTES, SPECIAL, UNIGRAM, WORD_PIECE

MIN_LENGTH, MAX_LENGTH = 5, 65536  # [CLS] a [SEP] b [SEP]
# Characters encoded at once, and of a text at least; bounds the memory.
CHUNK, CHUNK_TEXT = 2**22, 2**10
MAX_VOCABULARY = 2**22  # ids; a model has a row of parameters for each
PART, MAX_WORD = 16, 128  # characters of a token at first; tokens of a word
CONFIG_FILES = ('tokenizer_config.json', 'special_tokens_map.json')
# Names in tokenizer_config.json of the attributes of BertNormalizer.
_NORMALIZER = {
  'do_lower_case': 'lowercase',
  'strip_accents': 'strip_accents',
  'tokenize_chinese_chars': 'handle_chinese_chars',
}
Texts = Sequence[str]
_PAIR = 5  # parts of a pair: [CLS] a [SEP] b [SEP]
_PROBE = "a B 北京 é, 12 ``''  [SEP]<unk>\u200b", 'c'


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Concatenated rows of token ids; `token_types` are segments, 0 or 1."""

  tokens: Int32[np.ndarray, ' M']
  token_types: Int32[np.ndarray, ' M']
  offsets: Int64[np.ndarray, ' O']  # starts of the rows, and the last end

  @property
  def lengths(self) -> Int32[np.ndarray, ' N']:
    """Tokens in each row."""
    return np.diff(self.offsets).astype(np.int32)


class Tokenizer:
  """A tokenizer of the module's kinds; threads may share it.

  `library` is a `tokenizers.Tokenizer`, `special` the ids of its special tokens
  in the order of `ROLES`; that of [MASK] may be None.
  """

  def __init__(self, library: Any, special: Sequence[Any], side: str = 'right'):
    self.truncation_side = side  # of rows that exceed max_length
    self.vocab_size = max(library.get_vocab().values()) + 1
    self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special
    self._special = special
    added = library.get_added_tokens_decoder()
    named = {number for number, token in added.items() if token.special}
    # Tokens that no text gives, ascending.
    self.special_ids = tuple(sorted(named | {*special} - {None}))
    self._library = library
    self._truncating = functools.cache(self._truncating_at)

  def encode(
    self, texts: Texts, pairs: Texts | None = None, max_length: int = 512
  ) -> Encoded:
    """Returns token ids of texts, or of pairs, with [CLS] and [SEP].

    A row longer than `max_length` loses tokens of its longer text first. Raises
    ValueError if a text cannot be encoded, or max_length is too small.
    """
    items = texts if pairs is None else [*zip(texts, pairs, strict=True)]
    tokens, types, lengths = _encode(self._truncating(max_length), items, True)
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
    return Encoded(tokens, types, offsets)

  def shortened(self, text: str, max_length: int) -> str:
    """Returns a part of a text, or all, from which `encode` gives equal rows.

    Exceptions: the tokens of a word, but of WordPiece, longer than the row;
    and if both texts of a pair are, which of them keeps an odd token.
    """
    size = PART * max_length
    while len(text) > size:
      is_right = self.truncation_side == 'right'
      part = text[:size] if is_right else text[-size:]
      # The cut changes the tokens of one word.
      if len(self.encode_plain([part])[0]) >= max_length + MAX_WORD:
        return part
      size *= 4
    return text

  def encode_plain(
    self, texts: Texts
  ) -> tuple[Int32[np.ndarray, ' M'], Int32[np.ndarray, ' N']]:
    """Returns the ids of all texts without [CLS] and [SEP], and the lengths."""
    tokens, _, lengths = _encode(self._library, texts, False)
    return tokens, lengths

  def word_starts(self) -> Bool[np.ndarray, ' V']:
    """Returns for each id whether the token begins a word."""
    names = map(self._library.id_to_token, range(self.vocab_size))
    begins = tokenizer_files.BEGINS_WORD[type(self._library.model).__name__]
    result = np.array([not name or bool(begins(name)) for name in names])
    result[list(self.special_ids)] = True
    return result

  def names(self, ids: Iterable[int]) -> list[str]:
    """Returns the tokens of some ids as in the vocabulary: 'play', '##ing'."""
    return [self._library.id_to_token(int(token)) for token in ids]

  def decode(self, ids: Int32[np.ndarray, ' L']) -> str:
    """Returns the text of token ids, with [CLS] and [SEP]."""
    return self._library.decode(ids.tolist(), skip_special_tokens=False)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a `tokenizer.json` from which `load` gives this tokenizer."""
    files.write_text(path, self.to_json())

  def to_json(self) -> str:
    """Returns the text of a `tokenizer.json`."""
    is_left = self.truncation_side == 'left'  # a part of its truncation
    library = self._truncating(MAX_LENGTH) if is_left else self._library
    return library.to_str(pretty=True) + '\n'

  @functools.cached_property
  def digest(self) -> str:
    """A checksum of what determines the ids of a text; equal when saved."""
    # The library reads scores back with another last digit.
    text = self._library.to_str()
    parts = json.loads(text, parse_float=lambda one: f'{float(one):.5g}')
    names = 'model', 'normalizer', 'pre_tokenizer', 'added_tokens'
    hashed = [parts[name] for name in names]
    # Only names of its own, so that older checksums hold.
    special_names = [self._library.id_to_token(n or 0) for n in self._special]
    usual = SPECIAL[parts['model']['type']]
    hashed += [special_names[:4]] * (special_names[:4] != [*usual[:4]])
    pair = parts['post_processor']['pair']
    hashed += [pair] * (len(pair) > _PAIR)
    text = json.dumps(hashed, sort_keys=True)
    return f'sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}'

  def preprocessing(self, max_length: int) -> dict[str, Any]:
    """Returns the field of a `DatasetInfo` for texts of this tokenizer."""
    rows = dict(max_length=max_length, truncation_side=self.truncation_side)
    return {'tokenizer': self.digest, **rows}

  def _truncating_at(self, max_length: int) -> Any:
    if max_length < MIN_LENGTH:
      expected = f'expected at least {MIN_LENGTH}, got {max_length}'
      raise ValueError(f'max_length: {expected}')
    library = tokenizers.Tokenizer.from_str(self._library.to_str())
    library.encode_special_tokens = True
    how: Any = dict(strategy='longest_first', direction=self.truncation_side)
    library.enable_truncation(max_length, **how)
    return library


def _encode(library: Any, items: Sequence[Any], special: bool) -> Any:
  """Returns ids and, with [CLS], types of all rows, and the rows' lengths."""
  columns = [[np.zeros(0, np.int32)] for _ in range(3)]
  texts = ([item] if isinstance(item, str) else item for item in items)
  totals = itertools.accumulate(CHUNK_TEXT + sum(map(len, x)) for x in texts)
  for _, chunk in itertools.groupby(items, lambda _: next(totals) // CHUNK):
    with _named('a text cannot be encoded, as a lone surrogate', ValueError):
      rows = library.encode_batch_fast([*chunk], add_special_tokens=special)
    ids, lengths = (row.ids for row in rows), ([len(row)] for row in rows)
    types = (row.type_ids for row in rows if special)
    for column, parts in zip(columns, (ids, types, lengths), strict=True):
      column.append(np.fromiter(itertools.chain.from_iterable(parts), np.int32))
  return tuple(map(np.concatenate, columns))


@contextlib.contextmanager
def _named(what: str, kind: Any = InvalidDataError) -> Iterator[None]:
  """Names what an error is of; the library's panics are no Exceptions."""
  try:
    yield
  except (InvalidDataError, KeyboardInterrupt, SystemExit, MemoryError):
    raise
  except BaseException as error:
    raise kind(f'{what}: {error!r}') from error


def load(path: str | os.PathLike[str]) -> Tokenizer:
  """Reads a tokenizer of BERT's, ALBERT's or RoBERTa's kind, of a path.

  Raises MissingDataError or InvalidDataError.
  """
  folder = pathlib.Path(path).expanduser()
  names = tokenizer_files.NAMES
  paths = [folder, *(folder / name for name in names)]
  file = next(filter(pathlib.Path.is_file, paths), None)
  if not file:
    expected = f'{names[2]}, {names[0]} or {names[1]}'
    raise MissingDataError(f'no tokenizer at {folder}: expected {expected}')
  config: dict[str, Any] = {}
  for part in map(file.with_name, CONFIG_FILES):
    with contextlib.suppress(FileNotFoundError):
      # The second is of older versions, where it counts more.
      more, is_new = files.read_object(part), 'added_tokens_decoder' in config
      config = more | config if is_new else config | more
  if file.suffix == '.json':
    return from_json(files.read_bytes(file), str(file), config)
  with _named(f'{file} is damaged'):
    if file.suffix == '.model':
      library = tokenizer_files.unigram(file, config)
      tokenizer_files.check(library.to_str().encode())
    else:
      library = tokenizer_files.word_piece(file, config)
    return _completed(library, file, config)


def from_json(
  content: bytes, place: str, config: Mapping[str, Any] | None = None
) -> Tokenizer:
  """Reads a `tokenizer.json`; `place` is for errors, as of `load`."""
  with _named(f'{place} is damaged'):
    tokenizer_files.check(content)
    library = tokenizers.Tokenizer.from_buffer(content)
    return _completed(library, pathlib.Path(place), config or {})


def _frame(special: Sequence[str], ids: Sequence[Any], between: int) -> Any:
  """Returns the frame of a text or of a pair, with so many [SEP] between."""
  first, last = special[2:4]
  # The ids of the frame, and what `tokenizer_files.saved_roles` reads.
  tokens: list[Any] = [(first, ids[2]), (last, ids[3])]
  roles = zip(tokenizer_files.ROLES, ids, special, strict=True)
  for role, number, name in roles:
    if number is not None:
      tokens.append({'id': role, 'ids': [number], 'tokens': [name]})
  # RoBERTa has one type.
  second = f'{last} $B {last}' if between == 2 else f'$B:1 {last}:1'
  text = f'{first} $A {last}'
  return processors.TemplateProcessing(text, f'{text} {second}', tokens)


def _completed(
  library: Any, file: pathlib.Path, config: Mapping[str, Any]
) -> Tokenizer:
  """Checks the library's tokenizer, and sets it as in `config`."""
  kind = type(library.model).__name__
  if kind not in SPECIAL:
    expected = 'a WordPiece, BPE or Unigram (SentencePiece) tokenizer'
    raise InvalidDataError(f'{file}: expected {expected}, got {kind}')
  stated = {key: value for key, value in config.items() if value is not None}
  names = {**tokenizer_files.saved_roles(library), **stated}
  vocabulary = library.get_vocab(with_added_tokens=True)
  special = tokenizer_files.special_tokens(names, kind, vocabulary)
  ids = [library.token_to_id(token) for token in special]
  if None in ids[:-1]:  # nothing here needs [MASK]
    missing = [name for name in special if library.token_to_id(name) is None]
    expected = f'expected the special tokens {", ".join(special)}'
    got = f'got a vocabulary without {", ".join(missing)}'
    advice = 'name its own in tokenizer_config.json'
    raise InvalidDataError(f'{file}: {expected}, {got}; {advice}')
  if isinstance(library.normalizer, normalizers.BertNormalizer):
    for name in _NORMALIZER.keys() & config.keys():
      setattr(library.normalizer, _NORMALIZER[name], config[name])
  tokenizer_files.add_tokens(library, file, config)
  if kind == UNIGRAM:
    tokenizer_files.keep_as_text(library, special)
  side = (library.truncation or {}).get('direction', 'right')
  side = config.get('truncation_side', side)
  library.no_truncation()
  library.no_padding()
  library.encode_special_tokens = True
  own, rows = library.post_processor, []
  between = library.encode('', '').ids.count(ids[3]) - 1 if own else 1
  frame = _frame(special, ids, between)
  # A file's own is not used: it might give other types to other texts.
  for processor in (own or frame, frame):
    library.post_processor = processor
    rows += [library.encode('a'), library.encode('a', 'b')]
  if [row.ids for row in rows[:2]] != [row.ids for row in rows[2:]]:
    expected = 'a text framed as [CLS] a [SEP], a pair as [CLS] a [SEP] b [SEP]'
    expected += ' or [CLS] a [SEP] [SEP] b [SEP]'
    got = f'got {rows[0].tokens}, {rows[1].tokens}'
    raise InvalidDataError(f'{file}: expected {expected}, {got}')
  types = [row.type_ids for row in rows]
  numbers, probe = library.get_vocab().values(), library.encode(*_PROBE)
  for field, is_legal, expected in (
    ('truncation_side', side in ('left', 'right'), 'left or right'),
    ('vocab', len({*numbers}) == len(numbers), 'distinct ids'),
    ('vocab', max(*numbers, *probe.ids) < MAX_VOCABULARY,
     f'ids below {MAX_VOCABULARY}'),
    # A model of a BPE reads no types.
    ('type_id', kind == BYTES or types[:2] == types[2:],
     '0 of a text, 1 of its pair'),
    ('max_input_chars_per_word',
     kind != WORD_PIECE or library.model.max_input_chars_per_word <= 1000,
     'at most 1000; longer words are unknown'),
  ):  # fmt: skip
    if not is_legal:
      raise InvalidDataError(f'{file}: {field}: expected {expected}')
  return Tokenizer(library, ids, side)
