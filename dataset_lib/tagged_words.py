"""Words with tags, in CoNLL-U and other CoNLL files, as rows of token ids.

A line is a word, its columns separated by tabs, or spaces where it is not
CoNLL-U; an empty line ends a sentence. The first piece of a word has the tag,
as in BERT (Devlin et al., 2019, section 5.3); other tokens the label -1.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Len, Predicate
from jaxtyping import Int32

from core.errors import BadRecord
from dataset_lib import source, splits, tokenizer
from dataset_lib.source import require
from dataset_lib.tables import decoded, read_lines
from dataset_lib.text_rows import TextRows
from dataset_lib.text_tasks import find_file
from dataset_lib.tokenizer import Encoded, Tokenizer

IGNORED = -1  # label of a token without a tag
NO_TAG = '_'
MAX_TAGS = 1000  # more are a wrong column
_COLUMNS = 10  # of CoNLL-U
_NAMED = {'upos': 3, 'xpos': 4, 'deprel': 7}
_DOCUMENT = b'-DOCSTART-'  # first column of a line that CoNLL-2003 inserts
_CONLLU, _CONLL = ('.conllu',), ('.conll', '.txt', '.tsv')
# A word, or several of them as one token, or an empty node after a word.
_ID = re.compile(r'[1-9]\d{,8}|[1-9]\d{,8}-[1-9]\d{,8}|\d{1,9}\.[1-9]\d*', re.A)
_NUMBER = re.compile(r'-?\d{1,3}', re.A)


def encode_words(
  tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], max_length: int
) -> tuple[Encoded, list[Int32[np.ndarray, '_ 2']]]:
  """Encodes sentences to rows `[CLS] words [SEP]`; also returns words' spans.

  Words that do not fit are left out, from the `truncation_side` on; at the left
  they have an empty span.
  """
  tokens, lengths = tokenizer.encode_plain(list(itertools.chain(*sentences)))
  rows, places, first, start = [], [], 0, 0
  is_left = tokenizer.truncation_side == 'left'
  for words in sentences:
    sizes = lengths[first : first + len(words)]
    totals = np.cumsum(sizes[::-1] if is_left else sizes)
    kept = int(np.searchsorted(totals, max_length - 2, side='right'))
    skip = len(words) - kept if is_left else 0
    ends = np.cumsum([1, *sizes[skip : skip + kept]], dtype=np.int32)
    ends = np.append(np.ones(skip, np.int32), ends)
    places.append(np.stack([ends[:-1], ends[1:]], axis=1))
    begin = start + sizes[:skip].sum()
    ids = tokens[begin : begin + ends[-1] - 1]
    rows.append(np.array([tokenizer.cls_id, *ids, tokenizer.sep_id], np.int32))
    start += sizes.sum()
    first += len(words)
  offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
  flat = np.concatenate([np.zeros(0, np.int32), *rows])
  return Encoded(flat, np.zeros_like(flat), offsets), places


class TaggedFile:
  """Sentences of a file as lists of (word, tag); see `TaggedWords.column`."""

  def __init__(self, path: Path, column: str):
    self.path, self._column = path, column
    lines = [x for x in read_lines(path) if not x[1].startswith(_DOCUMENT)]
    groups = itertools.groupby(lines, lambda line: not line[1].strip())
    self._blocks = [[*block] for is_blank, block in groups if not is_blank]

  def __len__(self) -> int:
    return len(self._blocks)

  def __getitem__(self, row: int) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    width = 0
    for number, line in self._blocks[row]:
      try:
        columns = self._columns(line, len(pairs) + 1)
        width = width or len(columns)
        message = f'expected {width} columns, got {len(columns)}'
        require(len(columns) in (0, width), 'wrong_columns', message)
        pairs += [self._pair(columns)] if columns else []
      except BadRecord as bad:
        place = f'{self.path}, line {number}'
        raise BadRecord(bad.kind, place, bad.message) from bad
    if not pairs:
      raise BadRecord('no_words', self.where(row), 'expected a word, got none')
    return pairs

  def where(self, row: int) -> str:
    """Returns the file of a sentence and its first line there."""
    return f'{self.path}, line {self._blocks[row][0][0]}'

  def _columns(self, line: bytes, number: int) -> list[str]:
    """Returns the columns of a line.

    Of CoNLL-U (universaldependencies.org/format.html), word `number`, or [] for
    a comment, a multiword token (`1-2`) and an empty node (`1.1`).
    """
    if _NUMBER.fullmatch(self._column):
      # Bytes: a no-break space is part of a word.
      return [*map(decoded, line.split(b'\t' if b'\t' in line else None))]
    columns = decoded(line).split('\t')
    if (name := columns[0]).startswith('#'):
      return []
    message = f'expected {_COLUMNS} columns, got {len(columns)}'
    require(len(columns) == _COLUMNS, 'wrong_columns', message)
    message = f'expected a number like 1, 1-2 or 1.1, got {name!r:.40}'
    require(_ID.fullmatch(name), 'illegal_id', message)
    if not name.isdigit():
      return []
    message = f'expected number {number}, got {name}'
    require(int(name) == number, 'wrong_order', message)
    require(columns[1].strip(), 'empty_form', 'expected a form, got nothing')
    return columns

  def _pair(self, columns: Sequence[str]) -> tuple[str, str]:
    """Returns a word and its tag, `NO_TAG` for a key that MISC lacks."""
    column, count, word = self._column, len(columns), columns[1:2]
    if column in _NAMED:
      tag = columns[_NAMED[column]]
    elif _NUMBER.fullmatch(column):
      message = f'expected a word and column {column}, got {count} columns'
      within = -count <= int(column) < count
      require(within and count > 1, 'wrong_columns', message)
      word, tag = columns[:1], columns[int(column)]
    else:
      misc = (item.partition('=') for item in columns[-1].split('|'))
      tag = {key: value for key, _, value in misc}.get(column, NO_TAG)
    pair = word[0].strip(), tag.strip()
    require(all(pair), 'empty_form', f'expected a word and a tag, got {pair}')
    return pair


@dataclasses.dataclass(kw_only=True, eq=False)
class TaggedWords(TextRows):
  """Sentences whose words have tags.

  Reads `<split>.conllu` and `<language>-ud-<split>.conllu`, or `<split>` with
  another ending, or one file as the train split, whose tags are the classes.
  """

  split: source.TextSplit
  directory: Annotated[
    str, Len(1), 'a folder of train, dev and test files, or one file'
  ]
  column: Annotated[
    str,
    Predicate(re.compile(rf'{_NUMBER.pattern}|[A-Za-z]\w*').fullmatch),
    'upos, xpos, deprel or a key of the column MISC, of CoNLL-U; of other '
    'files a number from 0, or -1 for the last one',
  ] = '-1'

  @classmethod
  def sketch(cls, config: Any, classes: int, examples: int) -> Any:
    """See `TextRows.sketch`; the label of a row is one of each token."""
    info, rows = super().sketch(config, classes, examples)
    label = info.input_shape, 'int32'
    return info, rows | {'label': label, 'left_out': ((), 'int32')}

  def __post_init__(self) -> None:
    loaded = tokenizer.load(self.tokenizer)
    names = self._class_names(
      self._file('train'), lambda pairs: {tag for _, tag in pairs} - {NO_TAG},
      MAX_TAGS, f'tags in column {self.column}',
    )  # fmt: skip
    ids = {name: number for number, name in enumerate(names)} | {NO_TAG: -1}

    def read(pairs: Sequence[tuple[str, str]]) -> tuple[list[str], list[int]]:
      for _, tag in pairs:
        message = f'tag {tag!r:.40} is not in the train split'
        require(tag in ids, 'illegal_label', message)
      return [word for word, _ in pairs], [ids[tag] for _, tag in pairs]

    rows = self._read('tags', self._file, read)
    texts = [text for text, _ in rows]
    encoded, places = encode_words(loaded, texts, self.max_length)
    self._tags: list[Int32[np.ndarray, ' L']] = []
    left_out = np.zeros(len(rows), np.int32)
    for row, ((_, tags), spans) in enumerate(zip(rows, places, strict=True)):
      label = np.full(encoded.lengths[row], IGNORED, np.int32)
      for tag, (first, end) in zip(tags, spans, strict=False):
        # A word of control characters has no piece.
        label[first:end][:1] = tag
      tagged = sum(tag != IGNORED for tag in tags)
      left_out[row] = tagged - np.count_nonzero(label != IGNORED)
      self._tags.append(label)
    self._hold(loaded, names, encoded, left_out, 'tags')
    digest = splits.digest(encoded.tokens, *self._tags)
    self.info = dataclasses.replace(self.info, digest=digest)
    self.padding = {**self.padding, 'label': IGNORED}

  def records(self, indices: source.Indices, length: int | None = None) -> Any:
    """Returns rows as `TokenSource`, with 'label' int32 `[B, L]`.

    'left_out' `[B]` counts the tagged words without a token.
    """
    arrays = super().records(indices, length)
    arrays['left_out'] = arrays.pop('label')
    rows = [self._tags[index] for index in indices]
    labels = source.pad_rows(rows, arrays['tokens'].shape, IGNORED)
    return arrays | {'label': labels}

  def record(self, index: int) -> dict[str, Any]:
    """Returns a row as `TokenSource`, with 'label' int32 `[L]`."""
    return super().record(index) | {'label': self._tags[index]}

  def _file(self, split: str) -> TaggedFile:
    path = Path(self.directory).expanduser()
    if split == 'train' and path.is_file():
      return TaggedFile(path, self.column)
    stems = (split,) if split in ('train', 'test') else ('dev', 'valid')
    ends = _CONLL if _NUMBER.fullmatch(self.column) else _CONLLU
    packed = itertools.product(stems, ends, ('', '.gz'))
    names = [*map(''.join, packed)]
    names += [one.name for one in sorted(path.glob(f'*-ud-{stems[0]}.conllu*'))]
    return TaggedFile(find_file('tags', split, [path], names), self.column)
