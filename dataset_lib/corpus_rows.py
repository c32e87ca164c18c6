"""Texts of a corpus as rows of token ids: sentences, packing, encoding.

Sentences are split by rules, without losing a character. A sentence ends after
".", "!", "?" or "…" and the quotes and brackets that close there, if white
space follows and then a word that does not begin with a small letter. None ends
after an abbreviation ("Dr."), a single letter ("J."), letters with dots between
("e.g.") or a number's "No.". The full stop of Chinese and Japanese needs no
space after it. Nothing else depends on the language, and a mistake costs
little: rows of training are cut elsewhere too.
"""

import bisect
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int64, Shaped

from dataset_lib import tokenizer
from dataset_lib.corpus import MIN_ROW, token_dtype
from dataset_lib.corpus_texts import Paragraph

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


def _set(names: str) -> frozenset[str]:
  return frozenset(names.split())


# Before names, and where a sentence hardly ends.
ABBREVIATIONS = _set(
  'mr mrs ms messrs mme mlle dr drs prof rev revd hon sen rep gov gen col maj '
  'capt cpt lt sgt cmdr adm st ste sr jr esq bros co corp inc ltd mt ft '
  'vs viz cf eg ie al approx dept est univ assn ave blvd rd '
  'jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat '
  'sun hr hrn fr bzw usw ca evtl vgl nr str sig dott sra mm'
)
# Before numbers: "No. 5", but "No. He went."
NUMBERED = _set(
  'no nos nr num fig figs p pp vol vols ch chap art sec par op ver'
)


def split_sentences(text: str) -> list[str]:
  """Returns the sentences of a paragraph; joined, they are the paragraph.

  The end of a line is white space like any other, and part of the sentence
  before it.
  """
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
  if name.lower() in NUMBERED:
    return not following.isdigit()
  letters_with_dots = all(len(part) == 1 for part in name.split('.'))
  return not letters_with_dots and name.lower() not in ABBREVIATIONS


def pack(
  sentence_lengths: Int[np.ndarray, ' S'],
  begins_word: Bool[np.ndarray, ' M'],
  limit: int,
) -> list[int]:
  """Returns the end of each row of a part of a document, ascending.

  A row is consecutive sentences and becomes two segments. Rows follow each
  other without a gap:

  - A row takes whole sentences as long as they fit.
  - Where only one whole sentence fits, the row is filled with the beginning of
    the next, cut at a word, so that there is a sentence border to split it at;
    the rest of that sentence begins the next row.
  - A sentence that is longer than a row is cut at words, or inside of a word
    that fills a row.
  - A single token cannot be two segments. Where one would be left at the end,
    the row before ends earlier. A document of one token is left out.

  Args:
    sentence_lengths: tokens of each sentence, at least 1.
    begins_word: whether each token begins a word.
    limit: most tokens in a row, at least `MIN_ROW`; if it is 2, a single token
      may be left at the end.
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
  first = bisect.bisect_right(ends, start)
  behind = bisect.bisect_right(ends, furthest)
  whole_sentences = behind - first
  if whole_sentences >= 2 or furthest == ends[-1]:
    return furthest if furthest == ends[-1] else ends[behind - 1]
  cut = words[bisect.bisect_right(words, furthest) - 1]
  # No word may begin there; and two tokens are the least.
  return cut if cut >= start + MIN_ROW else furthest


@dataclasses.dataclass
class Part:
  """Paragraphs of one document, and whether it begins and ends with them."""

  document: int
  where: str
  begins: bool
  paragraphs: list[str]
  ends: bool = False


@dataclasses.dataclass
class Block:
  """Parts of documents of one split."""

  split: str
  parts: list[Part]
  characters: int = 0


def blocks(
  stream: Iterable[Paragraph],
  split_of: Callable[[int], str],
  size: int,
) -> Iterator[Block]:
  """Collects documents to blocks of about `size` characters.

  Borders of blocks follow from the text alone, so that the result does not
  depend on the number of processes. A document that is longer than a block goes
  on in the next one; only its rows end there.

  Args:
    stream: paragraphs; an empty one ends a document.
    split_of: returns the split of a document, by its number from 0.
    size: a block is full when it has this many characters.
  """
  open_blocks: dict[str, Block] = {}
  document, part = 0, None
  for paragraph in stream:
    if not paragraph.text:
      if part:
        part.ends = True
        document, part = document + 1, None
      continue
    split = split_of(document)
    block = open_blocks.setdefault(split, Block(split, []))
    begins = part is None
    if block.characters >= size:
      yield block
      block = open_blocks[split] = Block(split, [])
      part = None
    if part is None:
      part = Part(document, paragraph.where, begins, [])
      block.parts.append(part)
    part.paragraphs.append(paragraph.text)
    block.characters += len(paragraph.text)
  if part:
    part.ends = True
  yield from open_blocks.values()


@dataclasses.dataclass
class Rows:
  """The rows of a block.

  Attributes:
    tokens: of all rows, concatenated.
    documents: number of each document, and of its rows in this block.
    counts: 'documents' that begin here, 'characters', 'words' and
      'unknown_tokens'.
    faults: kind, place and message of each; see `corpus.Faults`.
  """

  split: str
  tokens: Shaped[np.ndarray, ' M']
  sentence_lengths: Int64[np.ndarray, ' S']
  row_lengths: Int64[np.ndarray, ' R']
  documents: list[tuple[int, int]]
  counts: dict[str, int]
  faults: list[tuple[str, str, str]]


class Encoder:
  """Turns blocks into rows; a process makes one and uses it for all.

  Args:
    path: the tokenizer.
    limit: tokens that a row may have, without special tokens.
  """

  def __init__(self, path: pathlib.Path, limit: int):
    self._tokenizer = tokenizer.load(path)
    self._begins_word = self._tokenizer.word_starts()
    self._dtype = token_dtype(self._tokenizer.vocab_size)
    self._limit = limit

  def __call__(self, block: Block) -> Rows:
    """Returns the rows of a block."""
    faults: list[tuple[str, str, str]] = []
    packed = [self._pack(part, faults) for part in block.parts]
    tokens, sentences, rows = map(np.concatenate, zip(*packed, strict=True))
    counts = {
      'documents': sum(part.begins for part in block.parts),
      'characters': block.characters,
      'words': int(self._begins_word[tokens].sum()),
      'unknown_tokens': int((tokens == self._tokenizer.unk_id).sum()),
    }
    documents = [
      (part.document, len(own[-1]))
      for part, own in zip(block.parts, packed, strict=True)
      if len(own[-1])
    ]
    tokens = tokens.astype(self._dtype)
    return Rows(block.split, tokens, sentences, rows, documents, counts, faults)

  def _pack(
    self, part: Part, faults: list[tuple[str, str, str]]
  ) -> tuple[np.ndarray, ...]:
    """Returns the part's tokens, and lengths of its sentences and rows."""
    texts = [text for one in part.paragraphs for text in split_sentences(one)]
    tokens, lengths = self._tokenizer.encode_plain(texts)
    lengths = lengths[lengths > 0].astype(np.int64)
    ends = pack(lengths, self._begins_word[tokens], self._limit)
    kept = ends[-1] if ends else 0
    if not ends or kept < len(tokens):
      faults.append(('too_short', part.where, f'{len(tokens) - kept} tokens'))
      starts = np.cumsum(lengths) - lengths
      lengths = np.minimum(lengths, kept - starts)[starts < kept]
    elif len(lengths) == 1 and part.begins and part.ends:
      faults.append(('one_sentence_document', part.where, f'{kept} tokens'))
    return tokens[:kept], lengths, np.diff(np.array(ends, np.int64), prepend=0)
