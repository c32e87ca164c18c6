"""Checks by hand pass with our functions and fail with known wrong variants.

The variants are errors of public code of the same papers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import halting, pondernet

EPSILON = 0.25  # sums of quarters are exact


def take_steps(rule, scores):
  """(weights, final Halting) of one item; the last step is the limit."""
  state = halting.start(jnp.ones(1, bool))
  weights = []
  for number, score in enumerate(scores):
    last = number == len(scores) - 1
    state, weight = rule(state, jnp.full(1, score), last, EPSILON)
    weights.append(weight[0])
  return weights, state


def check_act(rule):
  weights, state = take_steps(rule, [0.25, 0.125, 0.5, 0.5])
  np.testing.assert_array_equal(weights, [0.25, 0.125, 0.625, 0.0])
  assert (int(state.steps[0]), float(state.remainder[0])) == (3, 0.625)
  # The threshold is reached by equality.
  weights, _ = take_steps(rule, [0.5, 0.25, 0.5])
  np.testing.assert_array_equal(weights, [0.5, 0.5, 0.0])
  # At the limit the rest is taken, so that weights sum to 1.
  weights, state = take_steps(rule, [0.125, 0.125])
  np.testing.assert_array_equal(weights, [0.125, 0.875])
  assert not bool(state.running[0])


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


def check_straight_through(rule):
  weights, state = take_steps(rule, [0.25, 0.25, 0.5, 0.5])
  np.testing.assert_array_equal(weights, [0.0, 0.0, 1.0, 0.0])
  assert float(halting.ponder_cost(state)[0]) == 3.0


def equation_16_as_printed(state, score, is_last, epsilon):
  """Counts N - 1 steps."""
  rule = halting.advance_straight_through
  after, weight = rule(state, score, is_last, epsilon)
  steps = state.steps + after.running.astype(jnp.int32)
  return dataclasses.replace(after, steps=steps), weight


def check_gradient_of_cost(cost):
  def of_scores(scores):
    return cost(take_steps(halting.advance, scores)[1])[0]

  gradient = jax.grad(of_scores)(jnp.array([0.25, 0.25, 0.5, 0.5]))
  np.testing.assert_array_equal(gradient, [-1.0, -1.0, 0.0, 0.0])


def cost_without_gradient(state):
  return jax.lax.stop_gradient(halting.ponder_cost(state))


def check_combine(combine):
  arrays = jnp.array([[8.0]]), jnp.array([[4.0]]), jnp.array([0.25])
  assert float(combine('basic', *arrays)[0, 0]) == 7.0
  assert float(combine('accumulated', *arrays)[0, 0]) == 9.0


def wrong_precedence(combination, previous, state, weight):
  """`previous * 1 - w` of a public Universal Transformer."""
  if combination == 'accumulated':
    return halting.combine(combination, previous, state, weight)
  return previous * 1 - weight[:, None] + weight[:, None] * state


def check_padding(start):
  begin = start(jnp.array([True, False]))
  after, weight = halting.advance(begin, jnp.full(2, 0.5), False, EPSILON)
  np.testing.assert_array_equal(weight, [0.5, 0.0])
  np.testing.assert_array_equal(after.steps, [1, 0])


def padding_ponders(valid):
  return halting.start(valid | True)


def check_carry_over(carry_over):
  for scores, want in (([0.5, 1.5], 1.0), ([0.25, 0.25], 0.0)):
    _, state = take_steps(halting.advance_straight_through, scores)
    np.testing.assert_array_equal(carry_over(state, EPSILON), [want])


def carry_nothing_over(state, epsilon):
  return jnp.zeros_like(state.total)


def carry_a_debt_over(state, epsilon):
  return state.total - 1.0


def check_distribution(distribution):
  given = distribution(jnp.array([0.5, 0.25, 0.25]))
  np.testing.assert_array_equal(given, [0.5, 0.125, 0.375])


def no_last_step(lambdas):
  survived = jnp.cumprod(1.0 - lambdas)
  return lambdas * jnp.concatenate([jnp.ones(1), survived[:-1]])


# (check, function of the program, its wrong variants)
TABLE = (
  (check_act, halting.advance, (
    no_forced_halt, remainder_after_the_last_score, last_score_as_its_weight,
    threshold_not_reached_by_equality,
  )),
  (check_straight_through, halting.advance_straight_through,
   (equation_16_as_printed, halting.advance)),
  (check_gradient_of_cost, halting.ponder_cost, (cost_without_gradient,)),
  (check_combine, halting.combine, (wrong_precedence,)),
  (check_padding, halting.start, (padding_ponders,)),
  (check_carry_over, halting.carry_over,
   (carry_nothing_over, carry_a_debt_over)),
  (check_distribution, pondernet.halting_distribution, (no_last_step,)),
)  # fmt: skip


@pytest.mark.parametrize(('check', 'right', 'variants'), TABLE)
def test_only_the_function_of_the_program_passes(check, right, variants):
  check(right)
  for wrong in variants:
    with pytest.raises(AssertionError):
      check(wrong)
