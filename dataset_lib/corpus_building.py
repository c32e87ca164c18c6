"""Prepares a corpus once: texts in, the directory of `corpus` out.

The texts are read twice if a vocabulary is to be trained, else once. Reading is
done here; sentences, token ids and rows are made by worker processes, block by
block, and written in the order of the blocks: the same bytes whatever the
number of processes. The directory gets its name when it is complete.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import glob
import json
import multiprocessing
import os
import pathlib
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dataset_lib import atomic_file, corpus, sentencepiece_model, tokenizer
from dataset_lib.corpus_rows import Encoder, Part, Rows, blocks
from dataset_lib.corpus_texts import Advance, Faults, Texts
from dataset_lib.errors import InvalidDataError

# (name of a stage, its bytes) -> called with the bytes that are done
Progress = Callable[[str, int], Advance]


@dataclasses.dataclass(frozen=True)
class Options:
  """The flags of `launch.prepare_corpus`.

  `validation` () takes a share of the documents of `inputs`, `tokenizer` ''
  trains a vocabulary.
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
  given = options.data_dir, options.wrapped
  held_out = Texts(options.validation, faults, (), *given)
  texts = Texts(options.inputs, faults, held_out.names, *given)
  share = 0.0 if options.validation else options.validation_share
  has_validation = options.validation or share

  def read(stage: str, faults: Faults) -> Iterator[list[Part]]:
    advance = progress(stage, texts.size + held_out.size)
    yield from blocks(texts.paragraphs(faults, advance), share)
    yield from blocks(held_out.paragraphs(faults, advance), 1.0)

  with complete_or_absent(out) as folder, contextlib.ExitStack() as stack:
    path = folder / corpus.TOKENIZER_FILE
    # Faults of the texts are counted when they are encoded.
    stage = read('vocabulary: reading, then training', Faults())
    vocabulary = _tokenizer(stage, folder, options)
    vocabulary.save(path)
    writers = {
      split: corpus.SplitWriter(folder / split, vocabulary.vocab_size, stack)
      for split in corpus.SPLITS[: 2 if has_validation else 1]
    }
    limit = options.max_length - corpus.SPECIAL_IN_ROW
    blocks_read = read('encoding', faults)
    for rows in encoded(blocks_read, path, limit, options.processes):
      writers[rows.split].add(rows)
      for fault in rows.faults:
        faults.add(*fault)
    counts = {split: writer.finish() for split, writer in writers.items()}
    for split, written in counts.items():
      if not written['rows']:
        raise InvalidDataError(
          f'no text for the split {split!r}: expected documents of two tokens '
          'or more, in a corpus of one document give --validation_share=0'
        )
    manifest = {
      'format': corpus.FORMAT,
      'inputs': options.inputs,
      'validation': options.validation,
      'validation_share': share,
      'tokenizer': options.tokenizer,
      'wrapped': options.wrapped,
      'max_length': options.max_length,
      'vocab_size': vocabulary.vocab_size,
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
  blocks: Iterable[list[Part]], folder: pathlib.Path, options: Options
) -> tokenizer.Tokenizer:
  """Returns the given tokenizer, or one trained from the training split."""
  if options.tokenizer:
    given = tokenizer.load(options.tokenizer)
    if given.mask_id is None:
      raise InvalidDataError(
        f'{options.tokenizer}: expected a tokenizer with [MASK], got none'
      )
    return given
  texts = (
    text
    for block in blocks
    for part in block
    if part.split == corpus.TRAIN
    for text in part.paragraphs
  )
  model = folder / sentencepiece_model.MODEL_FILE
  model.write_bytes(
    sentencepiece_model.train(texts, options.vocab_size, options.vocab_texts)
  )
  given = tokenizer.load(model)
  model.unlink()  # tokenizer.json has all of it
  return given


def encoded(
  blocks: Iterable[list[Part]], path: pathlib.Path, limit: int, processes: int
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
  )
  pending: collections.deque[Any] = collections.deque()
  try:
    for block in blocks:
      pending.append(pool.submit(_encode, path, limit, block))
      if len(pending) > 2 * processes:
        yield pending.popleft().result()
    while pending:
      yield pending.popleft().result()
  finally:
    pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
  # The parent handles Ctrl-C. Each process encodes on one core.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'


_encoder = functools.cache(Encoder)  # one in each worker


def _encode(path: pathlib.Path, limit: int, block: list[Part]) -> Rows:
  return _encoder(path, limit)(block)


@contextlib.contextmanager
def complete_or_absent(out: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a folder that is named `out` at the end, and removed on an error.

  A process that is killed leaves it behind; see `leftovers`. `out` is not
  there, or an empty directory, or a link to one of these.
  """
  out = out.resolve()
  out.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    '.tmp', f'.{out.name}.', out.parent, ignore_cleanup_errors=True
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
