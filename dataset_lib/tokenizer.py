"""WordPiece and SentencePiece tokenizers, by the `tokenizers` library.

Read from what a checkpoint's directory holds: `tokenizer.json`, or `vocab.txt`
(BERT) or `spiece.model` (ALBERT) with its `tokenizer_config.json`. Ids equal
those of Hugging Face's `BertTokenizer` with `split_special_tokens=True` and
`AlbertTokenizer`: text is data, so a "[SEP]" that somebody typed is a bracket,
a word and a bracket, never the separator.
"""

import itertools
import os
import pathlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from dataset_lib import atomic_file, tokenizer_files, whole_words
from dataset_lib.errors import InvalidDataError
from dataset_lib.source import Encoded

MIN_LENGTH = 5  # [CLS] a [SEP] b [SEP]
# Texts encoded at once: the library's own objects take a hundred times the
# memory of the ids, so they are not kept for a whole data set.
CHUNK = 4096


class Tokenizer:
  """A WordPiece or SentencePiece tokenizer; threads may share it.

  Attributes:
    vocab_size: number of token ids that a model must embed.
    pad_id: id of the padding token.
    cls_id: of the token in front of a row.
    sep_id: of the token behind each text.
    unk_id: of what the vocabulary does not have.
    mask_id: of the token that hides another; None if there is none.
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

  def encode_plain(
    self, texts: Sequence[str]
  ) -> tuple[Int32[np.ndarray, ' M'], Int32[np.ndarray, ' N']]:
    """Token ids of texts as they are: whole, without [CLS] and [SEP].

    Args:
      texts: any number of texts.

    Returns:
      The ids, one text behind the other, and how many each text has.

    Raises:
      ValueError: a text cannot be encoded (a lone surrogate).
    """
    library = self._library
    tokens, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    for start in range(0, len(texts), CHUNK):
      chunk = _encode_batch(library, list(texts[start : start + CHUNK]), False)
      ids = [encoding.ids for encoding in chunk]
      tokens.append(_flat(ids))
      lengths.append(np.array([len(row) for row in ids], np.int32))
    return np.concatenate(tokens), np.concatenate(lengths)

  def word_starts(self) -> Bool[np.ndarray, ' V']:
    """Whether a token begins a word, by id; see `whole_words.begins_word`."""
    names = [self._library.id_to_token(n) for n in range(self.vocab_size)]
    is_word_piece = tokenizer_files.is_word_piece(self._library)
    result = np.array(
      [
        name is None or whole_words.begins_word(name, is_word_piece)
        for name in names
      ]
    )
    result[list(self.special_ids)] = True
    return result

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


def _encode_batch(
  library: Any, items: list[Any], add_special_tokens: bool = True
) -> list[Any]:
  try:
    return library.encode_batch_fast(
      items, add_special_tokens=add_special_tokens
    )
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
    path: a directory with `tokenizer.json`, `vocab.txt` or `spiece.model`, or
      such a file; `tokenizer_config.json` beside it is obeyed.

  Raises:
    MissingDataError: there is none.
    InvalidDataError: it is damaged, or no WordPiece tokenizer like BERT's and
      no SentencePiece tokenizer like ALBERT's.
  """
  file = tokenizer_files.find(pathlib.Path(path).expanduser())
  try:
    library, special = tokenizer_files.read(file)
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
    tokenizer_files.check_template(library, file, special)
    return Tokenizer(library, special)
  except UnicodeDecodeError as error:
    raise InvalidDataError(f'{file} is not UTF-8: {error}') from error
