"""Options of serving solvers: rules by class, illegal values, limits."""

import dataclasses
import pathlib

import numpy as np
import pytest

from core import registry
from core.errors import ConfigError
from looped import rules
from looped.maze import Maze
from looped.policy import PuzzleReader, forms_of
from tests.looped import solvers
from tests.looped.serving_test import engine_of
from tests.looped.solvers import LIMIT, Solver, served, typed


@pytest.mark.parametrize(('field', 'options'), [
  ('serve.tau', dict(rule='verified', tau=0.5)),
  ('serve.patience', dict(rule='all', patience=2)),
  ('serve.give_up', dict(rule='unchanged', give_up=0.5)),
  ('serve.iterations', dict(iterations=5)), ('serve.rule', dict(rule='never')),
  ('serve.patience', dict(rule='unchanged', patience=1)),
  ('serve.attempts', dict(attempts=0)), ('serve.limit', dict(limit=0)),
  ('serve.attempts', dict(setting='guaranteed', attempts=2)),
  ('serve.rule', dict(rule='halting.token_rules:ACT')),
  ('serve.never', {'rule.never': 1}), ('serve.tau', {'rule.tau': 2.0}),
])  # fmt: skip
def test_an_illegal_option_is_named(field, options):
  with pytest.raises(ConfigError, match=f'^{field}: expected'):
    served(Solver, **options)


def test_attempts_are_different_forms():
  forms = forms_of(Maze(7), 8)
  assert len({form.cells.tobytes() for form in forms}) == 8
  with pytest.raises(ConfigError, match='attempts: expected at most 8'):
    PuzzleReader(1, Maze(7), 9)


def test_a_rule_by_its_class_and_fields():
  options = {'rule': 'looped.rules:Unchanged', 'rule.patience': 3}
  chain, _ = served(Solver, **options)
  assert chain.model.rule == rules.Unchanged(3)
  chain, _ = served(Solver, tau=0.75)  # the model's, with another field
  assert chain.model.rule == rules.Score(tau=0.75)


@dataclasses.dataclass(frozen=True)
class Wrong(rules.AnswerRule):
  kind: int = 0

  def stops(self, steps, same, evidence):
    return {
      0: lambda: np.asarray(evidence.score) > 0,
      1: lambda: evidence.answer == evidence.before,
      2: lambda: steps.astype('float32'),
      3: lambda: steps > 3 if steps[0] > 3 else steps > 2,
    }[self.kind]()


@pytest.mark.parametrize('kind', range(4))
def test_a_rule_that_cannot_run_is_refused_at_the_start(kind, monkeypatch):
  monkeypatch.setattr(registry, '_trusted', {'tests', *registry._trusted})
  options = {'rule': registry.name_of(Wrong), 'rule.kind': kind}
  with pytest.raises(ConfigError, match=r'serve\.rule: expected a rule whose'):
    served(Solver, **options)


def test_the_rule_of_the_page(tmp_path, monkeypatch):
  page = pathlib.Path(__file__).parents[2] / 'docs/looped.md'
  code = page.read_text().partition('```python\n')[2].partition('```')[0]
  (tmp_path / 'slow.py').write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(registry, '_trusted', {'slow', *registry._trusted})
  with engine_of(served(Solver, rule='slow:Twice')) as engine:
    answers = engine.predict(typed())
  with engine_of(served(Solver)) as engine:
    first = engine.predict(typed())
  for answer, one in zip(answers, first, strict=True):
    assert answer.fields['iterations'] == one.fields['iterations'] + 1


def test_data_without_a_puzzle_are_not_served():
  model, variables = solvers.built(Solver)
  task = solvers.task_of(model, puzzle=None)
  with pytest.raises(ConfigError, match='dataset: expected data of a puzzle'):
    task.serve(variables, {})


def test_a_limit_beyond_training():
  with engine_of(served(Solver, rule='all', limit=2 * LIMIT)) as engine:
    [answer] = engine.predict(typed(1))
  assert answer.fields['iterations'] == 2 * LIMIT
