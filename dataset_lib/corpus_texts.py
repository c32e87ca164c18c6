"""The texts of a corpus: where they come from, and which split they are of."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from dataset_lib import corpus, corpus_blocks, corpus_files, corpus_tfds
from dataset_lib.corpus_blocks import Block
from dataset_lib.corpus_faults import Faults
from dataset_lib.corpus_files import Paragraph
from dataset_lib.parity import splitmix64


@dataclasses.dataclass(frozen=True)
class Options:
  """How to prepare a corpus.

  Attributes:
    inputs: files and folders, or 'tfds:NAME'.
    validation: the same, of the validation split; () takes documents of the
      inputs instead.
    validation_share: share of the documents to take; 0 for no such split.
    tokenizer: a tokenizer's file or directory; '' trains a vocabulary.
    vocab_size: pieces of the trained vocabulary.
    vocab_texts: texts, each of at most 1,024 characters, to train it from; see
      `sentencepiece_model.train`.
    max_length: longest row, special tokens included.
    processes: that encode.
    data_dir: of TFDS.
    wrapped: lines are broken to a width; see `corpus_files`.
    max_line: longest line, in bytes.
  """

  inputs: tuple[str, ...]
  validation: tuple[str, ...] = ()
  validation_share: float = 0.01
  tokenizer: str = ''
  vocab_size: int = 30_000
  vocab_texts: int = 2_000_000
  max_length: int = 128
  processes: int = 1
  data_dir: str = ''
  wrapped: bool = False
  max_line: int = corpus_files.MAX_LINE


class Texts:
  """Texts of files and of TFDS.

  Args:
    inputs: files, folders and 'tfds:NAME'.
    options: how to read them.
    faults: counts what lies in the folders and is not read.
    without: files of the folders that are left out, silently.
  """

  def __init__(
    self,
    inputs: Sequence[str],
    options: Options,
    faults: Faults,
    without: Sequence[pathlib.Path] = (),
  ):
    prefix = corpus_tfds.PREFIX
    self._options = options
    self._builders = [
      corpus_tfds.TfdsTexts(name.removeprefix(prefix), options.data_dir)
      for name in inputs
      if name.startswith(prefix)
    ]
    names = [name for name in inputs if not name.startswith(prefix)]
    found = corpus_files.find(names, faults) if names else []
    excluded = {os.path.realpath(file) for file in without}
    self.files = _once(
      (file for file in found if os.path.realpath(file) not in excluded),
      faults,
    )
    sizes = [file.stat().st_size for file in self.files if file.is_file()]
    self.size = sum(sizes) + sum(texts.size for texts in self._builders)

  def paragraphs(
    self, faults: Faults, advance: Callable[[int], None]
  ) -> Iterator[Paragraph]:
    """The paragraphs; an empty one ends a document."""
    limits = self._options.max_line, self._options.wrapped
    yield from corpus_files.paragraphs(self.files, faults, advance, *limits)
    for texts in self._builders:
      yield from texts.paragraphs(faults, advance, *limits)


def _once(files: Iterable[pathlib.Path], faults: Faults) -> list[pathlib.Path]:
  """The files without those that are there by another name, or twice."""
  kept: dict[str, pathlib.Path] = {}
  for file in files:
    if kept.setdefault(os.path.realpath(file), file) is not file:
      faults.add('repeated_file', corpus_files.printable(file))
  return list(kept.values())


class Corpus:
  """All texts of a corpus, and the split of each document.

  Attributes:
    train: the texts that all splits or only the training split are made of.
    validation: further texts of the validation split.
    validation_share: of the documents of `train` that are of that split.
    size: bytes on disk.
    has_validation: whether there is to be such a split.

  Args:
    options: which texts.
    faults: counts what lies in the folders and is not read.
  """

  def __init__(self, options: Options, faults: Faults):
    share = 0.0 if options.validation else options.validation_share
    self.validation_share = share
    self.validation = Texts(options.validation, options, faults)
    self.train = Texts(
      options.inputs, options, faults, without=self.validation.files
    )
    self.size = self.train.size + self.validation.size
    self.has_validation = bool(options.validation or share)

  def blocks(
    self, faults: Faults, advance: Callable[[int], None]
  ) -> Iterator[Block]:
    """The blocks of both splits, in an order that is always the same."""
    size = corpus_blocks.BLOCK_CHARACTERS
    return itertools.chain(
      corpus_blocks.blocks(
        self.train.paragraphs(faults, advance), self._split_of, size
      ),
      corpus_blocks.blocks(
        self.validation.paragraphs(faults, advance),
        lambda document: corpus.VALIDATION,
        size,
      ),
    )

  def _split_of(self, document: int) -> str:
    """One document out of every 1 / share is of the validation split.

    The first of the corpus is one, so that a small corpus has one at all; of
    each further group it is any one.
    """
    if not self.validation_share:
      return corpus.TRAIN
    size = round(1 / self.validation_share)
    group, place = divmod(document, size)
    # 0 for group 0, which splitmix64 leaves as it is.
    chosen = int(splitmix64(np.array([group], np.uint64))[0]) % size
    return corpus.VALIDATION if place == chosen else corpus.TRAIN
