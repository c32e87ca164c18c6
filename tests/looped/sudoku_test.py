"""Sudoku against a plain solver and a plain check of sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from looped import sudoku
from looped.sudoku import BLANK, Sudoku

SIZES = pytest.mark.parametrize(
  ('rows', 'columns'), [(2, 2), (2, 3), (3, 2), (3, 3)]
)
# Wikipedia's example.
BOARD = (
  '53..7....6..195....98....6.8...6...34..8.3..17...2...6'
  '.6....28....419..5....8..79'
)


def examples(rows, columns, count, **fields):
  puzzle = Sudoku(rows, columns, **fields)
  rngs = map(np.random.default_rng, range(count))
  return puzzle, [puzzle.generate(rng) for rng in rngs]


def candidates(grid, rows, columns, cell):
  """Digits that no cell of the same row, column or box has."""
  size = rows * columns
  y, x = divmod(cell, size)
  digits = set(range(1, size + 1))
  for other, digit in enumerate(grid):
    v, u = divmod(other, size)
    in_box = (v // rows, u // columns) == (y // rows, x // columns)
    if v == y or u == x or in_box:
      digits -= {digit}
  return digits


def plain(grid, rows, columns):
  """All solutions and all guesses, at the cell with the fewest candidates."""
  choices = {
    cell: candidates(grid, rows, columns, cell)
    for cell, digit in enumerate(grid) if not digit
  }  # fmt: skip
  if not choices:
    return [grid], 0
  cell = min(choices, key=lambda cell: len(choices[cell]))
  solutions, guesses = [], len(choices[cell]) * (len(choices[cell]) > 1)
  for digit in choices[cell]:
    deeper = plain([*grid[:cell], digit, *grid[cell + 1 :]], rows, columns)
    solutions, guesses = solutions + deeper[0], guesses + deeper[1]
  return solutions, guesses


def is_solution(question, answer, rows, columns):
  """True if every digit is the only candidate of its cell, and clues stay."""
  kept = ((question == BLANK) | (question == answer)).all()
  grid = (answer - 1).tolist()
  return kept and all(
    candidates([*grid[:n], 0, *grid[n + 1 :]], rows, columns, n) == {digit}
    for n, digit in enumerate(grid)
  )


def test_4x4_has_288_grids_in_two_classes():
  puzzle, rng = Sudoku(2, 2), np.random.default_rng(0)
  empty = np.full(16, BLANK, np.int32)
  grids, _ = puzzle.solutions(empty, limit=1000)
  assert len({grid.tobytes() for grid in grids}) == 288
  assert all(is_solution(empty, grid, 2, 2) for grid in grids)
  classes = {
    frozenset(puzzle.augment(rng, g, g)[1].tobytes() for _ in range(2500))
    for g in grids[:12]
  }
  assert sorted(map(len, classes)) == [96, 192]


@SIZES
def test_a_puzzle_has_the_solution_and_guesses_of_a_plain_solver(rows, columns):
  puzzle, drawn = examples(rows, columns, 4 if rows * columns == 9 else 20)
  assert len({example.question.tobytes() for example in drawn}) == len(drawn)
  for question, answer, difficulty in drawn:
    grid = [max(0, token - 1) for token in question.tolist()]
    solutions, guesses = plain(grid, rows, columns)
    assert solutions == [(answer - 1).tolist()]
    assert difficulty == guesses
    assert (puzzle.examine(puzzle.write(question))[0] == question).all()


def test_a_share_of_the_puzzles_is_minimal_and_the_hardest_draft_is_taken():
  for share in (0.0, 1.0):
    puzzle, drawn = examples(2, 3, 20, minimal=share)
    for question, *_ in drawn:
      fewer = np.tile(question, (36, 1))
      np.fill_diagonal(fewer, BLANK)
      counts = [len(puzzle.solutions(f)[0]) for f in fewer[question != BLANK]]
      assert (min(counts) == 2) == (share == 1)
  _, hard = examples(2, 3, 20, minimal=1.0, drafts=4)
  means = [np.mean([e.difficulty for e in some]) for some in (hard, drawn)]
  assert means[0] > 2 * means[1]


@SIZES
def test_a_symmetry_keeps_solution_and_split(rows, columns):
  puzzle, drawn = examples(rows, columns, 5)
  rng = np.random.default_rng(1)
  for question, answer, _ in drawn:
    images = [puzzle.augment(rng, question, answer) for _ in range(40)]
    assert len({moved.tobytes() for moved, _ in images}) > 35
    for moved, solution in images:
      assert is_solution(moved, solution, rows, columns)
      assert puzzle.blank(moved).sum() == puzzle.blank(question).sum()
      assert puzzle.signature(moved) == puzzle.signature(question)
      assert puzzle.split_of(moved) == puzzle.split_of(question)


@SIZES
def test_verifier_is_the_plain_check(rows, columns):
  puzzle, drawn = examples(rows, columns, 4)
  rng = np.random.default_rng(0)
  pairs = [(question, answer) for question, answer, _ in drawn]
  for question, answer in tuple(pairs):
    for _ in range(20):  # a wrong cell, two swapped, the solution of another
      wrong, swapped = answer.copy(), answer.copy()
      i, j = rng.choice(puzzle.cells, 2, replace=False)
      wrong[i] = rng.integers(puzzle.side + 3)
      swapped[[i, j]] = swapped[[j, i]]
      moved = puzzle.augment(rng, question, answer)[1]
      pairs += [(question, x) for x in (wrong, swapped, moved, question)]
  expected = [is_solution(*pair, rows, columns) for pair in pairs]
  assert sum(expected) >= len(drawn)
  questions, answers = map(np.stack, zip(*pairs, strict=True))
  assert puzzle.solved(questions, answers).tolist() == expected
  solved = jax.jit(puzzle.solved)(jnp.array(questions), jnp.array(answers))
  assert solved.tolist() == expected
  assert puzzle.solved(*pairs[0]).shape == ()
  assert puzzle.solved(questions[None], answers[None]).tolist() == [expected]


@pytest.mark.parametrize(('text', 'message'), [
  (BOARD[:-1], 'expected 9x9 cells, got 80'),
  (BOARD[:-1] + 'x', r"expected the characters '\.123456789', got \['x'\]"),
  ('55' + BOARD[2:], 'row 1 has the digit 5 more than once'),
  ('6' + BOARD[1:], 'column 1 has the digit 6 more than once'),
  (BOARD[:2] + '9' + BOARD[3:], 'box 1 has the digit 9 more than once'),
  ('12345678.........9' + '.' * 63, 'the board has no solution'),
  ('.' * 81, 'the board has several solutions; add digits'),
  ('.....5.8....6.1.43..........1.5........1.6...3.......553.....61........4'
   '.........', 'the board takes more than 500 guesses'),
])  # fmt: skip
def test_refuses_a_board_and_says_why(text, message, monkeypatch):
  monkeypatch.setattr(sudoku, 'MAX_GUESSES', 500)
  lines = f'{BOARD[:27]}\n{BOARD[27:].replace(".", "0")}\n'
  assert Sudoku().write(Sudoku().examine(lines).question) == BOARD
  with pytest.raises(ValueError, match=message):
    Sudoku().examine(text)
