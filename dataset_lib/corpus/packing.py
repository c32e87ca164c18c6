"""Texts of a corpus as rows of token ids: sentences, packing, encoding.

A sentence ends after ".", "!", "?" or "…" and closing quotes and brackets, if
white space and a word without a small first letter follow; but not after an
abbreviation ("Dr."), an initial ("J."), letters with dots ("e.g.") or "No." of
a number. The full stop of Chinese and Japanese needs no space after it.
"""

import bisect
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from dataset_lib import tokenizer
from dataset_lib.corpus.texts import Paragraph
from dataset_lib.order import splitmix64

Flags = Bool[np.ndarray, ' M']  # of tokens
TRAIN, VALIDATION = 'train', 'validation'
SPECIAL_IN_ROW = 3  # [CLS] a [SEP] b [SEP]
MIN_ROW = 2  # tokens: one in each segment
BLOCK_CHARACTERS = 2**18
_CLOSING = '"\'”’»)\\]}」』'  # noqa: RUF001
# Possessive quantifiers, so that a line of a million dots takes linear time.
# A few opening quotes, brackets or dashes may precede the next word.
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


def pack(begins_sentence: Flags, begins_word: Flags, limit: int) -> list[int]:
  """Returns the end of each row of a part of a document, ascending.

  A row takes the sentences that fit in `limit`. If only one fits, it is filled
  with the start of the next. Longer sentences are cut at words, or inside of a
  word that fills a row. No single token is left at the end if `limit` > 2.
  """
  total = len(begins_word)
  ends = [*np.flatnonzero(begins_sentence).tolist()[1:], total]
  word_starts = np.flatnonzero(begins_word).tolist()
  rows: list[int] = []
  start = 0
  while total - start >= MIN_ROW:
    end = _row_end(ends, word_starts, start, min(start + limit, total))
    if end == total - 1 and end - start > MIN_ROW:
      end = _row_end(ends, word_starts, start, total - MIN_ROW)
    rows.append(end)
    start = end
  return rows


def _row_end(ends: list[int], words: list[int], start: int, most: int) -> int:
  if most == ends[-1]:
    return most
  behind = bisect.bisect_right(ends, most)
  if behind - bisect.bisect_right(ends, start) >= 2:
    return ends[behind - 1]
  cut = words[bisect.bisect_right(words, most) - 1]
  # Fallback if no word boundary is in range.
  return cut if cut >= start + MIN_ROW else most


@dataclasses.dataclass
class Part:
  """Paragraphs of a document; whether they contain its first and last one."""

  split: str
  document: int
  where: str
  begins: bool
  ends: bool = False
  paragraphs: list[str] = dataclasses.field(default_factory=list)


def blocks(stream: Iterable[Paragraph], share: float) -> Iterator[list[Part]]:
  """Collects parts of one split to blocks; a `share` is for validation."""
  block: dict[str, list[Part]] = {VALIDATION: [], TRAIN: []}
  characters = dict.fromkeys(block, 0)
  groups = itertools.groupby(stream, lambda paragraph: bool(paragraph.text))
  documents = (group for is_text, group in groups if is_text)
  for document, paragraphs in enumerate(documents):
    split, part = _split_of(document, share), None
    for text, where in paragraphs:
      begins = part is None
      if characters[split] >= BLOCK_CHARACTERS:
        yield block[split]
        block[split], characters[split], part = [], 0, None
      if part is None:
        part = Part(split, document, where, begins)
        block[split].append(part)
      part.paragraphs.append(text)
      characters[split] += len(text)
    block[split][-1].ends = True
  yield from filter(None, block.values())


def _split_of(document: int, share: float) -> str:
  """Returns VALIDATION for a random one of every 1 / share documents."""
  if not share:
    return TRAIN
  size = round(1 / share)
  group, place = divmod(document, size)
  # 0 for group 0, so that a small corpus has a validation document.
  chosen = int(splitmix64(np.array([group], np.uint64))[0]) % size
  return VALIDATION if place == chosen else TRAIN


class Rows(NamedTuple):
  """The rows of a block, concatenated."""

  split: str
  tokens: Int32[np.ndarray, ' M']
  sentences: Flags  # where one begins
  lengths: Int64[np.ndarray, ' R']
  documents: set[int]  # that have rows
  counts: dict[str, int]
  faults: list[tuple[str, str, str]]  # arguments of `texts.Faults.count`


@functools.lru_cache(1)
def _loaded(path: pathlib.Path) -> tuple[tokenizer.Tokenizer, Any]:
  loaded = tokenizer.load(path)
  return loaded, loaded.word_starts()


def encode(path: pathlib.Path, max_length: int, block: Sequence[Part]) -> Rows:
  """Returns the rows of a block, by a tokenizer's file."""
  loaded, begins_word = _loaded(path)
  packed, documents, faults, characters = [], set(), [], 0
  for part in block:
    texts = list(itertools.chain(*map(split_sentences, part.paragraphs)))
    characters += sum(map(len, texts))
    tokens, lengths = loaded.encode_plain(texts)
    lengths = lengths[lengths > 0]
    sentences = np.zeros(len(tokens), bool)
    sentences[np.cumsum(lengths) - lengths] = True
    ends = pack(sentences, begins_word[tokens], max_length - SPECIAL_IN_ROW)
    kept = max(ends, default=0)
    if ends:
      documents.add(part.document)
    if not ends or kept < len(tokens):
      faults.append(('too_short', part.where, f'{len(tokens) - kept} tokens'))
    elif len(lengths) == 1 and part.begins and part.ends:
      faults.append(('one_sentence_document', part.where, f'{kept} tokens'))
    rows = np.diff(np.array(ends, np.int64), prepend=0)
    packed.append((tokens[:kept], sentences[:kept], rows))
  tokens, sentences, rows = map(np.concatenate, zip(*packed, strict=True))
  counts = {
    'documents': sum(part.begins for part in block),
    'characters': characters,
    'words': int(begins_word[tokens].sum()),
    'unknown_tokens': int((tokens == loaded.unk_id).sum()),
    'tokens': len(tokens),
    'sentences': int(sentences.sum()),
    'rows': len(rows),
  }
  split = block[0].split
  return Rows(split, tokens, sentences, rows, documents, counts, faults)
