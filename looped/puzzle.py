"""The contract of a puzzle: tokens, symmetries and an exact verifier.

A configuration names it: puzzle=dict(name='looped.sudoku:Sudoku', rows=2).
"""

import abc
import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, Shaped

from core import registry
from core.errors import ConfigError
from dataset_lib.source import require
from halting.rule import Arrays

EVALUATED = 4  # one in EVALUATED symmetry classes is not of training
Tokens = Int32[np.ndarray, ' S']  # of a question or its answer; 0 is padding
Pair = tuple[Tokens, Tokens]


class Example(NamedTuple):
  """A puzzle with its only solution."""

  question: Tokens
  answer: Tokens
  difficulty: int


class Symmetry(NamedTuple):
  """Another form of a puzzle; the form of the solution is its solution."""

  cells: Int[np.ndarray, ' S']  # that each cell shows
  symbols: Int[np.ndarray, ' V']  # that each token becomes

  def apply(self, tokens: Tokens) -> Tokens:
    """Returns the form of a question or an answer."""
    return self.symbols[tokens[self.cells]].astype(np.int32)

  def undo(self, tokens: Tokens) -> Tokens:
    """Returns the question or answer of a form."""
    return self.symbols.argsort()[tokens[self.cells.argsort()]].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Puzzle(abc.ABC):
  """A kind of puzzle on a square of S cells that hold tokens."""

  BLANK: ClassVar[int]  # token of the cells to fill in
  FORMS: ClassVar[int] = 1024  # different symmetries, or more

  @property
  @abc.abstractmethod
  def side(self) -> int:
    """Number of rows and of columns."""

  @property
  @abc.abstractmethod
  def symbols(self) -> str:
    """Character of each token; that of padding is never typed."""

  @abc.abstractmethod
  def generate(self, rng: np.random.Generator) -> Example:
    """Draws a puzzle."""

  @abc.abstractmethod
  def symmetry(self, rng: np.random.Generator) -> Symmetry:
    """Draws a symmetry of the puzzle."""

  @abc.abstractmethod
  def signature(self, question: Tokens) -> bytes:
    """Returns bytes that no symmetry changes."""

  @abc.abstractmethod
  def solved(
    self, question: Int[Arrays, '*B S'], answer: Int[Arrays, '*B S']
  ) -> Bool[Arrays, '*B']:
    """Returns True for exactly the solutions of generated or read questions."""

  @abc.abstractmethod
  def examine(self, text: str) -> Example:
    """Solves a puzzle that a user typed; ValueError unless it has 1 solution.

    It takes about a second at most.
    """

  def blank(self, question: Int[Arrays, '*B S']) -> Bool[Arrays, '*B S']:
    """Marks the cells to fill in."""
    return question == self.BLANK

  @property
  def cells(self) -> int:
    """Number of cells, S."""
    return self.side**2

  def augment(
    self, rng: np.random.Generator, question: Tokens, answer: Tokens
  ) -> Pair:
    """Applies a random symmetry, under which a solution stays the solution."""
    form = self.symmetry(rng)
    return form.apply(question), form.apply(answer)

  def write(self, tokens: Tokens) -> str:
    """Returns a character for each token."""
    return ''.join(self.symbols[token] for token in tokens.tolist())

  def split_of(self, question: Tokens) -> str:
    """Returns 'train', 'test' or 'validation', equal for all symmetric."""
    number, rest = divmod(zlib.crc32(self.signature(question)), EVALUATED)
    return 'train' if rest else ('test', 'validation')[number % 2]

  def parse(self, text: str, legal: str) -> Tokens:
    """Returns the tokens of a text of `legal` symbols, or raises ValueError."""
    message = f'expected {self.side}x{self.side} cells, got {len(text)}'
    require(len(text) == self.cells, 'wrong_length', message)
    wrong = sorted({*text} - {*legal})
    message = f'expected the characters {legal!r}, got {wrong[:1]}'
    require(not wrong, 'illegal_character', message)
    return np.array([self.symbols.index(c) for c in text], np.int32)


def puzzle_of(dataset: Mapping[str, Any]) -> Puzzle:
  """Returns the puzzle of a run's data; ConfigError if it has none."""
  values = dict(dataset).get('puzzle')
  if values is None:
    expected = 'data of a puzzle that can be typed and verified, with a field '
    raise ConfigError('dataset', dataset.get('name'), f'{expected}`puzzle`')
  puzzle: Puzzle = registry.named(values, 'dataset.puzzle', Puzzle)
  return puzzle


def dihedral(
  grid: Shaped[np.ndarray, 'H W'], number: int
) -> Shaped[np.ndarray, '_ _']:
  """Returns rotation or reflection `number` of 8; 0: the grid itself."""
  return np.rot90(grid.T if number >= 4 else grid, number % 4)
