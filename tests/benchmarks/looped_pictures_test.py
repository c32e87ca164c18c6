"""Boards as they are drawn: colours of right and wrong cells, the film."""

import numpy as np
import pytest

from benchmarks import looped_pictures
from looped.maze import Maze
from looped.sudoku import Sudoku

figure = pytest.importorskip('matplotlib.figure')
NONE, RIGHT, WRONG, WALL = range(4)


def drawn(puzzle, question, label, board):
  """Colours by cell and bold texts of a board."""
  axes = figure.Figure().subplots()
  looped_pictures.draw(puzzle, question, label, axes, board, 'a', 'b')
  colours = np.asarray(axes.collections[0].get_array()).ravel()
  weights = [text.get_weight() for text in axes.texts]
  return colours, weights


def test_colours_of_a_sudoku():
  puzzle = Sudoku(2, 2)
  question, label, _ = puzzle.generate(np.random.default_rng(0))
  blank, board = puzzle.blank(question), label.copy()
  wrong = np.flatnonzero(blank)[0]
  board[wrong] = 2 + (board[wrong] - 1) % 4
  board[np.flatnonzero(~blank)[0]] = 0  # a clue is drawn as it was given
  colours, weights = drawn(puzzle, question, label, board)
  expected = np.where(blank, RIGHT, NONE)
  expected[wrong] = WRONG
  np.testing.assert_array_equal(colours, expected)
  assert weights.count('bold') == (~blank).sum()
  colours, _ = drawn(puzzle, question, label, question)
  assert not colours.any()


def test_colours_of_a_maze():
  puzzle = Maze(7)
  question, label, _ = puzzle.generate(np.random.default_rng(0))
  board, path = label.copy(), np.flatnonzero(label == 5)
  board[path[0]] = 2  # left out
  colours, _ = drawn(puzzle, question, label, board)
  assert colours[path[0]] == WRONG
  assert (colours[path[1:]] == RIGHT).all()
  assert ((colours == WALL) == (question == 1)).all()


def test_the_files(tmp_path):
  frames = [(n, 'title', 'below') for n in range(9)]
  shown = []

  def show(axes, number, *texts):
    shown.append(number)
    axes.plot([0, number])

  looped_pictures.picture(tmp_path / 'board', frames, show)
  # Six of the picture, then all of the film, the last for longer.
  assert shown[:6] == [0, 1, 2, 3, 4, 8]
  assert shown[6:] == [*range(9), *[8] * looped_pictures.LAST]
  from PIL import Image

  with Image.open(tmp_path / 'board.gif') as film:
    assert film.n_frames >= 9
