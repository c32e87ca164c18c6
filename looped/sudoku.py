"""Sudoku with boxes of any size: a generator, a solver and a verifier.

Tokens: 0 padding, 1 blank, 2 .. n + 1 the digits 1 .. n.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Int

from dataset_lib.source import require
from halting.rule import Arrays, namespace
from looped.puzzle import Example, Puzzle, Symmetry, Tokens

BLANK = 1
# Of a search, about a second, as users type boards; generated ones need less
# than 400, a legal one may need more.
MAX_GUESSES = 20_000
RESTORED = 0.3, 0.6  # share of the removed clues that easier puzzles get back
BoxSide = Annotated[int, Interval(ge=2, le=3)]


@functools.cache
def units(rows: int, columns: int) -> Int[np.ndarray, 'U N']:
  """Returns the cells of each row, column and box, in this order."""
  size = rows * columns
  grid = np.arange(size * size).reshape(size, size)
  boxes = grid.reshape(columns, rows, rows, columns).swapaxes(1, 2)
  return np.concatenate([grid, grid.T, boxes.reshape(size, size)])


class Board:
  """A grid whose digits are bits, 0 for a blank, and a search in it."""

  def __init__(self, rows: int, columns: int, bits: Sequence[int]):
    size = rows * columns
    order = units(rows, columns).argsort(axis=None, kind='stable') // size
    self._units = order.reshape(-1, 3).tolist()  # row, column, box of a cell
    self._values = [1 << digit for digit in range(size)]
    self._used = [0] * (3 * size)  # bits in each unit
    self.bits, self.guesses = [0] * size**2, 0
    for cell, bit in enumerate(bits):
      self.flip(cell, bit)

  def flip(self, cell: int, bit: int) -> None:
    """Sets a digit of a blank cell, or removes it."""
    self.bits[cell] ^= bit
    for unit in self._units[cell]:
      self._used[unit] ^= bit

  def _fewest(self, cells: Iterable[int]) -> tuple[int, int]:
    """Returns the first cell with the fewest candidates, and their bits."""
    used, every = self._used, (1 << len(self._values)) - 1
    least, best = 99, (-1, 0)
    for cell in cells:
      row, column, box = self._units[cell]
      free = every & ~(used[row] | used[column] | used[box])
      if (count := free.bit_count()) < least:
        least, best = count, (cell, free)
        if count <= 1:
          break
    return best

  def search(
    self, limit: int, orders: Sequence[Sequence[int]] = ()
  ) -> list[list[int]]:
    """Returns up to `limit` solutions, and counts guesses.

    A guess is a value tried in a cell with several candidates, where no cell
    has fewer. `orders` are the values of each cell, as they are tried.
    """
    blanks = (cell for cell, bit in enumerate(self.bits) if not bit)
    cell, free = self._fewest(blanks)
    if cell < 0:
      return [self.bits.copy()]
    solutions: list[list[int]] = []
    for bit in orders[cell] if orders else self._values:
      if bit & free and len(solutions) < limit:
        self.guesses += free != bit
        if self.guesses > MAX_GUESSES:
          raise ValueError(f'the board takes more than {MAX_GUESSES} guesses')
        self.flip(cell, bit)
        solutions += self.search(limit - len(solutions), orders)
        self.flip(cell, bit)
    return solutions

  def remove(self, cell: int) -> None:
    """Removes a digit if the only solution stays the only one."""
    bit = self.bits[cell]
    self.flip(cell, bit)
    _, free = self._fewest([cell])
    for other in self._values:
      if other & free & ~bit:
        self.guesses = 0
        self.flip(cell, other)
        solutions = self.search(1)
        self.flip(cell, other)
        if solutions:
          self.flip(cell, bit)
          return


@dataclasses.dataclass(frozen=True)
class Sudoku(Puzzle):
  """Sudoku; its difficulty is the number of guesses of `Board.search`.

  A share of the puzzles is `minimal`: without any clue they have more
  solutions. A puzzle is the hardest of some `drafts`.
  """

  BLANK: ClassVar[int] = BLANK
  rows: BoxSide = 3  # of a box
  columns: BoxSide = 3
  minimal: Annotated[float, Interval(ge=0.0, le=1.0)] = 0.5
  drafts: Annotated[int, Interval(ge=1, le=100)] = 1

  @property
  def side(self) -> int:
    """Number of digits, n."""
    return self.rows * self.columns

  @property
  def symbols(self) -> str:
    """See the base."""
    return '?.123456789'[: self.side + 2]

  def solutions(
    self, question: Tokens, limit: int = 2
  ) -> tuple[list[Tokens], int]:
    """Returns up to `limit` solutions of a board, and the number of guesses.

    With fewer than `limit` solutions all values were tried, in any order.
    """
    bits = ((1 << question) >> 2).tolist()
    board = Board(self.rows, self.columns, bits)
    answers = board.search(limit)
    return [_tokens(answer) for answer in answers], board.guesses

  def generate(self, rng: np.random.Generator) -> Example:
    """Removes clues of a random grid, in random order, while it is unique."""
    drafts = [self._draft(rng) for _ in range(self.drafts)]
    return max(drafts, key=lambda draft: draft.difficulty)

  def _draft(self, rng: np.random.Generator) -> Example:
    values = np.tile(1 << np.arange(self.side), (self.cells, 1))
    orders = rng.permuted(values, axis=1).tolist()
    [full] = Board(self.rows, self.columns, [0] * self.cells).search(1, orders)
    board = Board(self.rows, self.columns, full)
    for cell in rng.permutation(self.cells).tolist():
      board.remove(cell)
    if rng.random() >= self.minimal:
      removed = rng.permutation(np.flatnonzero(np.array(board.bits) == 0))
      count = round(rng.uniform(*RESTORED) * len(removed))
      for cell in removed[:count].tolist():
        board.flip(cell, full[cell])
    question = _tokens(board.bits)
    [answer], guesses = self.solutions(question)
    return Example(question, answer, guesses)

  def symmetry(self, rng: np.random.Generator) -> Symmetry:
    """Permutes digits, bands, stacks, rows and columns; transposes squares."""
    digits = np.append([0, BLANK], 2 + rng.permutation(self.side))
    rows, columns = (
      # Lines of a band or stack stay together.
      np.lexsort((rng.random(self.side), rng.random(self.side // n).repeat(n)))
      for n in (self.rows, self.columns)
    )
    cells = rows[:, None] * self.side + columns
    if self.rows == self.columns and rng.random() < 0.5:
      cells = cells.T
    return Symmetry(cells.ravel(), digits)

  def signature(self, question: Tokens) -> bytes:
    """Counts the clues of rows in bands, of columns in stacks, of digits."""
    grid = question.reshape(self.side, self.side) > BLANK
    rows, columns = (
      sorted(np.sort(grid.sum(axis).reshape(-1, n)).tolist())
      for axis, n in ((1, self.rows), (0, self.columns))
    )
    sides = [rows, columns]
    if self.rows == self.columns:
      sides.sort()
    digits = np.bincount(question, minlength=self.side + 2)[2:]
    return repr((sides, sorted(digits.tolist()))).encode()

  def solved(
    self, question: Int[Arrays, '*B S'], answer: Int[Arrays, '*B S']
  ) -> Bool[Arrays, '*B']:
    """Checks the clues, and that all digits of each unit differ."""
    xp = namespace(answer)
    kept = (question == answer) | self.blank(question)
    legal = kept & (answer > BLANK) & (answer < self.side + 2)
    ordered = xp.sort(answer[..., units(self.rows, self.columns)], axis=-1)
    differ = ordered[..., 1:] != ordered[..., :-1]
    return xp.asarray(legal.all(-1) & differ.all((-2, -1)))

  def examine(self, text: str) -> Example:
    """Reads digits, `.` or 0 for a blank; white space is ignored."""
    text = re.sub(r'\s', '', text).replace('0', '.')
    question = self.parse(text, self.symbols[BLANK:])
    for number, cells in enumerate(units(self.rows, self.columns)):
      counts = np.bincount(question[cells], minlength=3)[2:]
      kind, place = divmod(number, self.side)
      message = f'{("row", "column", "box")[kind]} {place + 1} has the digit '
      message += f'{counts.argmax() + 1} more than once'
      require(counts.max() <= 1, 'contradiction', message)
    solutions, guesses = self.solutions(question)
    require(solutions, 'no_solution', 'the board has no solution')
    message = 'the board has several solutions; add digits'
    require(len(solutions) == 1, 'several_solutions', message)
    return Example(question, solutions[0], guesses)


def _tokens(bits: Sequence[int]) -> Tokens:
  return np.array([bit.bit_length() + 1 for bit in bits], np.int32)
