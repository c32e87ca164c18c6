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

from dataset_lib import (
  atomic_file,
  corpus,
  corpus_blocks,
  sentencepiece_model,
  tokenizer,
)
from dataset_lib.corpus_blocks import Block, Encoder, Rows
from dataset_lib.corpus_faults import Faults
from dataset_lib.corpus_texts import Corpus, Options
from dataset_lib.errors import InvalidDataError

# (what is done, bytes of it) -> called with the bytes that are done
Progress = Callable[[str, int], Callable[[int], None]]


def prepare(out: pathlib.Path, options: Options, progress: Progress) -> Any:
  """Prepares a corpus.

  Args:
    out: the directory to make; it is not there, or empty.
    options: what to prepare, and how.
    progress: is told how far it is.

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
    advance = progress('encoding', texts.size)
    blocks = texts.blocks(faults, advance)
    rows = encoded(blocks, path, limit, options.processes)
    counts = _write(folder, given.vocab_size, rows, faults)
    _check_splits(counts, texts.has_validation)
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
  """The given tokenizer, or one trained from the training split."""
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
    # What is wrong with the texts is counted when they are encoded.
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


def _write(
  folder: pathlib.Path, vocab_size: int, rows: Iterable[Rows], faults: Faults
) -> dict[str, dict[str, int]]:
  """Writes the splits; returns what is in each."""
  dtype = corpus_blocks.token_dtype(vocab_size)
  writers: dict[str, corpus.SplitWriter] = {}
  with contextlib.ExitStack() as stack:
    for block in rows:
      if block.split not in writers:
        writer = corpus.SplitWriter(folder / block.split, dtype)
        writers[block.split] = stack.enter_context(writer)
      writers[block.split].add(block)
      for fault in block.faults:
        faults.add(*fault)
    return {name: writers[name].finish() for name in sorted(writers)}


def _check_splits(
  counts: dict[str, dict[str, int]], has_validation: bool
) -> None:
  wanted = corpus.SPLITS if has_validation else (corpus.TRAIN,)
  for split in wanted:
    if not counts.get(split, {}).get('rows'):
      raise _no_text(split)


def _no_text(split: str) -> InvalidDataError:
  return InvalidDataError(
    f'no text for the split {split!r}: expected documents of two tokens or '
    'more, in a corpus of one document give --validation_share=0'
  )


def encoded(
  blocks: Iterable[Block], path: pathlib.Path, limit: int, processes: int
) -> Iterator[Rows]:
  """The rows of the blocks, in their order.

  Args:
    blocks: the blocks; a few more are read than are being encoded.
    path: the tokenizer.
    limit: tokens that a row may have.
    processes: that encode; with 1 this one does.
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
  # Ctrl-C is the parent's business. Each process encodes on one core.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  _encoder.append(Encoder(path, limit))


def _encode(block: Block) -> Rows:
  return _encoder[0](block)


@contextlib.contextmanager
def complete_or_absent(out: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder that gets the name `out` at the end, and is removed on an error.

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
  """Folders of processes that make `out` now, or were killed before the end."""
  out = out.resolve()
  return sorted(out.parent.glob(f'.{glob.escape(out.name)}.*.tmp'))
