"""A prepared corpus: texts in, once; arrays that are mapped into memory out.

  DIRECTORY/tokenizer.json
  DIRECTORY/corpus.json          counts, and faults of the texts
  DIRECTORY/faults.jsonl         each file that was left out, if any
  DIRECTORY/SPLIT/tokens.bin     uint16 or int32 [M], without special tokens
  DIRECTORY/SPLIT/sentences.bin  bool [M], whether a token begins one
  DIRECTORY/SPLIT/rows.bin       int64 [R + 1], start offset of each row, then M

The bytes do not depend on the number of processes.
"""

import collections
import contextlib
import dataclasses
import functools
import glob
import json
import multiprocessing
import operator
import os
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge, Interval, MinLen
from jaxtyping import Bool, Int64, Shaped

from core import files
from core.errors import InvalidDataError, MissingDataError
from core.fields import flag
from dataset_lib import tokenizer, tokenizer_files
from dataset_lib.builder import default_num_threads
from dataset_lib.corpus import packing
from dataset_lib.corpus.packing import TRAIN, VALIDATION, Part, Rows, blocks
from dataset_lib.corpus.texts import ACTIONS, Faults, Texts

FORMAT = 2  # of the directory; another number is refused
SPLITS = (TRAIN, VALIDATION)
MANIFEST_FILE, TOKENIZER_FILE = 'corpus.json', 'tokenizer.json'
FAULTS_FILE = 'faults.jsonl'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The flags of `launch.prepare_corpus`; an empty `tokenizer` trains one."""

  input: Annotated[
    tuple[str, ...], MinLen(1), 'files, folders and tfds:NAME, with commas'
  ] = flag('files, folders, tfds:NAME', metavar='PATH,...')
  validation: tuple[str, ...] = flag('texts of validation', (), 'PATH,...')
  validation_share: Annotated[float, Interval(ge=0.0, le=0.5)] = flag(
    'or the validation split as a share of documents, 0: none', 0.01, 'SHARE'
  )
  tokenizer: str = flag(
    'spiece.model, tokenizer.json, vocab.txt (default: train one)', '', 'PATH'
  )
  vocab_size: Annotated[int, Ge(1)] = flag('to train', 30_000, 'PIECES')
  vocab_texts: Annotated[int, Ge(1000)] = flag(
    'random texts to train from, of at most 1,024 characters, 100 million in '
    'all; a character takes about 20 bytes of memory',
    2_000_000,
    'TEXTS',
  )
  max_length: Annotated[int, Interval(ge=8, le=65536)] = flag(
    'longest row, special tokens included', 128, 'TOKENS'
  )
  processes: Annotated[int, Ge(1)] | None = flag(
    'that encode (default: one for each core)', None, 'N'
  )
  data_dir: str = flag('of TFDS (~/tensorflow_datasets)', '', 'DIRECTORY')
  wrapped: bool = flag('lines are broken to a width, see above', False)
  out: str = flag('where to write; new or empty', metavar='DIRECTORY')


def prepare(options: Options, bar: Any) -> Any:
  """Prepares a corpus in `options.out`; returns the content of `corpus.json`.

  `bar` is a `rich.progress.Progress`. Raises ConfigError if no vocabulary of
  `vocab_size` can be trained, MissingDataError without text or tokenizer,
  InvalidDataError if a split has no rows, or the tokenizer no [MASK].
  """
  faults, form = Faults(), (options.data_dir, options.wrapped)
  held_out = Texts(options.validation, faults, (), *form)
  texts = Texts(options.input, faults, held_out.names, *form)
  share = 0.0 if options.validation else options.validation_share

  def read(stage: str, faults: Faults) -> Iterator[list[Part]]:
    task = bar.add_task(stage, total=texts.size + held_out.size)
    advance = functools.partial(bar.advance, task)
    yield from blocks(texts.paragraphs(faults, advance), share)
    yield from blocks(held_out.paragraphs(faults, advance), 1.0)

  with complete_or_absent(pathlib.Path(options.out)) as folder:
    # Faults of the texts are counted when they are encoded.
    training = read('vocabulary: reading, then training', Faults())
    vocab_size = _save_tokenizer(training, folder, options)
    path = folder / TOKENIZER_FILE
    encode = functools.partial(packing.encode, path, options.max_length)
    processes = options.processes or default_num_threads()
    rows = encoded(read('encoding', faults), encode, processes)
    splits = SPLITS if options.validation or share else (TRAIN,)
    same = 'validation', 'tokenizer', 'wrapped', 'max_length'
    manifest = {
      'format': FORMAT,
      'inputs': options.input,
      **{name: getattr(options, name) for name in same},
      'validation_share': share,
      'vocab_size': vocab_size,
      'splits': _write(folder, splits, vocab_size, rows, faults),
      'faults': {
        kind: {'count': fault['count'], 'action': ACTIONS[kind]} | fault
        for kind, fault in faults.summary().items()
      },
    }
    files.write_json(folder / MANIFEST_FILE, manifest)
    if faults.files:
      lines = [json.dumps(file) + '\n' for file in faults.files]
      files.write_text(folder / FAULTS_FILE, ''.join(lines))
  return manifest


def _save_tokenizer(
  blocks: Iterable[list[Part]], folder: pathlib.Path, options: Options
) -> int:
  """Saves the given tokenizer, or one that it trains; returns its size."""
  trained = folder / tokenizer_files.MODEL_FILE
  if not options.tokenizer:
    parts = (part for block in blocks for part in block if part.split == TRAIN)
    texts = (text for part in parts for text in part.paragraphs)
    sizes = options.vocab_size, options.vocab_texts
    trained.write_bytes(tokenizer_files.train(texts, *sizes))
  loaded = tokenizer.load(options.tokenizer or trained)
  if loaded.mask_id is None:
    expected = 'expected a tokenizer with [MASK]'
    raise InvalidDataError(f'{options.tokenizer}: {expected}')
  loaded.save(folder / TOKENIZER_FILE)
  trained.unlink(missing_ok=True)  # tokenizer.json has all of it
  return loaded.vocab_size


def _write(
  folder: pathlib.Path,
  splits: Iterable[str],
  vocab_size: int,
  encoded_rows: Iterable[Rows],
  faults: Faults,
) -> dict[str, dict[str, int]]:
  """Writes the arrays of the splits; returns the counts of each."""
  counts = {split: collections.Counter[str]() for split in splits}
  last = dict.fromkeys(counts, -1)  # document of the last block
  for split in counts:
    (folder / split).mkdir()

  def append(split: str, **arrays: Any) -> None:
    for name, values in arrays.items():
      with (folder / split / f'{name}.bin').open('ab') as file:
        file.write(np.asarray(values, _dtypes(vocab_size)[name]).tobytes())

  for rows in encoded_rows:
    split, lengths, documents = rows.split, rows.lengths, rows.documents
    starts = np.cumsum(lengths) - lengths + counts[split]['tokens']
    append(split, tokens=rows.tokens, sentences=rows.sentences, rows=starts)
    # The first document may continue from the previous block.
    with_rows = len(documents - {last[split]})
    counts[split].update(rows.counts, documents_with_rows=with_rows)
    last[split] = max(documents, default=last[split])
    for fault in rows.faults:
      faults.count(*fault)
  for split, total in counts.items():
    if not total['rows']:
      advice = 'a corpus of one document needs --validation_share=0'
      raise InvalidDataError(f'no text for the split {split!r}; {advice}')
    append(split, rows=[total['tokens']])
  for path in folder.glob('*/*.bin'):
    with path.open('ab') as file:
      os.fsync(file.fileno())
  return {split: dict(total) for split, total in counts.items()}


def encoded(
  blocks: Iterable[list[Part]], encode: Callable[..., Rows], processes: int
) -> Iterator[Rows]:
  """Yields `encode(block)` in the order of the blocks, a few of them ahead."""
  if processes == 1:
    yield from map(encode, blocks)
    return
  # Use spawn, because a fork copies locks that threads of this process hold.
  context = multiprocessing.get_context('spawn')
  pool = ProcessPoolExecutor(processes, context, _start_worker)
  pending: collections.deque[Any] = collections.deque()
  try:
    for block in blocks:
      pending.append(pool.submit(encode, block))
      if len(pending) > 2 * processes:
        yield pending.popleft().result()
    yield from (future.result() for future in pending)
  finally:
    pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
  # The parent handles Ctrl-C. Each process encodes on one core.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'


@contextlib.contextmanager
def complete_or_absent(out: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a folder that is named `out` at the end, and removed on an error."""
  out = out.expanduser().resolve()
  out.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    '.tmp', f'.{out.name}.', out.parent, ignore_cleanup_errors=True
  ) as place:
    # Create a subfolder, because only its owner can read a temporary one.
    folder = pathlib.Path(place, out.name)
    folder.mkdir()
    with contextlib.ExitStack() as held:
      with contextlib.suppress(OSError):  # else `leftovers` keeps the folder
        held.callback(os.close, files.lock_directory(place))
      yield folder
      folder.replace(out)


def leftovers(out: pathlib.Path) -> list[pathlib.Path]:
  """Removes folders of killed processes; returns those that may be in use."""
  out, kept = out.resolve(), []
  for path in sorted(out.parent.glob(f'.{glob.escape(out.name)}.*.tmp')):
    try:
      held = files.lock_directory(path)
    except OSError:
      kept.append(path)
      continue
    shutil.rmtree(path, ignore_errors=True)
    os.close(held)
  return kept


class Split(NamedTuple):
  """The arrays of one split, as above, and what they were prepared for."""

  tokens: Shaped[np.ndarray, ' M']
  sentences: Bool[np.ndarray, ' M']
  rows: Int64[np.ndarray, ' R+1']
  max_length: int
  vocab_size: int


def _dtypes(vocab_size: int) -> dict[str, str]:
  tokens = 'uint16' if vocab_size <= 2**16 else 'int32'
  return {'tokens': tokens, 'sentences': 'bool', 'rows': 'int64'}


def open_split(directory: pathlib.Path, name: str) -> Split:
  """Maps the arrays of a split into memory; reads rows.bin only."""
  path = directory / MANIFEST_FILE
  if not path.exists():
    advice = 'python -m launch.prepare_corpus --input=TEXTS --out=DIRECTORY'
    raise MissingDataError(f'no prepared corpus in {directory}: {advice}')
  with files.damage_of(path):
    manifest = files.read_object(path)
    if manifest['format'] != FORMAT:
      raise ValueError(f'expected format {FORMAT}, got {manifest["format"]}')
    limits = manifest['max_length'], manifest['vocab_size']
    max_length, vocab_size = map(operator.index, limits)
    counts = dict(manifest['splits']).get(name, {'tokens': 0, 'rows': 0})
    total, last = map(operator.index, (counts['tokens'], counts['rows']))
  if not last:
    advice = 'prepare it with --validation_share or --validation'
    raise MissingDataError(f'no split {name!r} in {directory}; {advice}')
  sizes = total, total, last + 1
  arrays: dict[str, np.ndarray] = {}
  dtypes = _dtypes(vocab_size).items()
  for (file, dtype), size in zip(dtypes, sizes, strict=True):
    path = directory / name / f'{file}.bin'
    try:
      with files.opened(path, sys.maxsize) as opened:
        array = np.asarray(np.memmap(opened, dtype, 'r'))
    except (OSError, ValueError) as error:
      raise _damaged(path, error) from error
    if len(array) != size:
      raise _damaged(path, f'expected {size} of {dtype}, got {len(array)}')
    arrays[file] = array
  ends, lengths = array[[0, -1]].tolist(), np.diff(array)
  least, limit = packing.MIN_ROW, max_length - packing.SPECIAL_IN_ROW
  if ends != [0, total] or lengths.min() < least or lengths.max() > limit:
    expected = f'expected rows of {least} to {limit} tokens, {total} in all'
    got = f'{lengths.min()} to {lengths.max()}, from {ends[0]} to {ends[1]}'
    raise _damaged(path, f'{expected}, got {got}')
  return Split(**arrays, max_length=max_length, vocab_size=vocab_size)


def _damaged(path: pathlib.Path, problem: object) -> InvalidDataError:
  advice = 'prepare the corpus again'
  return InvalidDataError(f'{path} is damaged: {problem}; {advice}')
