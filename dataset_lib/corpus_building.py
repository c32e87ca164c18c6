"""Prepares a corpus once: texts in, the directory of `corpus` out.

The texts are read twice if a vocabulary is to be trained, else once. In memory
are some blocks of them, and while a vocabulary is trained a sample of at most
`sentencepiece_model.MAX_TRAINING_CHARACTERS`. Reading is done here; sentences,
token ids and rows are made by worker processes, block by block, and written in
the order of the blocks: the same bytes whatever the number of processes. The
directory gets its name when everything is in it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import glob
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from dataset_lib import (
  atomic_file,
  corpus,
  corpus_rows,
  corpus_texts,
  sentencepiece_model,
  tokenizer,
)
from dataset_lib.corpus import Faults
from dataset_lib.corpus_rows import Block, Encoder, Rows
from dataset_lib.errors import InvalidDataError
from dataset_lib.order import splitmix64

# (name of a stage, its bytes) -> called with the bytes that are done
Progress = Callable[[str, int], corpus_texts.Advance]


@dataclasses.dataclass(frozen=True)
class Options:
  """The flags of `launch.prepare_corpus`.

  `validation` () takes a share of the documents of `inputs`, `tokenizer` ''
  trains a vocabulary; `max_line` is the longest line in bytes.
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
  max_line: int = corpus_texts.MAX_LINE


class Corpus:
  """All texts of a corpus, and the split of each document."""

  def __init__(self, options: Options, faults: Faults):
    self.validation_share = (
      0.0 if options.validation else options.validation_share
    )
    self._options = options
    data_dir = options.data_dir
    self._validation = corpus_texts.Texts(
      options.validation, faults, data_dir=data_dir
    )
    self._train = corpus_texts.Texts(
      options.inputs, faults, self._validation.files, data_dir
    )
    self.size = self._train.size + self._validation.size
    wants_validation = options.validation or self.validation_share
    self.splits = corpus.SPLITS if wants_validation else (corpus.TRAIN,)

  def blocks(
    self, faults: Faults, advance: corpus_texts.Advance
  ) -> Iterator[Block]:
    """Yields the blocks of both splits, always in the same order."""
    given = faults, advance, self._options.wrapped, self._options.max_line
    for texts, split_of in (
      (self._train, self._split_of),
      (self._validation, lambda document: corpus.VALIDATION),
    ):
      yield from corpus_rows.blocks(
        texts.paragraphs(*given), split_of, corpus_rows.BLOCK_CHARACTERS
      )

  def _split_of(self, document: int) -> str:
    """Returns the validation split for one document of every 1 / share.

    The first of the corpus is one, so that a small corpus has one at all; of
    each further group it is a random one.
    """
    if not self.validation_share:
      return corpus.TRAIN
    size = round(1 / self.validation_share)
    group, place = divmod(document, size)
    # 0 for group 0, which splitmix64 leaves as it is.
    chosen = int(splitmix64(np.array([group], np.uint64))[0]) % size
    return corpus.VALIDATION if place == chosen else corpus.TRAIN


def prepare(out: pathlib.Path, options: Options, progress: Progress) -> Any:
  """Prepares a corpus.

  Args:
    out: the directory to make; it is not there, or empty.
    options: names of the texts, and how to prepare them.
    progress: called at the begin of each stage.

  Returns:
    The content of `corpus.json`.

  Raises:
    ConfigError: no vocabulary of that size can be trained.
    MissingDataError: there is no text, or no tokenizer.
    InvalidDataError: a split has no rows, or the tokenizer no [MASK].
  """
  faults = Faults()
  texts = Corpus(options, faults)
  with complete_or_absent(out) as folder:
    path = folder / corpus.TOKENIZER_FILE
    given = _tokenizer(texts, folder, options, progress)
    given.save(path)
    limit = options.max_length - corpus.SPECIAL_IN_ROW
    blocks = texts.blocks(faults, progress('encoding', texts.size))
    rows = encoded(blocks, path, limit, options.processes)
    counts = _write(folder, given.vocab_size, rows, faults)
    for split in texts.splits:
      if not counts.get(split, {}).get('rows'):
        raise _no_text(split)
    manifest = {
      'format': corpus.FORMAT,
      'inputs': options.inputs,
      'validation': options.validation,
      'validation_share': texts.validation_share,
      'tokenizer': options.tokenizer,
      'wrapped': options.wrapped,
      'max_length': options.max_length,
      'vocab_size': given.vocab_size,
      'splits': counts,
      'faults': faults.summary(),
    }
    atomic_file.write_text(
      folder / corpus.MANIFEST_FILE, json.dumps(manifest, indent=2) + '\n'
    )
    if faults.files:
      lines = [json.dumps(file) + '\n' for file in faults.files]
      atomic_file.write_text(folder / corpus.FAULTS_FILE, ''.join(lines))
  return manifest


def _tokenizer(
  texts: Corpus, folder: pathlib.Path, options: Options, progress: Progress
) -> tokenizer.Tokenizer:
  """Returns the given tokenizer, or one trained from the training split."""
  if options.tokenizer:
    given = tokenizer.load(options.tokenizer)
    if given.mask_id is None:
      raise InvalidDataError(
        f'{options.tokenizer}: expected a tokenizer with [MASK], got none'
      )
    return given
  advance = progress('vocabulary: reading, then training', texts.size)
  training = (
    text
    # Faults of the texts are counted when they are encoded.
    for block in texts.blocks(Faults(), advance)
    if block.split == corpus.TRAIN
    for part in block.parts
    for text in part.paragraphs
  )
  first = next(training, None)
  if first is None:
    raise _no_text(corpus.TRAIN)
  model = folder / sentencepiece_model.MODEL_FILE
  model.write_bytes(
    sentencepiece_model.train(
      itertools.chain([first], training),
      options.vocab_size,
      options.vocab_texts,
    )
  )
  given = tokenizer.load(model)
  model.unlink()  # tokenizer.json has all of it
  return given


def _no_text(split: str) -> InvalidDataError:
  return InvalidDataError(
    f'no text for the split {split!r}: expected documents of two tokens or '
    'more, in a corpus of one document give --validation_share=0'
  )


def _write(
  folder: pathlib.Path, vocab_size: int, rows: Iterable[Rows], faults: Faults
) -> dict[str, dict[str, int]]:
  """Writes the splits; returns the counts of each."""
  dtype = corpus.token_dtype(vocab_size)
  writers: dict[str, corpus.SplitWriter] = {}
  with contextlib.ExitStack() as stack:
    for block in rows:
      if block.split not in writers:
        path = folder / block.split
        writers[block.split] = corpus.SplitWriter(path, dtype, stack)
      writers[block.split].add(block)
      for fault in block.faults:
        faults.add(*fault)
    return {name: writers[name].finish() for name in sorted(writers)}


def encoded(
  blocks: Iterable[Block], path: pathlib.Path, limit: int, processes: int
) -> Iterator[Rows]:
  """Yields the rows of the blocks, in their order, of at most `limit` tokens.

  A few more blocks are read than are being encoded; one process is this one.
  """
  if processes == 1:
    yield from map(Encoder(path, limit), blocks)
    return
  pool = concurrent.futures.ProcessPoolExecutor(
    processes,
    # A fork would copy locks that threads of this process hold.
    multiprocessing.get_context('spawn'),
    _start_worker,
    (path, limit),
  )
  waiting: collections.deque[Any] = collections.deque()
  try:
    for block in blocks:
      waiting.append(pool.submit(_encode, block))
      if len(waiting) > 2 * processes:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  finally:
    pool.shutdown(cancel_futures=True)


_encoder: list[Encoder] = []  # of this process, if it is a worker


def _start_worker(path: pathlib.Path, limit: int) -> None:
  # The parent handles Ctrl-C. Each process encodes on one core.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  _encoder.append(Encoder(path, limit))


def _encode(block: Block) -> Rows:
  return _encoder[0](block)


@contextlib.contextmanager
def complete_or_absent(out: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a folder that is named `out` at the end, and removed on an error.

  A process that is killed leaves it behind; see `leftovers`.

  Args:
    out: not there, or an empty directory, or a link to one of these.
  """
  out = out.resolve()
  out.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    prefix=f'.{out.name}.',
    suffix='.tmp',
    dir=out.parent,
    ignore_cleanup_errors=True,
  ) as place:
    # Inside of it: a temporary directory can be read by its owner only.
    folder = pathlib.Path(place, out.name)
    folder.mkdir()
    yield folder
    folder.replace(out)


def leftovers(out: pathlib.Path) -> list[pathlib.Path]:
  """Returns folders of processes that make `out` now, or were killed."""
  out = out.resolve()
  return sorted(out.parent.glob(f'.{glob.escape(out.name)}.*.tmp'))
