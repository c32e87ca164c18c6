"""Looped models timed and their rules measured: answers, numbers by hand."""

import importlib.util
import types

import jax
import numpy as np
import pytest

from benchmarks import looped, looped_rules
from looped import rules
from looped.certificate import Record
from looped.sudoku import Sudoku
from tests.benchmarks.command_test import read

BACKENDS, PUZZLE = ['xla'], Sudoku(2, 2)
BACKENDS += ['onnxruntime'] * bool(importlib.util.find_spec('onnxruntime'))


def work(*flags):
  """A narrow model whose rows halt after 1, 3 or 6 of 6 iterations."""
  parsed = looped.main.parse(['--width=8', '--iterations=6', *flags])
  return looped.scripted(parsed)


@pytest.fixture
def depths(tmp_path):
  path = tmp_path / 'depths.csv'
  path.write_text('iterations\n1\n3\n6\n')
  return f'--depths={path}'


def plain(chain, questions):
  """Answers and iterations of rows alone, by the model's own loop."""
  variables = chain.variables
  _, out = jax.jit(chain.model.apply)(variables, questions)
  answers = np.asarray(out['logits']).argmax(-1).swapaxes(0, 1)
  scores = np.asarray(out['scores']).T
  steps = rules.replay(chain.model.rule, scores, answers, questions)
  return answers[np.arange(len(steps)), steps - 1], steps


def test_all_candidates_give_the_answers_at_halting(depths):
  chain, questions = work(depths, '--rows=11')
  answers, steps = plain(chain, questions)
  assert {*steps.tolist()} == {1, 3, 6}
  for is_fixed in (True, False):
    own, taken = looped.batched(chain, questions, 4, is_fixed)
    np.testing.assert_array_equal(own, answers)
    np.testing.assert_array_equal(taken, steps)
  others = [looped.slots(chain, questions, 4)]
  others += [looped.one_row(chain, questions, b) for b in BACKENDS]
  for run in others:
    np.testing.assert_array_equal(run(), answers)
    np.testing.assert_array_equal(run(), answers)  # again, from empty slots


@pytest.mark.parametrize('visit', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_engine_gives_the_same_answers(visit, depths):
  chain, questions = work(depths, '--rows=6')
  run = looped.engine(chain, questions, 4, 'xla', visit)
  own = looped.tokens(chain.reader.puzzle, run())
  np.testing.assert_array_equal(own, plain(chain, questions)[0])


@pytest.mark.nightly
def test_the_table_of_the_docs(tmp_path, capsys):
  path = tmp_path / 'table.csv'
  flags = ['--width=8', '--rows=8', '--batch=4', '--rounds=1', '--warmup=0']
  assert looped.main([*flags, '--backends=xla', f'--results={path}']) == 0
  rows = read(path)
  names = ['all', 'slowest', 'slots', 'one row, xla']
  names.append('engine, xla, 1 in a visit')
  assert [row['candidate'] for row in rows] == names
  assert {row['cells'] for row in rows} == {'0'}
  flags = looped.main.parse(flags)
  _, steps = looped.batched(*looped.scripted(flags), 4, True)
  limit = 16 / steps.mean()  # but for the head, which is part of the FLOPs
  assert float(rows[1]['limit']) == pytest.approx(limit, rel=0.01)


@pytest.mark.nightly
def test_the_speed_of_rules(depths):
  chain, questions = work(depths, '--rows=8')
  chains = {looped_rules.FULL: chain, ('score', 0.5): chain}
  flags = looped_rules.main.parse(['--runs=r', '--results=r.csv', '--rounds=1'])
  speeds = looped_rules.timed('r', chains, questions, flags)
  assert [*speeds] == [*chains]
  assert min(one['speed'] for one in speeds.values()) > 0
  assert speeds[looped_rules.FULL]['speedup'] == 1


def record(rng, count, early):
  """Rows right from the second iteration on; `early` are sure at once."""
  right = np.tile([False, True, True], (count, 1))
  scores = np.tile(np.float32([-2.0, 2.0, 2.0]), (count, 1))
  scores[rng.random(count) < early, 0] = 3.0
  return Record(scores, right)


@pytest.mark.parametrize(
  ('early', 'lost', 'saved'), [(0.0, 0.0, 1 / 3), (0.5, 0.0, 0.0)]
)
def test_certificates_by_hand(early, lost, saved):
  """Without confident errors rows stop at 2 of 3; with them none does."""
  flags = types.SimpleNamespace(splits=5, epsilon=0.05, delta=0.05, patience=4)
  rows = record(np.random.default_rng(0), 400, early)
  row = looped_rules.resampled(rows, 'sequence', flags)
  assert (row['lost'], row['violated']) == (lost, 0.0)
  assert row['saved'] == pytest.approx(saved)
  assert row['verified'] == pytest.approx(1 / 3)


def test_the_table_of_rules(tmp_path, monkeypatch):
  # The second iteration solves all rows, and the first half of them in run 2.
  shares, runs = iter((0.0, 0.5)), ['a', 'b']
  labels = np.ones((400, 16), np.int32)
  arrays = dict(tokens=labels, label=labels, difficulty=np.arange(400) % 3)

  def recorded(*_):
    solved = np.arange(400) < 400 * next(shares)
    answers = np.ones((400, 3, 16), np.int32)
    answers[~solved, 0] = 2
    scores = np.tile(np.float32([-2.0, 2.0, 2.0]), (400, 1))
    scores[solved, 0] = scores[360:, 0] = 3.0  # the last ones are wrong
    logits = np.stack([0 * scores, scores], -1)
    return dict(answers=answers, logits=logits)

  monkeypatch.setattr(
    looped_rules.looped, 'opened', lambda *a, **b: (0, PUZZLE, arrays)
  )
  monkeypatch.setattr(looped_rules.looped, 'recorded', recorded)
  path = tmp_path / 'rules.csv'
  flags = ['--splits=2', '--epsilon=0.05', '--rounds=0', f'--results={path}']
  assert looped_rules.main([f'--runs={",".join(runs)}', *flags]) == 0
  table = {(row['rule'], row['setting']): row for row in read(path)}
  assert len(table) == 6
  assert table['fixed number', 'all']['solved %'] == '100 [100, 100]'
  assert table['fixed number', 'all']['iterations'] == '3.00 [3.00, 3.00]'
  assert table['score', '0.5']['iterations'] == '1.65 [1.40, 1.90]'
  assert table['score', '0.5']['lost %'] == '10.0 [10.0, 10.0]'
  assert table['unchanged', '2.0']['iterations'] == '2.75 [2.50, 3.00]'
  assert table['certified', 'sequence']['iterations'] == '3.00 [3.00, 3.00]'
  certificates = read(tmp_path / 'rules_certificates.csv')
  assert certificates[0]['violated %'] == '0.00 [0.00, 0.00]'
  assert certificates[0]['saved %'] == '0.00 [0.00, 0.00]'
  assert certificates[0]['verifier saves %'] == '41.7 [33.3, 50.0]'
  assert path.with_suffix('.png').is_file()
