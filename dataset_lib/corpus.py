"""A prepared corpus on disk: arrays that are mapped into memory.

  DIRECTORY/tokenizer.json
  DIRECTORY/corpus.json          counts, and faults of the texts
  DIRECTORY/faults.jsonl         each file that was left out, if any
  DIRECTORY/SPLIT/tokens.npy     uint16 or int32 [M], without special tokens
  DIRECTORY/SPLIT/sentences.npy  int64 [S + 1], first token of each, then M
  DIRECTORY/SPLIT/rows.npy       int64 [R + 1], first token of each, then M
  DIRECTORY/SPLIT/documents.npy  int64 [D + 1], first row of each, then R

SPLIT is train or validation. Opening reads rows.npy, and of the other arrays
only their ends.
"""

import collections
import json
import operator
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Shaped

from dataset_lib.errors import InvalidDataError, MissingDataError

FORMAT = 1  # of the directory; another number is refused
TRAIN, VALIDATION = 'train', 'validation'
SPLITS = (TRAIN, VALIDATION)
SPECIAL_IN_ROW = 3  # [CLS] a [SEP] b [SEP]
MIN_ROW = 2  # tokens: one in each segment
MANIFEST_FILE, TOKENIZER_FILE = 'corpus.json', 'tokenizer.json'
FAULTS_FILE = 'faults.jsonl'
_HEADER_BYTES = 128  # of a .npy file with one axis


class Split(NamedTuple):
  """The arrays of one split, as above, and what they were prepared for."""

  tokens: Shaped[np.ndarray, ' M']
  sentences: Int64[np.ndarray, ' S']
  rows: Int64[np.ndarray, ' R']
  documents: Int64[np.ndarray, ' D']
  max_length: int
  vocab_size: int


def _dtypes(vocab_size: int) -> dict[str, np.dtype[Any]]:
  tokens = np.uint16 if vocab_size <= 2**16 else np.int32
  names = 'sentences', 'rows', 'documents'
  return {'tokens': np.dtype(tokens)} | dict.fromkeys(names, np.dtype(np.int64))


class SplitWriter:
  """Writes the arrays of one split to a new folder."""

  def __init__(self, folder: pathlib.Path, vocab_size: int):
    folder.mkdir()
    self._folder, self._dtypes = folder, _dtypes(vocab_size)
    self._sizes = dict.fromkeys(self._dtypes, 0)
    for name in self._dtypes:
      (folder / f'{name}.npy').write_bytes(bytes(_HEADER_BYTES))
    self._counts: collections.Counter[str] = collections.Counter()
    self._document = -1

  def add(self, block: Any) -> None:
    """Appends the rows of a block, a `corpus_rows.Rows`."""
    first_token, row = self._sizes['tokens'], self._sizes['rows']
    first_rows = []
    for document, rows in block.documents:
      if document != self._document:  # else it continues the last block's
        first_rows.append(row)
      self._document = document
      row += rows
    self._append('tokens', block.tokens)
    for name, lengths in (
      ('sentences', block.sentence_lengths),
      ('rows', block.row_lengths),
    ):
      self._append(name, np.cumsum(lengths) - lengths + first_token)
    self._append('documents', first_rows)
    self._counts.update(block.counts)

  def finish(self) -> dict[str, int]:
    """Completes the files; returns the counts of their contents."""
    counts = self._sizes.copy()
    documents = counts.pop('documents')
    self._append('sentences', [counts['tokens']])
    self._append('rows', [counts['tokens']])
    self._append('documents', [counts['rows']])
    for name, dtype in self._dtypes.items():
      shape = (self._sizes[name],)
      header = {'descr': dtype.str, 'fortran_order': False, 'shape': shape}
      with (self._folder / f'{name}.npy').open('r+b') as file:
        np.lib.format.write_array_header_1_0(file, header)
        assert file.tell() == _HEADER_BYTES
        file.flush()
        os.fsync(file.fileno())
    return {**self._counts, **counts, 'documents_with_rows': documents}

  def _append(self, name: str, values: Sequence[int] | np.ndarray) -> None:
    with (self._folder / f'{name}.npy').open('ab') as file:
      file.write(np.asarray(values, self._dtypes[name]).tobytes())
    self._sizes[name] += len(values)


def open_split(directory: pathlib.Path, name: str) -> Split:
  """Maps the arrays of a split into memory.

  Raises:
    MissingDataError: there is no corpus, or it was prepared without that split.
    InvalidDataError: a file is damaged or not the one that was written.
  """
  path = directory / MANIFEST_FILE
  if not path.exists():
    raise MissingDataError(
      f'no prepared corpus in {directory} ({path.name} is not there): '
      'python -m launch.prepare_corpus --input=TEXTS --out=DIRECTORY makes one'
    )
  try:
    manifest = json.loads(path.read_text(encoding='utf-8'))
    if manifest['format'] == FORMAT:
      max_length = operator.index(manifest['max_length'])
      vocab_size = operator.index(manifest['vocab_size'])
      splits = [*manifest['splits']]
  except (KeyError, TypeError, ValueError) as error:
    raise _damaged(path, 'a manifest', repr(error)) from error
  if manifest['format'] != FORMAT:
    raise _damaged(path, f'format {FORMAT}', manifest['format'])
  if name not in splits:
    raise MissingDataError(
      f'no split {name!r} in {directory}, it was prepared without; '
      'launch.prepare_corpus makes one with --validation_share or --validation'
    )
  arrays: dict[str, np.ndarray] = {}
  for array, dtype in _dtypes(vocab_size).items():
    path = directory / name / f'{array}.npy'
    arrays[array] = _map(path, dtype)
    owner = 'rows' if array == 'documents' else 'tokens'
    last = len(arrays[owner]) - (owner == 'rows')
    first, end = arrays[array][[0, -1]].tolist()
    if array != 'tokens' and (first, end) != (0, last):
      got = f'numbers from {first} to {end}'
      raise _damaged(path, f'numbers from 0 to {last}', got)
  lengths, limit = np.diff(arrays['rows']), max_length - SPECIAL_IN_ROW
  if len(lengths) and not MIN_ROW <= lengths.min() <= lengths.max() <= limit:
    expected = f'rows of {MIN_ROW} to {limit} tokens'
    got = f'{lengths.min()} to {lengths.max()}'
    raise _damaged(directory / name / 'rows.npy', expected, got)
  return Split(**arrays, max_length=max_length, vocab_size=vocab_size)


def _map(path: pathlib.Path, dtype: np.dtype[Any]) -> np.ndarray:
  try:
    array = np.load(path, mmap_mode='r', allow_pickle=False)
  except (EOFError, OSError, ValueError) as error:
    raise _damaged(path, 'an array', error) from error
  if array.dtype != dtype or array.ndim != 1 or not array.size:
    got = f'an array of shape {array.shape} and type {array.dtype}'
    raise _damaged(path, f'numbers of type {dtype}', got)
  return np.asarray(array)


def _damaged(path: pathlib.Path, expected: str, got: Any) -> InvalidDataError:
  return InvalidDataError(
    f'{path} is damaged: expected {expected}, got {got}; prepare the corpus '
    'again'
  )
