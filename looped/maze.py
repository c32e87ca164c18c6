"""Mazes without loops, in which exactly one path joins start and goal.

Tokens: 0 padding, 1 wall, 2 free, 3 start, 4 goal, 5 path (of answers only).
"""

import dataclasses
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval, Predicate
from jaxtyping import Bool, Int

from dataset_lib.source import require
from halting.rule import Arrays, namespace
from looped.puzzle import Example, Puzzle, Symmetry, Tokens, dihedral

WALL, FREE, START, GOAL, PATH = range(1, 6)
NUM_SYMMETRIES = 8
STEPS = (0, 1), (0, -1), (1, 0), (-1, 0)
IsOdd = Predicate(lambda side: side % 2)


@dataclasses.dataclass(frozen=True)
class Maze(Puzzle):
  """A square with walls around; the difficulty is the number of path cells."""

  side: Annotated[int, Interval(ge=7, le=41), IsOdd, 'odd, in [7, 41]'] = 11

  BLANK: ClassVar[int] = FREE
  FORMS: ClassVar[int] = NUM_SYMMETRIES
  symbols: ClassVar[str] = '?# SGo'

  def generate(self, rng: np.random.Generator) -> Example:
    """Joins the rooms, cells of odd coordinates, by a depth-first search."""
    grid = np.full((self.side, self.side), WALL, np.int32)

    def visit(row: int, column: int) -> None:
      grid[row, column] = FREE
      for down, right in rng.permutation(STEPS).tolist():
        room = row + 2 * down, column + 2 * right
        is_inside = min(room) > 0 and max(room) < self.side
        if is_inside and grid[room] == WALL:
          grid[row + down, column + right] = FREE
          visit(*room)

    visit(1, 1)
    ends = rng.choice((self.side // 2) ** 2, 2, replace=False)
    grid[1::2, 1::2].flat[ends] = START, GOAL
    question = grid.ravel()
    return self._solved(question, self._search(question)[0])

  def symmetry(self, rng: np.random.Generator) -> Symmetry:
    """Rotates and reflects."""
    number = int(rng.integers(NUM_SYMMETRIES))
    cells = np.arange(self.cells, dtype=np.int32)
    return Symmetry(self._turned(cells, number), np.arange(len(self.symbols)))

  def signature(self, question: Tokens) -> bytes:
    """Returns the least of the 8 forms."""
    forms = (self._turned(question, n) for n in range(NUM_SYMMETRIES))
    return min(form.tobytes() for form in forms)

  def solved(
    self, question: Int[Arrays, '*B S'], answer: Int[Arrays, '*B S']
  ) -> Bool[Arrays, '*B']:
    """Checks that each end has 1 neighbour on the path, others of it 2.

    Then marked cells form paths between ends, and rings. Without loops in the
    maze there is no ring, so that the one path joins start and goal.
    """
    xp = namespace(answer)
    marked = (answer == PATH) & self.blank(question)
    is_end = (question == START) | (question == GOAL)
    numbers = (is_end | marked).astype('int32')
    # Walls are around the maze, so that nothing wraps.
    steps = (1, -1, self.side, -self.side)
    count = sum(xp.roll(numbers, step, axis=-1) for step in steps)
    joined = (numbers == 0) | (count == xp.where(is_end, 1, 2))
    return xp.asarray((joined & (marked | (answer == question))).all(-1))

  def examine(self, text: str) -> Example:
    """Reads the rows of a maze; line breaks are ignored."""
    text = text.replace('\r', '').replace('\n', '')
    question = self.parse(text, self.symbols[WALL:PATH])
    for token in (START, GOAL):
      message = f'expected one {self.symbols[token]}'
      require((question == token).sum() == 1, 'wrong_ends', message)
    is_open = question.reshape(self.side, self.side) != WALL
    is_closed = is_open.sum() == is_open[1:-1, 1:-1].sum()
    require(is_closed, 'no_walls', 'expected walls all around the maze')
    path, reached = self._search(question)
    require(path, 'no_solution', 'no path leads from S to G')
    # A connected graph of n nodes and n - 1 edges is a tree.
    edges = (is_open[1:] & is_open[:-1]).sum()
    edges += (is_open[:, 1:] & is_open[:, :-1]).sum()
    is_tree = is_open.sum() == reached == edges + 1
    message = 'expected no loops, and no free cells that S does not reach'
    require(is_tree, 'several_solutions', message)
    return self._solved(question, path)

  def _solved(self, question: Tokens, path: list[int]) -> Example:
    answer = question.copy()
    answer[path[1:-1]] = PATH
    return Example(question, answer, len(path))

  def _search(self, question: Tokens) -> tuple[list[int], int]:
    """Returns the path from start to goal, or [], and the cells reached."""
    cells = question.tolist()
    before, path = {cells.index(START): -1}, []
    reached = [*before]
    for cell in reached:
      for step in (-self.side, self.side, -1, 1):
        if cells[cell + step] != WALL and cell + step not in before:
          before[cell + step] = cell
          reached.append(cell + step)
    cell = cells.index(GOAL)
    while cell in before:
      path.append(cell)
      cell = before[cell]
    return path[::-1], len(reached)

  def _turned(self, tokens: Tokens, number: int) -> Tokens:
    return dihedral(tokens.reshape(self.side, self.side), number).ravel()
