"""ACT and straight-through against a plain loop, and known wrong variants.

The variants are errors of public code of the same papers. By hand, with
gradients and Skip-ACT: recurrent_act/cell_test.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import halting

STRAIGHT = halting.advance_straight_through


def plain(scores, epsilon):
  """Equations 4 to 8 in float32; returns (N, R, weights)."""
  total = np.float32(0)
  for n, p in enumerate(np.asarray(scores, np.float32)):
    if total + p >= np.float32(1 - epsilon) or n == len(scores) - 1:
      rest = np.float32(1) - total
      weights = [*scores[:n], rest] + [0.0] * (len(scores) - n - 1)
      return n + 1, rest, weights
    total += p
  raise AssertionError


def check_rule(rule, is_straight=False, epsilon=0.0):
  # Small, even and extreme scores: (items, steps).
  generator = np.random.default_rng(0)
  scores = generator.uniform(size=(300, 6)) ** generator.choice(
    [0.3, 1.0, 4.0], size=(300, 1)
  )
  scores[:3] = [[0.0] * 6, [1.0] * 6, [0.0, 1.0] * 3]
  scores = scores.astype(np.float32)
  state, weights = halting.start(jnp.ones((300,), bool)), []
  for n in range(6):
    state, weight = rule(state, jnp.asarray(scores[:, n]), n == 5, epsilon)
    weights.append(weight)
  weights, cost = np.stack(weights, axis=1), halting.ponder_cost(state)
  np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-6)
  assert not state.running.any()
  for item, row in enumerate(scores):
    steps, rest, want = plain(row, epsilon)
    assert int(state.steps[item]) == steps
    if is_straight:  # one state, of the step that halts
      rest, want = 0.0, np.arange(1, 7) == steps
    else:
      np.testing.assert_allclose(state.remainder[item], rest, atol=1e-6)
    np.testing.assert_allclose(weights[item], want, atol=1e-6)
    np.testing.assert_allclose(cost[item], steps + rest, atol=1e-6)


@pytest.mark.parametrize('epsilon', [0.01, 0.3])
def test_equals_plain_loop(epsilon):
  check_rule(halting.advance, False, epsilon)
  check_rule(STRAIGHT, True, epsilon)


def no_forced_halt(state, score, is_last, epsilon):
  return halting.advance(state, score, False, epsilon)


def remainder_after_the_last_score(state, score, is_last, epsilon):
  after, weight = halting.advance(state, score, is_last, epsilon)
  halts = state.running & ~after.running
  rest = jnp.where(halts, after.remainder - score, after.remainder)
  weight = jnp.where(halts, rest, weight)
  return dataclasses.replace(after, remainder=rest), weight


def last_score_as_its_weight(state, score, is_last, epsilon):
  after, weight = halting.advance(state, score, is_last, epsilon)
  return after, jnp.where(state.running & ~after.running, score, weight)


def threshold_not_reached_by_equality(state, score, is_last, epsilon):
  return halting.advance(state, score, is_last, epsilon - 1e-6)


def equation_16_as_printed(state, score, is_last, epsilon):
  """Counts N - 1 steps."""
  after, weight = STRAIGHT(state, score, is_last, epsilon)
  steps = state.steps + after.running.astype(jnp.int32)
  return dataclasses.replace(after, steps=steps), weight


# (check, function of the program, its wrong variants). Those of costs, carries,
# padding and combinations: cell_test.py, albert_act, adatape/universal_test.py.
TABLE = (
  (check_rule, halting.advance, (
    no_forced_halt, remainder_after_the_last_score, last_score_as_its_weight,
    threshold_not_reached_by_equality,
  )),
  (functools.partial(check_rule, is_straight=True), STRAIGHT,
   (equation_16_as_printed, halting.advance)),
)  # fmt: skip


@pytest.mark.parametrize(('check', 'right', 'variants'), TABLE)
def test_only_the_function_of_the_program_passes(check, right, variants):
  check(right)
  for wrong in variants:
    with pytest.raises(AssertionError):
      check(wrong)


def test_binary_is_one_from_the_threshold_on():
  values = jnp.array([0.0, 0.9899, 0.9901, 2.0])
  np.testing.assert_array_equal(halting.binary(values), [0, 0, 1, 1])
  slopes = jax.vmap(jax.grad(halting.binary))(values)
  np.testing.assert_array_equal(slopes, 1.0)


def test_illegal_rules_are_named():
  array = jnp.zeros((1, 2))
  with pytest.raises(ValueError, match=r"combination: expected.*'sum'"):
    halting.combine('sum', array, array, array[:, 0])
  for field, arguments in (
    ('rule', ['ponder']), ('epsilon', ['act', 1.0]), ('epsilon', ['act', -1.0]),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=f'^{field}: expected'):
      halting.rule(*arguments)
