"""Pictures of a looped model that fills a puzzle until it halts.

  python -m benchmarks.looped_pictures --workdir=/tmp/sudoku --out=/tmp/pictures

The puzzle is the hardest of `--rows` test puzzles that the run solves, of equal
ones that with most errors in the first answer. Clues are bold; filled cells are
blue if they are right, else orange. Below a board is the probability, by the
model, that it is right. board.png and .pdf have up to 6 boards, board.gif all.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np
import scipy.special

from benchmarks import command, looped
from core.errors import InvalidDataError
from core.fields import flag
from eval_lib import plots
from launch.command_line import Positive
from looped.rules import replay
from looped.sudoku import Sudoku

PANELS, INCHES = 6, 2.4
RATE, LAST = 1, 3  # frames in a second, and repeats of the last one
COLOURS = '#FFFFFF', '#BFDDF0', '#F6C9A8', plots.GREY  # .., right, wrong, wall
THICK: Any = dict(color='black', linewidth=1.6, clip_on=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Run):
  rows: Positive = flag('test puzzles of which one is drawn', 1000)


def write(flags: Any) -> None:
  run, puzzle, arrays = looped.opened(flags.workdir, flags.rows)
  question, hard = arrays['tokens'], arrays['difficulty']
  rows = looped.recorded(run, question)
  answers, scores = rows['answers'], rows['logits'][..., 1]
  steps = replay(run.task.model.rule, scores, answers, question)
  last = answers[np.arange(len(steps)), steps - 1]
  solved = np.flatnonzero(puzzle.solved(question, last)).tolist()
  if not solved:
    raise InvalidDataError('expected a puzzle that the run solves, got none')
  errors = (answers[:, 0] != arrays['label']).sum(-1)
  row = max(solved, key=lambda n: (hard[n], errors[n]))
  frames: list[Any] = [(question[row], 'question', '')]
  for n, right in enumerate(scipy.special.expit(scores[row, : steps[row]])):
    frames.append((answers[row, n], f'iteration {n + 1}', f'{right:.0%} sure'))
  show = functools.partial(draw, puzzle, question[row], arrays['label'][row])
  path = pathlib.Path(flags.out, 'board')
  path.parent.mkdir(parents=True, exist_ok=True)
  with plots.if_installed():
    picture(path, frames, show)
  print(f'{steps[row]} iterations, written: {path}.png and {path}.gif')


def picture(path: pathlib.Path, frames: list[Any], show: Any) -> None:
  is_long = len(frames) > PANELS
  few = [*frames[: PANELS - 1], frames[-1]] if is_long else frames
  with plots.figure(path, few, (INCHES * len(few), INCHES + 0.4)) as drawn:
    places = drawn.subplots(1, len(few), squeeze=False)[0]
    for axes, frame in zip(places, few, strict=True):
      show(axes, *frame)
  from matplotlib.animation import PillowWriter
  from matplotlib.figure import Figure

  film = Figure(figsize=(1.3 * INCHES, 1.5 * INCHES), layout='constrained')
  writer = PillowWriter(RATE)
  with writer.saving(film, f'{path}.gif', 110):
    for frame in [*frames, *frames[-1:] * LAST]:
      film.clear()
      show(film.subplots(), *frame)
      writer.grab_frame()


def draw(
  puzzle: Any, question: Any, label: Any, axes: Any, board: Any, *texts: str
) -> None:
  """Draws a board `[S]`; cells that are not to be filled in are the question's.

  `texts` are a title and the text below.
  """
  from matplotlib.colors import ListedColormap

  side, blank = puzzle.side, puzzle.blank(question)
  board = np.where(blank, board, question)
  colours = np.where(board == label, board != question, 2)
  colours *= blank & (board != question).any()
  symbols = np.array([*puzzle.symbols])[board]
  colours[symbols == '#'] = 3
  look: Any = dict(cmap=ListedColormap(COLOURS), vmin=0, vmax=3)
  grid: Any = dict(edgecolors=plots.GREY, linewidth=0.4)
  axes.pcolormesh(colours.reshape(side, side), **look, **grid)
  for cell in np.flatnonzero(~np.isin(symbols, [*' .#'])):
    x, y = cell % side + 0.5, cell // side + 0.5
    weight = 'normal' if blank[cell] else 'bold'
    axes.text(x, y, symbols[cell], ha='center', va='center', weight=weight)
  if isinstance(puzzle, Sudoku):
    for number in range(0, side + 1, puzzle.rows):
      axes.axhline(number, **THICK)
    for number in range(0, side + 1, puzzle.columns):
      axes.axvline(number, **THICK)
  axes.set(aspect='equal', xlim=(0, side), ylim=(side, 0), xticks=[], yticks=[])
  axes.set_title(texts[0], fontsize=10)
  axes.set_xlabel(texts[1])


main = command.reporting('looped_pictures', __doc__, Flags, write)

if __name__ == '__main__':
  raise SystemExit(main())
