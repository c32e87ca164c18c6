"""A prepared corpus on disk: arrays that are mapped into memory, never read.

  DIRECTORY/tokenizer.json
  DIRECTORY/corpus.json             counts, and what was left out and why
  DIRECTORY/faults.jsonl            each file that was left out, if any was
  DIRECTORY/SPLIT/tokens.npy        uint16 or int32 [M], all rows one behind
                                    the other, without special tokens
  DIRECTORY/SPLIT/sentences.npy     int64 [S + 1], where sentences begin in
                                    the tokens, and their end
  DIRECTORY/SPLIT/rows.npy          int64 [R + 1], where rows begin, and the end
  DIRECTORY/SPLIT/documents.npy     int64 [D + 1], the first row of each
                                    document, and the number of rows

SPLIT is train or validation; no file and no record is in both. Opening reads
rows.npy, and nothing of the other arrays but their ends.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from dataset_lib.corpus_blocks import Rows, token_dtype
from dataset_lib.corpus_packing import MIN_ROW
from dataset_lib.errors import InvalidDataError, MissingDataError

FORMAT = 1  # of the directory; another number is refused
TRAIN, VALIDATION = 'train', 'validation'
SPLITS = (TRAIN, VALIDATION)
SPECIAL_IN_ROW = 3  # [CLS] a [SEP] b [SEP]
MANIFEST_FILE, TOKENIZER_FILE = 'corpus.json', 'tokenizer.json'
FAULTS_FILE = 'faults.jsonl'


@dataclasses.dataclass(frozen=True)
class Split:
  """The arrays of one split, mapped into memory; see above."""

  tokens: Shaped[np.ndarray, ' M']
  sentences: Int64[np.ndarray, ' S']
  rows: Int64[np.ndarray, ' R']
  documents: Int64[np.ndarray, ' D']


ARRAYS = tuple(field.name for field in dataclasses.fields(Split))


class ArrayFile:
  """A one-dimensional `.npy` file that grows at its end.

  Args:
    path: the file; it must not be there.
    dtype: of its numbers.
  """

  def __init__(self, path: pathlib.Path, dtype: Any):
    self.length = 0
    self._dtype = np.dtype(dtype)
    self._file = path.open('xb')
    self._write_header()

  def append(self, values: Shaped[np.ndarray, ' N']) -> None:
    """Writes numbers behind the last ones."""
    self._file.write(values.astype(self._dtype, copy=False).tobytes())
    self.length += len(values)

  def finish(self) -> None:
    """Writes the number of numbers, and all of it to the disk."""
    start = self._file.tell() - self.length * self._dtype.itemsize
    self._file.seek(0)
    self._write_header()
    # The format leaves room in the header for the length of a growing array.
    assert self._file.tell() == start
    self._file.flush()
    os.fsync(self._file.fileno())
    self.close()

  def close(self) -> None:
    """Closes the file as it is."""
    self._file.close()

  def _write_header(self) -> None:
    header = {
      'descr': np.lib.format.dtype_to_descr(self._dtype),
      'fortran_order': False,
      'shape': (self.length,),
    }
    np.lib.format.write_array_header_1_0(self._file, header)


class SplitWriter:
  """Writes the arrays of one split, block by block; a context manager.

  Args:
    folder: where to write; it is made.
    dtype: of the token ids.
  """

  def __init__(self, folder: pathlib.Path, dtype: Any):
    folder.mkdir()
    self.counts: dict[str, int] = {}
    self._files = {
      name: ArrayFile(
        folder / f'{name}.npy', dtype if name == 'tokens' else np.int64
      )
      for name in ARRAYS
    }
    self._document = -1

  def __enter__(self) -> 'SplitWriter':
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    for file in self._files.values():
      file.close()

  def add(self, block: Rows) -> None:
    """Appends the rows of a block."""
    files = self._files
    first_token, row = files['tokens'].length, files['rows'].length
    files['tokens'].append(block.tokens)
    files['sentences'].append(_starts(block.sentence_lengths) + first_token)
    files['rows'].append(_starts(block.row_lengths) + first_token)
    for document, rows in block.documents:
      if document != self._document:  # else it goes on from the last block
        files['documents'].append(np.array([row]))
      self._document = document
      row += rows
    for name, count in block.counts.items():
      self.counts[name] = self.counts.get(name, 0) + count

  def finish(self) -> dict[str, int]:
    """Completes the files; returns what is in them."""
    files = self._files
    lengths = {name: file.length for name, file in files.items()}
    for name in ('sentences', 'rows'):
      files[name].append(np.array([lengths['tokens']]))
    files['documents'].append(np.array([lengths['rows']]))
    for file in files.values():
      file.finish()
    documents = lengths.pop('documents')
    return self.counts | lengths | {'documents_with_rows': documents}


def _starts(lengths: Shaped[np.ndarray, ' N']) -> Int64[np.ndarray, ' N']:
  lengths = lengths.astype(np.int64)
  return np.cumsum(lengths) - lengths


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
  """What `corpus.json` says.

  Raises:
    MissingDataError: there is none; the message has the command to prepare.
    InvalidDataError: it is damaged, or of another version.
  """
  path = directory / MANIFEST_FILE
  try:
    manifest = json.loads(path.read_text(encoding='utf-8'))
    version = manifest['format']
    if version == FORMAT:
      _check_numbers(manifest)
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


def _check_numbers(manifest: Mapping[str, Any]) -> None:
  """Raises one of many errors unless the numbers are there that are read."""
  numbers = [manifest['max_length'], manifest['vocab_size']]
  for counts in manifest['splits'].values():
    numbers += [_length(counts, array) for array in ARRAYS]
  if not all(isinstance(number, int) for number in numbers):
    raise TypeError(f'expected integers, got {numbers}')


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
  counts = manifest['splits'][name]
  arrays = {}
  for array in ARRAYS:
    path = directory / name / f'{array}.npy'
    try:
      mapped = np.load(path, mmap_mode='r', allow_pickle=False)
    except (EOFError, OSError, ValueError) as error:
      raise InvalidDataError(
        f'{path} is missing or damaged ({error}); prepare the corpus again'
      ) from error
    arrays[array] = np.asarray(mapped)
    expected = _length(counts, array)
    dtype = np.dtype(
      token_dtype(manifest['vocab_size']) if array == 'tokens' else np.int64
    )
    if mapped.shape != (expected,) or mapped.dtype != dtype:
      raise InvalidDataError(
        f'{path}: expected {expected} numbers of type {dtype}, got an array of '
        f'shape {mapped.shape} and type {mapped.dtype}; prepare the corpus '
        'again'
      )
  split = Split(**arrays)
  _check_bounds(split, directory / name, manifest['max_length'])
  return split


def _check_bounds(split: Split, folder: pathlib.Path, max_length: int) -> None:
  """Raises InvalidDataError where a table leads out of the next."""
  tokens, rows = len(split.tokens), len(split.rows) - 1
  for name, last in (('sentences', tokens), ('rows', tokens),
                     ('documents', rows)):  # fmt: skip
    ends = getattr(split, name)[[0, -1]].tolist()
    if ends != [0, last]:
      raise InvalidDataError(
        f'{folder / name}.npy: expected numbers from 0 to {last}, got them '
        f'from {ends[0]} to {ends[1]}; prepare the corpus again'
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
