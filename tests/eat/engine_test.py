"""The engine gives a text what the masked form gives it, in any company."""

import contextlib
import threading

import jax
import numpy as np
import pytest

from eat import exits, serving
from eat.exits import Rule
from serve_lib.chain import Failure
from serve_lib.engine import Engine
from tests.eat import small
from tests.eat.rule_policy import RulePolicy

pytestmark = pytest.mark.slow

LENGTHS = (16, 24)


@contextlib.contextmanager
def service(**changes):
  model, variables = small.build(**changes)
  _, out = jax.jit(model.apply)(
    variables, *small.batch(small.rows(40, high=24), 40)
  )
  first = exits.probabilities(np.asarray(out['exits']), [1.0] * 3)[0].max(-1)
  rule = Rule('confidence', tau=float(np.quantile(first, 0.7)))
  chain = serving.EatChain(model, variables)
  chain.variants = ('pruned',)  # a third of the programs
  with Engine(chain, RulePolicy(rule), LENGTHS, (1, 4)) as engine:
    yield model, variables, rule, engine


@pytest.fixture(scope='module')
def served():
  with service() as given:
    yield given


@pytest.fixture(
  scope='module',
  params=[
    dict(prune_scores='learned', merge=True),
    dict(prune_scores='attention', window=0),
  ],
  ids=['merged', 'attention'],
)
def served_otherwise(request):
  with service(**request.param) as given:
    yield given


def expected(model, variables, rule, texts):
  _, out = jax.jit(model.apply)(variables, *small.batch(texts, 40))
  logits = np.asarray(out['exits'])
  return exits.first_exit(rule, logits), logits


def check(given, seed):
  model, variables, rule, engine = given
  count = int(np.random.default_rng(seed).integers(1, 41))
  texts = small.rows(count, high=24, seed=seed)
  # One size for the reference, or every count would compile.
  heads, logits = expected(
    model, variables, rule, texts + small.rows(40 - count)
  )
  answers = engine.predict(texts)
  for index, (head, given_logits) in enumerate(answers):
    assert head == heads[index]
    np.testing.assert_allclose(given_logits, logits[head, index], atol=1e-4)


# Not hypothesis: beartype draws random numbers in the engine's thread, and
# hypothesis then calls its data irreproducible.
@pytest.mark.parametrize('seed', range(12))
def test_engine_equals_masked_form_in_any_company(served, seed):
  check(served, seed)


@pytest.mark.parametrize('seed', range(4))
def test_it_does_with_other_scores_and_merged_tokens(served_otherwise, seed):
  check(served_otherwise, seed)


def test_threads_get_their_own_answers(served):
  model, variables, rule, engine = served
  texts = small.rows(40, high=24, seed=7)
  heads, logits = expected(model, variables, rule, texts)
  wrong = []

  def ask(order):
    for index in order:
      head, given_logits = engine.submit(texts[index]).result()
      if head != heads[index] or not np.allclose(
        given_logits, logits[head, index], atol=1e-4
      ):
        wrong.append(index)

  orders = [np.random.default_rng(s).permutation(40) for s in range(4)]
  threads = [threading.Thread(target=ask, args=(order,)) for order in orders]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not wrong


def test_some_leave_early_and_some_late(served):
  model, variables, rule, _ = served
  heads, _ = expected(model, variables, rule, small.rows(40, high=24))
  assert {0, 2} <= set(np.asarray(heads).tolist())


def test_too_long_a_row_fails_alone(served):
  engine = served[-1]
  texts = [*small.rows(2), np.ones(30, np.int32), *small.rows(2)]
  answers = engine.predict(texts)
  assert [isinstance(answer, Failure) for answer in answers] == [
    False, False, True, False, False,
  ]  # fmt: skip
