"""Texts of a corpus as rows of token ids: sentences, packing, encoding.

A sentence ends after ".", "!", "?" or "…" and the quotes and brackets that
close there, if white space follows and then a word that does not begin with a
small letter; but not after an abbreviation ("Dr."), a single letter ("J."),
letters with dots between ("e.g.") or a number's "No.". The full stop of Chinese
and Japanese needs no space after it.
"""

import bisect
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from dataset_lib import tokenizer
from dataset_lib.corpus import MIN_ROW, SPECIAL_IN_ROW, TRAIN, VALIDATION
from dataset_lib.corpus_texts import Paragraph
from dataset_lib.order import splitmix64

BLOCK_CHARACTERS = 2**18
_CLOSING = '"\'”’»)\\]}」』'  # noqa: RUF001
# Matched from its first character only: a line of a million dots takes linear
# time. A few opening quotes, brackets or dashes may precede the next word.
_END = re.compile(
  rf'(?<![.!?…])([.!?…]++)([{_CLOSING}]*+)\s++(?=\W{{0,8}}(\w))'
  rf'|[。！？]++[{_CLOSING}]*+\s*+'  # noqa: RUF001
)
_WORD = re.compile(r'(?<!\w)[^\W\d_]+(?:\.[^\W\d_]+)*\Z')
_LOOK_BACK = 16  # characters before a full stop that may be an abbreviation

# Before names, and where a sentence hardly ends.
_ABBREVIATIONS = (
  ' mr mrs ms messrs mme mlle dr drs prof rev revd hon sen rep gov gen col maj '
  'capt cpt lt sgt cmdr adm st ste sr jr esq bros co corp inc ltd mt ft '
  'vs viz cf eg ie al approx dept est univ assn ave blvd rd '
  'jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat '
  'sun hr hrn fr bzw usw ca evtl vgl nr str sig dott sra mm '
)
# Before numbers: "No. 5", but "No. He went."
_NUMBERED = ' no nos nr num fig figs p pp vol vols ch chap art sec par op ver '


def split_sentences(text: str) -> list[str]:
  """Returns the sentences of a paragraph; joined, they are the paragraph."""
  sentences, start = [], 0
  for match in _END.finditer(text):
    if match[1] is None or _ends_here(text, match):
      sentences.append(text[start : match.end()])
      start = match.end()
  if start < len(text):
    sentences.append(text[start:])
  return sentences


def _ends_here(text: str, match: re.Match[str]) -> bool:
  mark, closing, following = match.groups()
  if following.islower():
    return False
  if mark != '.' or closing:
    return True
  before = text[max(0, match.start() - _LOOK_BACK) : match.start()]
  word = _WORD.search(before)
  if not word:
    return True
  name = word[0]
  if len(name) == 1:
    return name == 'I'  # the initial of a name, or the pronoun
  lower = f' {name.lower()} '
  if lower in _NUMBERED:
    return not following.isdigit()
  letters_with_dots = all(len(part) == 1 for part in name.split('.'))
  return not letters_with_dots and lower not in _ABBREVIATIONS


def pack(
  sentence_lengths: Int[np.ndarray, ' S'],
  begins_word: Bool[np.ndarray, ' M'],
  limit: int,
) -> list[int]:
  """Returns the end of each row of a part of a document, ascending.

  A row takes whole sentences as long as they fit in `limit`. Where only one
  fits, the beginning of the next fills the row, cut at a word, so that there is
  a sentence border to split the row at. A longer sentence is cut at words, or
  inside of a word that fills a row. Where a single token would be left at the
  end, the row before ends earlier, if the limit is above 2.
  """
  ends = np.cumsum(sentence_lengths).tolist()
  words = np.flatnonzero(begins_word).tolist()
  total = len(begins_word)
  rows: list[int] = []
  start = 0
  while total - start >= MIN_ROW:
    end = _row_end(ends, words, start, min(start + limit, total))
    if end == total - 1 and end - start > MIN_ROW:
      end = _row_end(ends, words, start, total - MIN_ROW)
    rows.append(end)
    start = end
  return rows


def _row_end(
  ends: Sequence[int], words: Sequence[int], start: int, furthest: int
) -> int:
  """Returns the end of the row from `start`, at most `furthest`."""
  if furthest == ends[-1]:
    return furthest
  behind = bisect.bisect_right(ends, furthest)
  if behind - bisect.bisect_right(ends, start) >= 2:
    return ends[behind - 1]
  cut = words[bisect.bisect_right(words, furthest) - 1]
  # No word may begin there; and two tokens are the least.
  return cut if cut >= start + MIN_ROW else furthest


@dataclasses.dataclass
class Part:
  """Paragraphs of one document, and whether it begins and ends with them."""

  split: str
  document: int
  where: str
  begins: bool
  ends: bool = False
  paragraphs: list[str] = dataclasses.field(default_factory=list)


def blocks(
  stream: Iterable[Paragraph], validation_share: float
) -> Iterator[list[Part]]:
  """Collects parts of one split to blocks of about `BLOCK_CHARACTERS`.

  A document that is longer than a block goes on in the next one; only its rows
  end there.
  """
  block: dict[str, list[Part]] = {VALIDATION: [], TRAIN: []}
  characters = dict.fromkeys(block, 0)
  document, part = 0, None
  for text, where in stream:
    if not text:
      if part:
        part.ends = True
        document, part = document + 1, None
      continue
    split = _split_of(document, validation_share)
    begins = part is None
    if characters[split] >= BLOCK_CHARACTERS:
      yield block[split]
      block[split], characters[split], part = [], 0, None
    if part is None:
      part = Part(split, document, where, begins)
      block[split].append(part)
    part.paragraphs.append(text)
    characters[split] += len(text)
  yield from filter(None, block.values())


def _split_of(document: int, validation_share: float) -> str:
  """Returns the validation split for one document of every 1 / share.

  Of the first group it is the first, so that a small corpus has one at all, of
  the others a random one.
  """
  if not validation_share:
    return TRAIN
  size = round(1 / validation_share)
  group, place = divmod(document, size)
  # 0 for group 0, which splitmix64 leaves as it is.
  chosen = int(splitmix64(np.array([group], np.uint64))[0]) % size
  return VALIDATION if place == chosen else TRAIN


@dataclasses.dataclass
class Rows:
  """The rows of a block, concatenated.

  `documents` has the number of each document, and of its rows in this block,
  `faults` the arguments of `corpus_texts.Faults.count`.
  """

  split: str
  tokens: Int32[np.ndarray, ' M']
  sentence_lengths: Int64[np.ndarray, ' S']
  row_lengths: Int64[np.ndarray, ' R']
  documents: list[tuple[int, int]]
  counts: dict[str, int]
  faults: list[tuple[str, str, str]]


@functools.lru_cache(1)
def _loaded(
  path: pathlib.Path,
) -> tuple[tokenizer.Tokenizer, Bool[np.ndarray, ' V']]:
  given = tokenizer.load(path)
  return given, given.word_starts()


def encode(path: pathlib.Path, max_length: int, block: Sequence[Part]) -> Rows:
  """Returns the rows of a block, by a tokenizer's file."""
  given, begins_word = _loaded(path)
  packed, documents, faults, characters = [], [], [], 0
  for part in block:
    texts = [text for one in part.paragraphs for text in split_sentences(one)]
    tokens, lengths = given.encode_plain(texts)
    lengths = lengths[lengths > 0].astype(np.int64)
    ends = pack(lengths, begins_word[tokens], max_length - SPECIAL_IN_ROW)
    kept = ends[-1] if ends else 0
    if not ends or kept < len(tokens):
      faults.append(('too_short', part.where, f'{len(tokens) - kept} tokens'))
      starts = np.cumsum(lengths) - lengths
      lengths = np.minimum(lengths, kept - starts)[starts < kept]
    elif len(lengths) == 1 and part.begins and part.ends:
      faults.append(('one_sentence_document', part.where, f'{kept} tokens'))
    if ends:
      documents.append((part.document, len(ends)))
    rows = np.diff(np.array(ends, np.int64), prepend=0)
    packed.append((tokens[:kept], lengths, rows))
    characters += sum(map(len, texts))
  tokens, lengths, rows = map(np.concatenate, zip(*packed, strict=True))
  counts = {
    'documents': sum(part.begins for part in block),
    'characters': characters,
    'words': int(begins_word[tokens].sum()),
    'unknown_tokens': int((tokens == given.unk_id).sum()),
  }
  return Rows(block[0].split, tokens, lengths, rows, documents, counts, faults)
