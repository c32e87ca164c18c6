"""CoNLL-U: sentences whose words have a head and a dependency label.

The format of Universal Dependencies (universaldependencies.org/format.html): a
word is a line of ten columns, an empty line ends a sentence. Lines of
multiword tokens (`1-2`) and of empty nodes (`1.1`) are checked and left out. A
sentence with a broken line is left out as a whole, since its tree would lack a
word, and every broken line is named.
"""

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from dataset_lib.errors import BadRecord, InvalidDataError
from dataset_lib.source import Encoded
from dataset_lib.text_files import Line, read_lines
from dataset_lib.tokenizer import MIN_LENGTH, Tokenizer

_COLUMNS = 10
_FRAME = 2  # [CLS] and [SEP]
# A word, several of them as one token, and an empty node after a word.
_ID = re.compile(
  r'([1-9]\d{,8})|([1-9]\d{,8})-([1-9]\d{,8})|(0|[1-9]\d{,8})\.[1-9]\d*',
  re.ASCII,
)
_HEAD = re.compile(r'\d{1,9}', re.ASCII)
_SENT_ID = re.compile(r'#\s*sent_id\s*=\s*(.*)')


@dataclasses.dataclass(frozen=True)
class Word:
  """One word of a sentence.

  Attributes:
    form: the word as written; it may have spaces inside.
    upos: universal part of speech, '_' if there is none.
    head: number of its head in the sentence, from 1; 0 for the root.
    label: of the dependency on the head, such as 'nmod:poss'.
  """

  form: str
  upos: str
  head: int
  label: str

  @property
  def universal_label(self) -> str:
    """The label without the language's addition: 'nmod'."""
    return self.label.partition(':')[0]


@dataclasses.dataclass(frozen=True)
class Sentence:
  """Words of a tree, the sentence's id ('' if none), and its first line."""

  words: tuple[Word, ...]
  sent_id: str
  line: int

  @property
  def forms(self) -> tuple[str, ...]:
    """The words as written."""
    return tuple(word.form for word in self.words)


def read(
  path: str | os.PathLike[str],
) -> tuple[list[Sentence], list[BadRecord]]:
  """Reads a file, plain or gzip.

  Returns:
    The good sentences, and the faults in the lines of the others, each with
    its file and line.

  Raises:
    InvalidDataError: the file is empty or damaged, or has no good sentence.
    FileNotFoundError: there is none.
  """
  path = pathlib.Path(path).expanduser()
  sentences: list[Sentence] = []
  bad: list[BadRecord] = []
  count = 0
  groups = itertools.groupby(
    read_lines(path), lambda line: bool(line[1].strip())
  )
  for has_text, lines in groups:
    if has_text:
      count += 1
      block = list(lines)
      sentence = Sentence(*_sentence(path, block, bad), block[0][0])
      sentences += [sentence] * bool(sentence.words)
  if not sentences:
    first = f'; the first: {bad[0]}' if bad else ''
    raise InvalidDataError(
      f'{path}: expected sentences in CoNLL-U, none of its {count} can be '
      f'used{first}'
    )
  return sentences, bad


def _sentence(
  path: pathlib.Path, block: Sequence[Line], bad: list[BadRecord]
) -> tuple[tuple[Word, ...], str]:
  """Returns the words of a tree and its id; no words if `bad` has grown."""
  words: list[Word] = []
  places: list[str] = []
  ranges: list[tuple[int, str]] = []
  sent_id, before = '', len(bad)

  def add(where: str, kind: str, message: str) -> None:
    bad.append(BadRecord(kind, where, message))

  for number, line in block:
    where = f'{path}, line {number}'
    try:
      text = line.decode('utf-8')
      if text.startswith('#'):
        match = _SENT_ID.fullmatch(text)
        sent_id = match[1].strip() if match else sent_id
        continue
      columns = text.split('\t')
      if len(columns) != _COLUMNS:
        expected = f'expected {_COLUMNS} columns, got {len(columns)}'
        raise BadRecord('wrong_columns', '', expected)
      # After a broken line the numbers are not checked.
      last = _last_word(columns[0], len(words) if len(bad) == before else None)
      if last:
        ranges.append((last, where))
      if columns[0].isdigit():
        words.append(_word(columns))
        places.append(where)
    except UnicodeDecodeError as error:
      add(where, 'not_utf8', str(error))
    except BadRecord as fault:
      add(where, fault.kind, fault.message)
  if len(bad) == before:
    count, where = len(words), f'{path}, line {block[0][0]}'
    if not words:
      add(where, 'no_words', 'expected a word, got none')
    for number, (word, place) in enumerate(zip(words, places, strict=True), 1):
      if word.head > count or word.head == number:
        expected = f'expected another word of the {count} as the head, or 0'
        add(place, 'illegal_head', f'{expected}, got {word.head}')
    for last, place in ranges:
      if last > count:
        expected = f'expected a range up to {count}'
        add(place, 'illegal_id', f'{expected}, got one up to {last}')
    roots = sum(word.head == 0 for word in words)
    if len(bad) == before and roots != 1:
      add(where, 'not_one_root', f'expected one root, got {roots}')
  return tuple(words if len(bad) == before else ()), sent_id


def _last_word(number: str, before: int | None) -> int:
  """Returns the last word of a multiword token, which must exist; else 0.

  Args:
    number: the first column.
    before: words in the lines before, None if that is not known.
  """
  match = _ID.fullmatch(number)
  if not match:
    message = f'expected a number like 1, 1-2 or 1.1, got {number!r:.40}'
    raise BadRecord('illegal_id', '', message)
  word, first, last, empty = match.groups()
  if before is not None:
    expected = before if empty else before + 1
    if int(word or first or empty) != expected:
      message = f'expected number {expected}, got {number}'
      raise BadRecord('wrong_order', '', message)
  if last and int(last) < int(first):
    message = f'expected an ascending range, got {number}'
    raise BadRecord('illegal_id', '', message)
  return int(last or 0)


def _word(columns: Sequence[str]) -> Word:
  """Returns a word; BadRecord if it has no form, head or label."""
  _, form, _, upos, _, _, head, label, _, _ = columns
  if not form.strip():
    raise BadRecord('empty_form', '', 'expected a form, got nothing')
  if not _HEAD.fullmatch(head):
    message = f'expected the number of a head, got {head!r:.40}'
    raise BadRecord('illegal_head', '', message)
  if label.strip() in ('', '_'):
    message = f'expected a dependency label, got {label!r:.40}'
    raise BadRecord('no_label', '', message)
  return Word(form, upos, int(head), label.strip())


def encode_words(
  tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], max_length: int
) -> tuple[Encoded, list[Int32[np.ndarray, '_ 2']]]:
  """Returns token ids of sentences given as words, and the tokens of each word.

  Words are encoded one by one, which gives the tokens of the text with spaces
  between all words, since the tokenizers split at spaces first.

  Returns:
    The rows, each `[CLS] words [SEP]` of at most `max_length` tokens; and for
    each sentence the place of its words in its row, (first token, one after the
    last). A word may have no tokens. Words after the first one that does not
    fit are left out: there are then fewer places than words.

  Raises:
    ValueError: a word cannot be encoded, or max_length is too small.
  """
  if max_length < MIN_LENGTH:
    raise ValueError(
      f'max_length: expected at least {MIN_LENGTH}, got {max_length}'
    )
  # A treebank has ten times as many words as different ones.
  known = sorted({word for words in sentences for word in words})
  # One more token than fits, so that a word that was cut is seen.
  encoded = tokenizer.encode(known, None, max_length + 1)
  bounds = zip(encoded.offsets[:-1], encoded.offsets[1:], strict=True)
  tokens = {
    word: encoded.tokens[start + 1 : stop - 1]
    for word, (start, stop) in zip(known, bounds, strict=True)
  }
  first, last = tokenizer.encode([''], None, max_length).tokens.reshape(_FRAME)
  rows, places = [], []
  for words in sentences:
    row, spans = _word_places([tokens[word] for word in words], max_length)
    rows.append(np.concatenate([[first], row, [last]]).astype(np.int32))
    places.append(spans)
  lengths = [len(row) for row in rows]
  offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
  flat = np.concatenate([np.zeros(0, np.int32), *rows])
  return Encoded(flat, np.zeros_like(flat), offsets), places


def _word_places(
  pieces: Sequence[np.ndarray], max_length: int
) -> tuple[Int32[np.ndarray, ' M'], Int32[np.ndarray, 'W 2']]:
  """Returns the tokens of the words that fit, and their places after [CLS]."""
  ends = 1 + np.cumsum([len(piece) for piece in pieces]).astype(np.int32)
  fitting = int(np.searchsorted(ends, max_length - 1, side='right'))
  kept = pieces[:fitting]
  row = np.concatenate([np.zeros(0, np.int32), *kept]).astype(np.int32)
  stops = ends[:fitting]
  starts = stops - np.array([len(piece) for piece in kept], np.int32)
  return row, np.stack([starts, stops], axis=1).reshape(-1, 2).astype(np.int32)
