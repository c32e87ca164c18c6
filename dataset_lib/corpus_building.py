"""Prepares a corpus once: texts in, the directory of `corpus` out.

The texts are read twice if a vocabulary is to be trained, else once. Worker
processes encode them in blocks: the same bytes whatever their number.
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
from typing import Annotated, Any

from annotated_types import Ge, Interval, MinLen

from dataset_lib import (
  atomic_file,
  corpus,
  corpus_rows,
  sentencepiece_model,
  tokenizer,
)
from dataset_lib.builder import default_num_threads
from dataset_lib.corpus_rows import Part, Rows, blocks
from dataset_lib.corpus_texts import ACTIONS, Faults, Texts
from dataset_lib.errors import InvalidDataError
from dataset_lib.fields import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The flags of `launch.prepare_corpus`; `tokenizer` '' trains one."""

  input: Annotated[
    tuple[str, ...], MinLen(1), 'files, folders and tfds:NAME, with commas'
  ] = flag('files, folders, tfds:NAME', metavar='PATH,...')
  validation: tuple[str, ...] = flag(
    'the texts of the validation split', (), 'PATH,...'
  )
  validation_share: Annotated[float, Interval(ge=0.0, le=0.5)] = flag(
    'or the share of the documents that it takes, 0 for none', 0.01, 'SHARE'
  )
  tokenizer: str = flag(
    'spiece.model, tokenizer.json, vocab.txt, or a directory with one '
    '(default: train a vocabulary)',
    '',
    'PATH',
  )
  vocab_size: Annotated[int, Ge(1)] = flag(
    'of the trained vocabulary', 30_000, 'PIECES'
  )
  vocab_texts: Annotated[int, Ge(1000)] = flag(
    'train it from a random sample of at most this many texts of at most 1,024 '
    'characters, 100 million in all; a character takes about 20 bytes of '
    'memory',
    2_000_000,
    'TEXTS',
  )
  max_length: Annotated[int, Interval(ge=8, le=65536)] = flag(
    'longest row, special tokens included', 128, 'TOKENS'
  )
  processes: Annotated[int, Ge(1)] | None = flag(
    'that encode (default: one for each core)', None, 'N'
  )
  data_dir: str = flag(
    'of TFDS (default ~/tensorflow_datasets)', '', 'DIRECTORY'
  )
  wrapped: bool = flag('lines are broken to a width, see above', False)


def prepare(out: pathlib.Path, options: Options, bar: Any) -> Any:
  """Prepares a corpus in the new or empty directory `out`.

  Returns the content of `corpus.json`; `bar` is a `rich.progress.Progress`.

  Raises:
    ConfigError: no vocabulary of that size can be trained.
    MissingDataError: there is no text, or no tokenizer.
    InvalidDataError: a split has no rows, or the tokenizer no [MASK].
  """
  faults = Faults()
  given = options.data_dir, options.wrapped
  held_out = Texts(options.validation, faults, (), *given)
  texts = Texts(options.input, faults, held_out.names, *given)
  share = 0.0 if options.validation else options.validation_share

  def read(stage: str, faults: Faults) -> Iterator[list[Part]]:
    task = bar.add_task(stage, total=texts.size + held_out.size)
    advance = functools.partial(bar.advance, task)
    yield from blocks(texts.paragraphs(faults, advance), share)
    yield from blocks(held_out.paragraphs(faults, advance), 1.0)

  with complete_or_absent(out) as folder:
    # Faults of the texts are counted when they are encoded.
    training = read('vocabulary: reading, then training', Faults())
    vocab_size = _save_tokenizer(training, folder, options)
    splits = corpus.SPLITS if options.validation or share else [corpus.TRAIN]
    path = folder / corpus.TOKENIZER_FILE
    encode = functools.partial(corpus_rows.encode, path, options.max_length)
    processes = options.processes or default_num_threads()
    rows = encoded(read('encoding', faults), encode, processes)
    counts = _write(folder, splits, vocab_size, rows, faults)
    manifest = {
      'format': corpus.FORMAT,
      'inputs': options.input,
      'validation': options.validation,
      'validation_share': share,
      'tokenizer': options.tokenizer,
      'wrapped': options.wrapped,
      'max_length': options.max_length,
      'vocab_size': vocab_size,
      'splits': counts,
      'faults': {
        kind: {'count': fault['count'], 'action': ACTIONS[kind]} | fault
        for kind, fault in faults.summary().items()
      },
    }
    atomic_file.write_text(
      folder / corpus.MANIFEST_FILE, json.dumps(manifest, indent=2) + '\n'
    )
    if faults.files:
      lines = [json.dumps(file) + '\n' for file in faults.files]
      atomic_file.write_text(folder / corpus.FAULTS_FILE, ''.join(lines))
  return manifest


def _write(
  folder: pathlib.Path,
  splits: Iterable[str],
  vocab_size: int,
  encoded_rows: Iterable[Rows],
  faults: Faults,
) -> dict[str, dict[str, int]]:
  """Writes the arrays of the splits; returns the counts of each."""
  writers = {
    split: corpus.SplitWriter(folder / split, vocab_size) for split in splits
  }
  for rows in encoded_rows:
    writers[rows.split].add(rows)
    for fault in rows.faults:
      faults.count(*fault)
  counts = {split: writer.finish() for split, writer in writers.items()}
  for split, written in counts.items():
    if not written['rows']:
      raise InvalidDataError(
        f'no text for the split {split!r}: expected documents of two tokens '
        'or more, in a corpus of one document give --validation_share=0'
      )
  return counts


def _save_tokenizer(
  blocks: Iterable[list[Part]], folder: pathlib.Path, options: Options
) -> int:
  """Saves the given tokenizer, or one that it trains; returns its size."""
  path = pathlib.Path(options.tokenizer)
  if not options.tokenizer:
    texts = (
      text
      for block in blocks
      for part in block
      if part.split == corpus.TRAIN
      for text in part.paragraphs
    )
    path = folder / sentencepiece_model.MODEL_FILE
    path.write_bytes(
      sentencepiece_model.train(texts, options.vocab_size, options.vocab_texts)
    )
  given = tokenizer.load(path)
  if given.mask_id is None:
    raise InvalidDataError(f'{path}: expected a tokenizer with [MASK]')
  given.save(folder / corpus.TOKENIZER_FILE)
  if not options.tokenizer:
    path.unlink()  # tokenizer.json has all of it
  return given.vocab_size


def encoded(
  blocks: Iterable[list[Part]],
  encode: Callable[[list[Part]], Rows],
  processes: int,
) -> Iterator[Rows]:
  """Yields `encode(block)` in the order of the blocks, a few of them ahead."""
  if processes == 1:
    yield from map(encode, blocks)
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
      pending.append(pool.submit(encode, block))
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


@contextlib.contextmanager
def complete_or_absent(out: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a folder that is named `out` at the end, and removed on an error.

  `out` is not there, or an empty directory, or a link to one of these.
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
