"""All rules compared, from the same weights: what is solved, and how soon."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import scipy.stats
from jaxtyping import Bool, Int

from eval_lib import evaluator, glue, plots, report
from eval_lib.plots import Line, Panel
from looped import rules
from looped.certificate import record_of
from looped.puzzle import Puzzle, puzzle_of

FILE = 'stops.csv'
COLUMNS = 'rule', 'knob', 'accuracy', 'iterations', 'lost'  # printed
TAUS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
PATIENCES = (2, 3, 4, 6, 8)
FULL, SCORE, SAME, VERIFIED = 'fixed number', 'score', 'unchanged', 'verified'

Steps = Int[np.ndarray, ' R']  # iterations of each row
Rows = Sequence[dict[str, Any]]


@dataclasses.dataclass(kw_only=True)
class Evaluator(evaluator.Evaluator):
  """Replays rules on the iterations of a split; writes stops.csv, .png, .pdf.

  The picture has the solved share against mean iterations, and the iterations
  to score > 0 against the difficulty.
  """

  NEEDS_OUTPUTS: ClassVar[bool] = True
  METRICS = (
    'accuracy', 'iterations', 'full_accuracy', 'full_iterations',
    'verified_accuracy', 'verified_iterations', 'destroyed', 'spearman',
  )  # fmt: skip
  split: evaluator.Split = 'test'

  def __post_init__(self):
    super().__post_init__()
    self._puzzle = puzzle_of(self.data)

  def run(self, variables: Any) -> dict[str, float]:
    """Prints and writes the table; returns `METRICS`.

    `accuracy` and `iterations` (a mean) are of score > 0, `full_` of all
    iterations, `verified_` of the exact verifier. `destroyed` is the share of
    rows that are right after an iteration and wrong at the end; `spearman` the
    rank correlation of difficulty and the iterations to score > 0.
    """
    rows = self.collect('split', variables, self.context.outputs)
    source: Any = self.splits['split'].source
    epochs = np.zeros_like(rows['index'])
    drawn = source.draw(self.context.seed, epochs, rows['index'])
    difficulty, right = drawn['difficulty'], record_of(rows).right
    steps = {
      (rule, knob): taken
      for rule, knob, taken in stops(rows, drawn['tokens'], self._puzzle)
    }
    table = [
      {'rule': rule, 'knob': knob} | summary(taken, right)
      for (rule, knob), taken in steps.items()
    ]
    chosen = steps[SCORE, 0.5]
    if jax.process_index() == 0:
      report.print_table('rules of stopping', table, columns=COLUMNS)
    if path := self.file(FILE):
      report.write_csv(path, table)
      with plots.if_installed():
        draw(path, *lines_of(table, chosen, difficulty))
        print(f'picture: {path.with_suffix(".png")}')
    picked = {'': (SCORE, 0.5), 'full_': (FULL, right.shape[1])}
    picked['verified_'] = VERIFIED, 0
    destroyed = right.any(1) & ~right[:, -1]
    return {
      prefix + name: summary(steps[key], right)[name]
      for prefix, key in picked.items()
      for name in ('accuracy', 'iterations')
    } | {
      'destroyed': float(destroyed.mean()),
      'spearman': glue.correlation(difficulty, chosen, scipy.stats.spearmanr),
    }


def stops(
  rows: Any, questions: Int[np.ndarray, 'R S'], puzzle: Puzzle
) -> Iterator[tuple[str, float, Steps]]:
  """Yields rule, value of its knob, and the iterations of each row.

  `rows` are the collected `looped.task.Unrolled.outputs`.
  """
  scores, answers = rows['logits'][..., 1], rows['answers']
  count, limit = scores.shape
  for number in sorted({*(2**n for n in range(limit.bit_length())), limit}):
    yield FULL, number, np.full(count, min(number, limit))
  tried: list[Any] = [(SCORE, tau, rules.Score(tau)) for tau in TAUS]
  tried += [(SAME, k, rules.Unchanged(k)) for k in PATIENCES if k <= limit]
  for name, knob, rule in [*tried, (VERIFIED, 0, rules.Verified(puzzle))]:
    yield name, knob, rules.replay(rule, scores, answers, questions)


def summary(steps: Steps, right: Bool[np.ndarray, 'R N']) -> dict[str, float]:
  """Returns what a rule solves, its mean iterations, and what it loses.

  'lost' is a share of the rows that all iterations solve, 'gained' of the
  others: those that a later iteration destroys.
  """
  solved = np.take_along_axis(right, steps[:, None] - 1, 1)[:, 0]
  full = right[:, -1]
  return {
    'accuracy': float(solved.mean()),
    'iterations': float(steps.mean()),
    'lost': float((full & ~solved).sum() / max(full.sum(), 1)),
    'gained': float((~full & solved).sum() / max((~full).sum(), 1)),
  }


def draw(path: plots.Path, solved: list[Line], steps: Line) -> None:
  """Draws what rules solve (%, by iterations), and iterations by difficulty."""
  panels = [
    Panel(
      'Solved puzzles', '% of the puzzles', 'mean iterations', solved, log='x'
    ),
    Panel('Iterations to score > 0', 'iterations', 'difficulty', [steps]),
  ]
  plots.draw_panels(path, panels, (10.0, 4.0), columns=2)


def lines_of(
  table: Rows, steps: Steps, difficulty: Int[np.ndarray, ' R']
) -> tuple[list[Line], Line]:
  """Returns the lines of `draw` for one table and its rows."""
  lines = []
  for number, rule in enumerate(dict.fromkeys(row['rule'] for row in table)):
    group = [row for row in table if row['rule'] == rule]
    pairs = sorted((row['iterations'], row['accuracy']) for row in group)
    x, y = np.array(pairs).T
    lines.append(Line(rule, x, 100 * y, number))
  levels = np.unique(difficulty)
  parts = [steps[difficulty == level] for level in levels]
  quartiles = [np.quantile(part, (0.25, 0.5, 0.75)) for part in parts]
  low, middle, high = np.array(quartiles).T
  label = 'median, quartiles'
  return lines, Line(label, levels, middle, 0, (low, high))
