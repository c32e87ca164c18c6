"""Mazes against a search of all simple paths, and all their markings."""

import itertools

import jax
import numpy as np
import pytest

from looped.maze import FREE, GOAL, PATH, START, WALL, Maze

TREE = '#######|#S    #|# ### #|# # # #|# # # #|#   #G#|#######'


def paths(cells, side):
  """Every simple path from start to goal."""

  def extended(path):
    if cells[path[-1]] == GOAL:
      yield path
      return
    for step in (1, -1, side, -side):
      cell = path[-1] + step
      if cells[cell] != WALL and cell not in path:
        yield from extended([*path, cell])

  return list(extended([cells.index(START)]))


@pytest.mark.parametrize('side', [7, 11, 21])
def test_the_answer_is_the_only_path(side):
  puzzle, ends = Maze(side), set()
  for seed in range(20):
    question, answer, difficulty = puzzle.generate(np.random.default_rng(seed))
    [path] = paths(question.tolist(), side)
    assert difficulty == len(path)
    marked = question.copy()
    marked[path[1:-1]] = PATH
    np.testing.assert_array_equal(marked, answer)
    rows = np.reshape(question, (side, side)) != WALL
    assert rows[1::2, 1::2].all()
    # Rooms of a tree are joined by one door less.
    assert rows.sum() == 2 * (side // 2) ** 2 - 1
    ends.add((path[0], path[-1]))
    assert (puzzle.examine(puzzle.write(question))[0] == question).all()
  assert len(ends) > 12


def test_of_all_markings_the_path_alone_is_solved():
  puzzle = Maze(7)
  for seed in range(4):
    question, answer, _ = puzzle.generate(np.random.default_rng(seed))
    free = np.flatnonzero(question == FREE)
    options = list(itertools.product((FREE, PATH), repeat=len(free)))
    answers = np.tile(question, (len(options), 1))
    answers[:, free] = options
    questions = np.broadcast_to(question, answers.shape)
    solved = puzzle.solved(questions, answers)
    np.testing.assert_array_equal(solved, (answers == answer).all(1))
    assert solved.sum() == 1
    others = jax.jit(puzzle.solved)(questions, answers)
    np.testing.assert_array_equal(others, solved)
  # Nor may a wall, or an end, change.
  for cell in range(49):
    for token in range(6):
      changed = answer.copy()
      changed[cell] = token
      assert puzzle.solved(question, changed) == (token == answer[cell])


def test_a_symmetry_keeps_solution_and_split():
  puzzle = Maze(9)
  question, answer, _ = puzzle.generate(np.random.default_rng(0))
  rng = np.random.default_rng(1)
  pairs = [puzzle.augment(rng, question, answer) for _ in range(100)]
  assert len({moved.tobytes() for moved, _ in pairs}) == 8
  assert len({puzzle.signature(moved) for moved, _ in pairs}) == 1
  for moved, solution in pairs:
    assert puzzle.solved(moved, solution)
    assert not puzzle.solved(moved, moved)


def test_neighbouring_ends_need_no_path():
  maze = TREE.replace('G', ' ').replace('S ', 'SG').replace('|', '\n')
  question = Maze(7).examine(maze).question
  assert Maze(7).solved(question, question)


@pytest.mark.parametrize(('old', 'new', 'message'), [
  ('#######|#S', '######|#S', 'expected 7x7 cells, got 48'),
  ('S', 'o', r"expected the characters '# SG', got \['o'\]"),
  ('S', ' ', 'expected one S'),
  ('S ', 'SG', 'expected one G'),
  ('#S', ' S', 'expected walls all around the maze'),
  ('|# ###', '|# ####|', 'expected 7x7 cells, got 50'),
  ('|# ### #|', '|# #####|', 'no path leads from S to G'),
  ('#   #G#', '#    G#', 'expected no loops'),
  # A ring, and a cell apart: as many edges as in a tree.
  ('# # # #|#   #G#', '# ### #|#    G#', 'expected no loops'),
  ('#   #G#', '#  ##G#', 'free cells that S does not reach'),
])  # fmt: skip
def test_refuses_a_maze_and_says_why(old, new, message):
  Maze(7).examine(TREE.replace('|', '\r\n'))
  with pytest.raises(ValueError, match=message):
    Maze(7).examine(TREE.replace(old, new).replace('|', '\n'))
