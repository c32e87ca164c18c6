"""The comparison of rules: its numbers, by plain loops over rows."""

import csv

import jax
import numpy as np
import pytest

from looped import stops
from looped.certificate import record_of
from looped.model import LoopedModel
from tests.contexts import evaluator_of
from tests.looped import solvers
from tests.looped.solvers import PUZZLE, Solver

DATA = solvers.DATA | {'name': 'looped.data:Generated', 'test_examples': 60}


def outputs_of(kind):
  task = solvers.task_of(solvers.built(kind)[0])
  call = jax.jit(task.outputs)
  return lambda variables, batch: call(*variables.values(), batch)


def expected_stop(rule, knob, scores, answers, question):
  """The iterations of a row, by the definition of each rule."""
  if rule == stops.FULL:
    return min(knob, len(scores))
  for n in range(len(scores)):
    last = answers[max(0, n + 1 - int(knob)) : n + 1]
    holds = {
      stops.SCORE: 1 / (1 + np.exp(-scores[n])) >= knob,
      stops.SAME: len(last) == knob and (last == answers[n]).all(),
      stops.VERIFIED: PUZZLE.solved(question, answers[n]),
    }
    if holds[rule]:
      return n + 1
  return len(scores)


@pytest.mark.parametrize('kind', [LoopedModel, Solver])
def test_rules_stop_where_they_say(kind):
  _, variables = solvers.built(kind)
  questions = np.stack([e.question for e in solvers.puzzles()])
  label = np.stack([e.answer for e in solvers.puzzles()])
  rows = outputs_of(kind)(variables, {'tokens': questions})
  rows = {name: np.asarray(one) for name, one in rows.items()}
  scores, answers = rows['logits'][..., 1], rows['answers']
  right = (answers == label[:, None]).all(-1)
  assert (record_of(rows | {'label': label}).right == right).all()
  seen = set()
  for rule, knob, steps in stops.stops(rows, questions, PUZZLE):
    seen.add(rule)
    cases = zip(scores, answers, questions, strict=True)
    assert steps.tolist() == [expected_stop(rule, knob, *one) for one in cases]
    solved = [right[r, n - 1] for r, n in enumerate(steps)]
    summary = stops.summary(steps, right)
    assert summary['accuracy'] == pytest.approx(np.mean(solved))
    assert summary['iterations'] == pytest.approx(steps.mean())
    lost = (right[:, -1] & ~np.array(solved)).sum()
    assert summary['lost'] == lost / max(right[:, -1].sum(), 1)
    if rule == stops.VERIFIED:
      assert summary['lost'] == 0
  assert seen == {stops.FULL, stops.SCORE, stops.SAME, stops.VERIFIED}


def test_writes_table_and_picture(tmp_path, capsys):
  _, variables = solvers.built(Solver)
  context = dict(outputs=outputs_of(Solver), workdir=tmp_path, batch_size=16)
  built = evaluator_of('looped.stops:Evaluator', DATA, context)
  results = built.run(variables)
  assert results.keys() == {*built.METRICS}
  # The score says if a board is full, and no later iteration changes it.
  for name in ('accuracy', 'full_accuracy', 'verified_accuracy'):
    assert results[name] == 1
  assert results['destroyed'] == 0
  assert results['iterations'] == results['verified_iterations'] < 12
  assert results['full_iterations'] == solvers.LIMIT
  assert 'rules of stopping' in capsys.readouterr().out
  with (tmp_path / stops.FILE).open() as file:
    table = [*csv.DictReader(file)]
  at_half = [r for r in table if (r['rule'], r['knob']) == ('score', '0.5')]
  [iterations] = [float(row['iterations']) for row in at_half]
  assert iterations == pytest.approx(results['iterations'])
  assert (tmp_path / 'stops.png').stat().st_size > 10_000


def test_questions_of_training_rows_are_the_transformed_ones(tmp_path):
  _, variables = solvers.built(Solver)
  data = DATA | {'train_examples': 40, 'base': 40}
  context = dict(outputs=outputs_of(Solver), workdir=tmp_path, seed=3)
  built = evaluator_of('looped.stops:Evaluator', data, context, split='train')
  results = built.run(variables)
  assert results['verified_accuracy'] == 1
  assert results['verified_iterations'] == results['iterations'] < 12
