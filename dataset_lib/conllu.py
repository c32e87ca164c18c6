"""CoNLL-U: sentences whose words have a head and a dependency label.

The format of Universal Dependencies (universaldependencies.org/format.html): a
word is a line of ten columns, an empty line ends a sentence. Lines of
multiword tokens (`1-2`) and of empty nodes (`1.1`) are no words of the tree:
they are checked and left out. A sentence with a broken line is left out as a
whole, since its tree would lack a word, and every broken line is named.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from dataset_lib.errors import BadRecord, InvalidDataError
from dataset_lib.text_files import read_lines

_COLUMNS = 10
_BOM = '\ufeff'.encode()
# A word, several of them as one token, and an empty node behind a word.
_ID = re.compile(
  r'([1-9]\d{,8})|([1-9]\d{,8})-([1-9]\d{,8})|(0|[1-9]\d{,8})\.[1-9]\d*',
  re.ASCII,
)
_HEAD = re.compile(r'\d{1,9}', re.ASCII)
_SENT_ID = re.compile(r'#\s*sent_id\s*=\s*(.*)')
_NONE = '_'

Line = tuple[int, bytes]


@dataclasses.dataclass(frozen=True)
class Word:
  """One word of a sentence.

  Attributes:
    form: as it is written; it may have spaces inside.
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
    """The label without what a language adds to it: 'nmod'."""
    return self.label.partition(':')[0]


@dataclasses.dataclass(frozen=True)
class Sentence:
  """One sentence.

  Attributes:
    words: of the tree, in their order.
    sent_id: its name in the file, '' if it has none.
    line: number of its first line in the file, from 1.
  """

  words: tuple[Word, ...]
  sent_id: str
  line: int

  @property
  def forms(self) -> tuple[str, ...]:
    """The words as they are written."""
    return tuple(word.form for word in self.words)


def read(
  path: str | os.PathLike[str],
) -> tuple[list[Sentence], list[BadRecord]]:
  """Reads a file.

  Args:
    path: the file, plain or gzip.

  Returns:
    The good sentences, and what is wrong with the lines of the others, each
    with its file and line.

  Raises:
    InvalidDataError: the file is empty or damaged, or has no good sentence.
    FileNotFoundError: there is none.
  """
  path = pathlib.Path(path).expanduser()
  sentences, bad, count = [], [], 0
  for block in _blocks(read_lines(path)):
    count += 1
    sentence, faults = _sentence(path, block)
    bad += faults
    if sentence is not None:
      sentences.append(sentence)
  if not sentences:
    first = f'; the first: {bad[0]}' if bad else ''
    raise InvalidDataError(
      f'{path}: expected sentences in CoNLL-U, none of its {count} can be '
      f'used{first}'
    )
  return sentences, bad


def _blocks(lines: Sequence[Line]) -> Iterator[list[Line]]:
  """The lines of each sentence; the end of the file may end one, too."""
  block: list[Line] = []
  for number, line in lines:
    line = line.removeprefix(_BOM) if number == 1 else line
    if line.strip():
      block.append((number, line))
    elif block:
      yield block
      block = []
  if block:
    yield block


def _sentence(
  path: pathlib.Path, block: Sequence[Line]
) -> tuple[Sentence | None, list[BadRecord]]:
  """A sentence, or what is wrong with its lines."""
  words: list[Word] = []
  places: list[str] = []
  ranges: list[tuple[int, str]] = []
  bad: list[BadRecord] = []
  sent_id = ''
  for number, line in block:
    where = f'{path}, line {number}'
    try:
      text = _text(line)
      if text.startswith('#'):
        match = _SENT_ID.fullmatch(text)
        sent_id = match[1].strip() if match else sent_id
        continue
      columns = _split(text)
      # Behind a broken line the numbers say nothing.
      last = _last_word(columns[0], None if bad else len(words))
      if last:
        ranges.append((last, where))
      if columns[0].isdigit():
        words.append(_word(columns))
        places.append(where)
    except BadRecord as fault:
      bad.append(BadRecord(fault.kind, where, fault.message))
  where = f'{path}, line {block[0][0]}'
  if not bad:
    bad = _faults_of_tree(words, places, ranges, where)
  sentence = Sentence(tuple(words), sent_id, block[0][0])
  return (None if bad else sentence), bad


def _text(line: bytes) -> str:
  try:
    return line.decode('utf-8')
  except UnicodeDecodeError as error:
    raise BadRecord('not_utf8', '', str(error)) from error


def _split(text: str) -> list[str]:
  columns = text.split('\t')
  if len(columns) != _COLUMNS:
    message = f'expected {_COLUMNS} columns, got {len(columns)}'
    raise BadRecord('wrong_columns', '', message)
  return columns


def _last_word(number: str, before: int | None) -> int:
  """The last word of a multiword token, which must exist; else 0.

  Args:
    number: the first column.
    before: words in the lines before, None if that is not known.

  Raises:
    BadRecord: it is none, or not the one that follows.
  """
  match = _ID.fullmatch(number)
  if not match:
    message = f'expected a number like 1, 1-2 or 1.1, got {number!r:.40}'
    raise BadRecord('illegal_id', '', message)
  word, first, last, behind = match.groups()
  if before is not None:
    expected = before if behind else before + 1
    if int(word or first or behind) != expected:
      message = f'expected number {expected}, got {number}'
      raise BadRecord('wrong_order', '', message)
  if not last:
    return 0
  if int(last) < int(first):
    message = f'expected an ascending range, got {number}'
    raise BadRecord('illegal_id', '', message)
  return int(last)


def _word(columns: Sequence[str]) -> Word:
  """A word; BadRecord if it has no form, head or label."""
  _, form, _, upos, _, _, head, label, _, _ = columns
  if not form.strip():
    raise BadRecord('empty_form', '', 'expected a form, got nothing')
  if not _HEAD.fullmatch(head):
    message = f'expected the number of a head, got {head!r:.40}'
    raise BadRecord('illegal_head', '', message)
  if label.strip() in ('', _NONE):
    message = f'expected a dependency label, got {label!r:.40}'
    raise BadRecord('no_label', '', message)
  return Word(form, upos, int(head), label.strip())


def _faults_of_tree(
  words: Sequence[Word],
  places: Sequence[str],
  ranges: Sequence[tuple[int, str]],
  where: str,
) -> list[BadRecord]:
  """What is wrong between the lines of a sentence, of which each is good."""
  if not words:
    return [BadRecord('no_words', where, 'expected a word, got none')]
  count, bad = len(words), []
  for number, (word, place) in enumerate(zip(words, places, strict=True), 1):
    if word.head > count or word.head == number:
      message = (
        f'expected another word of the {count} as the head, or 0, got '
        f'{word.head}'
      )
      bad.append(BadRecord('illegal_head', place, message))
  for last, place in ranges:
    if last > count:
      message = f'expected a range up to {count}, got one up to {last}'
      bad.append(BadRecord('illegal_id', place, message))
  roots = sum(word.head == 0 for word in words)
  if not bad and roots != 1:
    bad.append(
      BadRecord('not_one_root', where, f'expected one root, got {roots}')
    )
  return bad
