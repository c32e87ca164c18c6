"""A prepared corpus on disk: arrays that are mapped into memory, never read.

  DIRECTORY/tokenizer.json
  DIRECTORY/corpus.json             counts, and faults of the texts
  DIRECTORY/faults.jsonl            each file that was left out, if any
  DIRECTORY/SPLIT/tokens.npy        uint16 or int32 [M], all rows concatenated,
                                    without special tokens
  DIRECTORY/SPLIT/sentences.npy     int64 [S + 1], begin of each sentence in
                                    the tokens, and their end
  DIRECTORY/SPLIT/rows.npy          int64 [R + 1], begin of each row, and end
  DIRECTORY/SPLIT/documents.npy     int64 [D + 1], first row of each document,
                                    and the number of rows

SPLIT is train or validation; no file and no record is in both. Opening reads
rows.npy, and of the other arrays only their ends.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

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
SHOWN_PER_KIND = 5

# Faults of whole files, folders and records, all of which are named.
FILE_ACTIONS = {
  'empty_file': 'left out',
  'not_utf8_file': 'left out',
  'truncated_gzip': 'read as far as it goes',
  'damaged_gzip': 'read as far as it goes',
  'unreadable_file': 'left out from there on',
  'unreadable_record': 'left out',
  'repeated_file': 'read once',
  'other_file': 'left out: neither .txt nor .txt.gz',
  'linked_folder': 'left out: links to folders are not followed',
}
ACTIONS = FILE_ACTIONS | {
  'broken_bytes': 'what is no UTF-8 became U+FFFD; counted once a line',
  'nul_bytes': 'removed',
  'byte_order_mark': 'removed',
  'long_line': 'cut at spaces',
  'one_sentence_document': 'kept: its rows are cut at a word instead',
  'too_short': 'left out: less than two tokens cannot be two segments',
}


class Faults:
  """Counts faults of texts by kind and names the first few; not thread-safe.

  Attributes:
    files: {'kind', 'where', 'message'} of every fault of a whole file.
  """

  def __init__(self) -> None:
    self.files: list[dict[str, str]] = []
    self._kinds: dict[str, dict[str, Any]] = {}

  def add(self, kind: str, where: str, message: str = '') -> None:
    """Counts one fault, a key of `ACTIONS`."""
    entry = self._kinds.setdefault(
      kind, {'count': 0, 'action': ACTIONS[kind], 'first': []}
    )
    entry['count'] += 1
    place = {'where': where, 'message': message}
    if len(entry['first']) < SHOWN_PER_KIND:
      entry['first'].append(place)
    if kind in FILE_ACTIONS:
      self.files.append({'kind': kind} | place)

  def summary(self) -> dict[str, dict[str, Any]]:
    """Returns {kind: {'count', 'action', 'first': [{'where', 'message'}]}}."""
    return {kind: self._kinds[kind] for kind in sorted(self._kinds)}


@dataclasses.dataclass(frozen=True)
class Split:
  """The arrays of one split, mapped into memory; see above."""

  tokens: Shaped[np.ndarray, ' M']
  sentences: Int64[np.ndarray, ' S']
  rows: Int64[np.ndarray, ' R']
  documents: Int64[np.ndarray, ' D']


ARRAYS = tuple(field.name for field in dataclasses.fields(Split))


def token_dtype(vocab_size: int) -> type[np.integer]:
  """Returns the smallest type that holds the token ids: uint16 or int32."""
  return np.uint16 if vocab_size <= 2**16 else np.int32


class SplitWriter:
  """Writes the arrays of one split, block by block.

  Args:
    folder: to be made.
    dtype: of the token ids.
    stack: closes the files.
  """

  def __init__(
    self, folder: pathlib.Path, dtype: Any, stack: contextlib.ExitStack
  ):
    folder.mkdir()
    self._counts: collections.Counter[str] = collections.Counter()
    self._lengths = dict.fromkeys(ARRAYS, 0)
    self._dtypes = dict.fromkeys(ARRAYS, np.dtype(np.int64))
    self._dtypes['tokens'] = np.dtype(dtype)
    self._files = {
      name: stack.enter_context((folder / f'{name}.npy').open('xb'))
      for name in ARRAYS
    }
    for name in self._files:
      self._write_header(name)
    self._document = -1

  def add(self, block: Any) -> None:
    """Appends the rows of a block, a `corpus_rows.Rows`."""
    first_token, row = self._lengths['tokens'], self._lengths['rows']
    self._append('tokens', block.tokens)
    self._append('sentences', _starts(block.sentence_lengths) + first_token)
    self._append('rows', _starts(block.row_lengths) + first_token)
    for document, rows in block.documents:
      if document != self._document:  # else it continues the last block's
        self._append('documents', np.array([row]))
      self._document = document
      row += rows
    self._counts.update(block.counts)

  def finish(self) -> dict[str, int]:
    """Completes the files; returns the counts of their contents."""
    counts = dict(self._lengths)
    documents = counts.pop('documents')
    for name in ('sentences', 'rows'):
      self._append(name, np.array([counts['tokens']]))
    self._append('documents', np.array([counts['rows']]))
    for name, file in self._files.items():
      start = file.tell() - self._lengths[name] * self._dtypes[name].itemsize
      file.seek(0)
      self._write_header(name)
      # The format reserves room in the header for a growing array.
      assert file.tell() == start
      file.flush()
      os.fsync(file.fileno())
    return {**self._counts, **counts, 'documents_with_rows': documents}

  def _append(self, name: str, values: Shaped[np.ndarray, ' N']) -> None:
    self._files[name].write(values.astype(self._dtypes[name]).tobytes())
    self._lengths[name] += len(values)

  def _write_header(self, name: str) -> None:
    header = {
      'descr': np.lib.format.dtype_to_descr(self._dtypes[name]),
      'fortran_order': False,
      'shape': (self._lengths[name],),
    }
    np.lib.format.write_array_header_1_0(self._files[name], header)


def _starts(lengths: Shaped[np.ndarray, ' N']) -> Int64[np.ndarray, ' N']:
  lengths = lengths.astype(np.int64)
  return np.cumsum(lengths) - lengths


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
  """Reads `corpus.json`.

  Raises:
    MissingDataError: there is none; the message has the command to prepare.
    InvalidDataError: it is damaged, or of another version.
  """
  path = directory / MANIFEST_FILE
  try:
    manifest = json.loads(path.read_text(encoding='utf-8'))
    version = manifest['format']
    if version == FORMAT:
      numbers = [manifest['max_length'], manifest['vocab_size']]
      for counts in manifest['splits'].values():
        numbers += [_length(counts, array) for array in ARRAYS]
      if not all(isinstance(number, int) for number in numbers):
        raise TypeError(f'expected integers, got {numbers}')
  except FileNotFoundError as error:
    raise MissingDataError(
      f'no prepared corpus in {directory} ({MANIFEST_FILE} is not there): '
      'python -m launch.prepare_corpus --input=TEXTS --out=DIRECTORY makes one'
    ) from error
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise InvalidDataError(f'{path} is damaged: {error!r}') from error
  if version != FORMAT:
    raise InvalidDataError(
      f'{path}: expected format {FORMAT}, got {version!r}; prepare the corpus '
      'again'
    )
  return manifest


def open_split(
  directory: pathlib.Path, manifest: Mapping[str, Any], name: str
) -> Split:
  """Maps the arrays of a split into memory.

  Raises:
    MissingDataError: the corpus was prepared without that split.
    InvalidDataError: an array is damaged or not the one that was written.
  """
  if name not in manifest['splits']:
    raise MissingDataError(
      f'no split {name!r} in {directory}, it was prepared without; '
      'launch.prepare_corpus makes one with --validation_share or --validation'
    )
  counts, arrays = manifest['splits'][name], {}
  for array in ARRAYS:
    path = directory / name / f'{array}.npy'
    try:
      mapped = np.load(path, mmap_mode='r', allow_pickle=False)
    except (EOFError, OSError, ValueError) as error:
      raise InvalidDataError(
        f'{path} is missing or damaged ({error}); prepare the corpus again'
      ) from error
    kind = token_dtype(manifest['vocab_size']) if array == 'tokens' else 'int64'
    expected = (_length(counts, array),), np.dtype(kind)
    if (mapped.shape, mapped.dtype) != expected:
      raise InvalidDataError(
        f'{path}: expected {expected[0][0]} numbers of type {expected[1]}, got '
        f'an array of shape {mapped.shape} and type {mapped.dtype}; prepare '
        'the corpus again'
      )
    arrays[array] = np.asarray(mapped)
  split = Split(**arrays)
  _check_bounds(split, directory / name, manifest['max_length'])
  return split


def _check_bounds(split: Split, folder: pathlib.Path, max_length: int) -> None:
  """Raises InvalidDataError where a table leads out of the next."""
  tokens, rows = len(split.tokens), len(split.rows) - 1
  for name, last in (('sentences', tokens), ('rows', tokens),
                     ('documents', rows)):  # fmt: skip
    first, end = getattr(split, name)[[0, -1]].tolist()
    if (first, end) != (0, last):
      raise InvalidDataError(
        f'{folder / name}.npy: expected numbers from 0 to {last}, got them '
        f'from {first} to {end}; prepare the corpus again'
      )
  lengths, limit = np.diff(split.rows), max_length - SPECIAL_IN_ROW
  if rows and not MIN_ROW <= lengths.min() <= lengths.max() <= limit:
    raise InvalidDataError(
      f'{folder}/rows.npy: expected rows of {MIN_ROW} to {limit} tokens, got '
      f'{lengths.min()} to {lengths.max()}; prepare the corpus again'
    )


def _length(counts: Mapping[str, int], array: str) -> int:
  if array == 'documents':
    return counts['documents_with_rows'] + 1
  return counts[array] + (array != 'tokens')
