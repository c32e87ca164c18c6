"""CoNLL-U: sentences whose words have a head and a dependency label.

The format of universaldependencies.org/format.html. Lines of multiword tokens
(`1-2`) and of empty nodes (`1.1`) are left out. Sentences with an invalid line
are left out, as their trees would lack a word.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from dataset_lib.errors import BadRecord, InvalidDataError
from dataset_lib.source import require
from dataset_lib.tagged_words import conllu_columns, read_blocks

_HEAD = re.compile(r'\d{1,9}', re.A)


class Word(NamedTuple):
  """One word of a sentence."""

  form: str  # as written; it may have spaces inside
  head: int  # number of its head in the sentence, from 1; 0 for the root
  label: str  # of the dependency on the head, such as 'nmod:poss'

  @property
  def universal_label(self) -> str:
    """The label without the language's addition: 'nmod'."""
    return self.label.partition(':')[0]


Sentence = tuple[Word, ...]


def read(
  path: str | os.PathLike[str],
) -> tuple[list[Sentence], list[BadRecord]]:
  """Reads good sentences, and the faults of the others with file and line.

  A file without a good sentence is an InvalidDataError.
  """
  path = pathlib.Path(path).expanduser()
  blocks = read_blocks(path)
  sentences, bad = [], []
  for block in blocks:
    words: dict[str, Word] = {}  # by their place
    faults: list[BadRecord] = []
    for number, line in block:
      place = f'{path}, line {number}'
      try:
        if word := _word(line, None if faults else len(words) + 1):
          words[place] = word
      except BadRecord as fault:
        faults.append(BadRecord(fault.kind, place, fault.message))
    faults = faults or _faults_of_tree(f'{path}, line {block[0][0]}', words)
    bad += faults
    sentences += [] if faults else [tuple(words.values())]
  if not sentences:
    first = f'; the first: {bad[0]}' if bad else ''
    found = f'none of its {len(blocks)} can be used{first}'
    raise InvalidDataError(f'{path}: expected sentences in CoNLL-U, {found}')
  return sentences, bad


def _word(line: bytes, expected: int | None) -> Word | None:
  """Returns the word of a line if it has one, with the expected number."""
  columns = conllu_columns(line)
  if columns is None:
    return None
  name = columns[0]
  message = f'expected number {expected}, got {name}'
  require(expected in (None, int(name)), 'wrong_order', message)
  form, head, label = columns[1], columns[6], columns[7].strip()
  message = f'expected the number of a head, got {head!r:.40}'
  require(_HEAD.fullmatch(head), 'illegal_head', message)
  message = f'expected a dependency label, got {label!r:.40}'
  require(label not in ('', '_'), 'no_label', message)
  return Word(form, int(head), label)


def _faults_of_tree(first: str, words: Mapping[str, Word]) -> list[BadRecord]:
  count, roots = len(words), sum(not word.head for word in words.values())
  if not words:
    return [BadRecord('no_words', first, 'expected a word, got none')]
  expected = f'expected another word of the {count} as the head, or 0'
  faults = [
    BadRecord('illegal_head', place, f'{expected}, got {word.head}')
    for number, (place, word) in enumerate(words.items(), 1)
    if word.head > count or word.head == number
  ]
  if faults or roots == 1:
    return faults
  return [BadRecord('not_one_root', first, f'expected one root, got {roots}')]
