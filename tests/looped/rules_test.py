"""Rules of stopping, on iterations written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halting import loop
from looped import rules
from looped.rules import Evidence, Score, Unchanged, Verified, replay
from looped.sudoku import Sudoku

PUZZLE = Sudoku(2, 2)
QUESTION, SOLUTION, _ = PUZZLE.generate(np.random.default_rng(0))
# Answer 0 is the solution. In 1 to 3 other digits fill the board legally; in 4
# there is one digit more.
WRONG = np.stack([2 + (SOLUTION - 2 + k) % 4 for k in range(5)])
WRONG[4, QUESTION.argmin()] = 2 + (SOLUTION[QUESTION.argmin()] - 1) % 4
# Rows by iterations.
NUMBERS = np.array([[1, 0, 0, 2, 2], [1, 1, 1, 1, 1], [3, 4, 3, 0, 0]])
SCORES = np.float32([[-2, -1, 1, 3, -3], [-4, -5, -1, -1, -1], [9, 0, 0, 0, 0]])
ROWS, COUNT = NUMBERS.shape


@pytest.mark.parametrize(('rule', 'expected'), [
  (rules.AllIterations(), [5, 5, 5]),
  (Score(0.5), [3, 5, 1]),
  (Score(tau=0.9), [4, 5, 1]),
  (Score(tau=1.0), [5, 5, 5]),
  (Score(0.5, give_up=0.05), [3, 1, 1]),
  (Score(0.5, give_up=0.2, patience=2), [3, 2, 1]),
  (Unchanged(), [3, 2, 5]),
  (Unchanged(patience=3), [5, 3, 5]),
  (Verified(PUZZLE), [2, 5, 4]),
])  # fmt: skip
def test_iterations_by_hand(rule, expected):
  question = np.tile(QUESTION, (ROWS, 1))
  replayed = replay(rule, SCORES, WRONG[NUMBERS], question)
  assert replayed.dtype == np.int32
  assert replayed.tolist() == expected
  answers, scores = jnp.asarray(WRONG[NUMBERS]), jnp.asarray(SCORES)

  def iterate(before, n, running):
    return answers[:, n], Evidence(
      scores[:, n], answers[:, n], before, question
    )

  @jax.jit
  def run(valid):
    state, weigh = jnp.zeros_like(question), lambda visit: visit.weight
    return loop.run(iterate, state, valid, rule, max_steps=COUNT, trace=weigh)

  result = run(jnp.ones(ROWS, bool))
  assert result.halting.steps.tolist() == expected
  assert not result.halting.running.any()
  weights = np.eye(COUNT)[replayed - 1].T
  np.testing.assert_array_equal(result.trace, weights)
  if rule.KEEPS_STATE:  # a halted row has the answer that it stopped with
    stopped = WRONG[NUMBERS[np.arange(ROWS), replayed - 1]]
    np.testing.assert_array_equal(result.output, stopped)


def test_only_unlikely_rows_give_up():
  read = Evidence(jnp.float32([-4, -1, 4]), *3 * [jnp.zeros((3, 4), int)])
  rule, steps = Score(give_up=0.2, patience=3), jnp.int32([3, 3, 3])
  assert rule.gives_up(steps, read).tolist() == [True, False, False]
  assert not rule.gives_up(steps - 1, read).any()
  assert not Unchanged().gives_up(steps, read).any()
