"""A stream of paragraphs as blocks of work, and blocks as rows of token ids.

The cuts between blocks follow from the text alone, so that the result does not
depend on how many processes encode them. A document that is longer than a block
goes on in the next one; only its rows end there.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from dataset_lib import corpus_packing, sentences, tokenizer
from dataset_lib.corpus_files import Paragraph

BLOCK_CHARACTERS = 2**18


@dataclasses.dataclass
class Part:
  """Paragraphs of one document.

  Attributes:
    document: its number.
    where: where the first of them lies.
    begins: whether the document begins here.
    paragraphs: their texts.
    ends: whether it ends here.
  """

  document: int
  where: str
  begins: bool
  paragraphs: list[str]
  ends: bool = False


@dataclasses.dataclass
class Block:
  """Parts of documents of one split.

  Attributes:
    split: name of the split.
    parts: one of each document.
    characters: in all of them.
  """

  split: str
  parts: list[Part]
  characters: int = 0


def blocks(
  stream: Iterable[Paragraph],
  split_of: Callable[[int], str],
  size: int,
) -> Iterator[Block]:
  """Collects documents to blocks.

  Args:
    stream: paragraphs; an empty one ends a document.
    split_of: the split of a document, by its number from 0.
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
    split: name of the split.
    tokens: of all rows, one behind the other.
    sentence_lengths: how the tokens are divided into sentences.
    row_lengths: how they are divided into rows.
    documents: of each document its number and its rows in this block.
    counts: 'documents' that begin here, 'characters', 'words' and
      'unknown_tokens'.
    faults: kind, place and message of each; see `corpus_faults`.
  """

  split: str
  tokens: Shaped[np.ndarray, ' M']
  sentence_lengths: Int64[np.ndarray, ' S']
  row_lengths: Int64[np.ndarray, ' R']
  documents: list[tuple[int, int]]
  counts: dict[str, int]
  faults: list[tuple[str, str, str]]


class Packed(NamedTuple):
  """What is kept of a part.

  Attributes:
    tokens: the token ids.
    sentence_lengths: how they are divided into sentences.
    row_lengths: how they are divided into rows.
    fault: kind, place and message of what is wrong with the part.
  """

  tokens: Int32[np.ndarray, ' M']
  sentence_lengths: Int64[np.ndarray, ' S']
  row_lengths: Int64[np.ndarray, ' R']
  fault: tuple[str, str, str] | None


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
    """The rows of a block."""
    packed = [self._pack(part) for part in block.parts]
    tokens = np.concatenate([part.tokens for part in packed])
    counts = {
      'documents': sum(part.begins for part in block.parts),
      'characters': block.characters,
      'words': int(self._begins_word[tokens].sum()),
      'unknown_tokens': int((tokens == self._tokenizer.unk_id).sum()),
    }
    return Rows(
      block.split,
      tokens.astype(self._dtype),
      np.concatenate([part.sentence_lengths for part in packed]),
      np.concatenate([part.row_lengths for part in packed]),
      [
        (part.document, len(own.row_lengths))
        for part, own in zip(block.parts, packed, strict=True)
        if len(own.row_lengths)
      ],
      counts,
      [part.fault for part in packed if part.fault],
    )

  def _pack(self, part: Part) -> Packed:
    texts = [text for one in part.paragraphs for text in sentences.split(one)]
    tokens, lengths = self._tokenizer.encode_plain(texts)
    lengths = lengths[lengths > 0].astype(np.int64)
    ends = corpus_packing.pack(lengths, self._begins_word[tokens], self._limit)
    kept, fault = ends[-1] if ends else 0, None
    if not ends or kept < len(tokens):
      fault = 'too_short', part.where, f'{len(tokens) - kept} tokens'
      starts = np.cumsum(lengths) - lengths
      lengths = np.minimum(lengths, kept - starts)[starts < kept]
    elif len(lengths) == 1 and part.begins and part.ends:
      fault = 'one_sentence_document', part.where, f'{kept} tokens'
    rows = np.diff(np.array(ends, np.int64), prepend=0)
    return Packed(tokens[:kept], lengths, rows, fault)


def token_dtype(vocab_size: int) -> type[np.integer]:
  """The smallest type that holds the token ids: uint16 or int32."""
  return np.uint16 if vocab_size <= 2**16 else np.int32
