"""ACT and straight-through against a plain loop.

By hand, with gradients and Skip-ACT: recurrent_act/model_test.py.
"""

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


def check_rule(rule, is_straight, epsilon):
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


@pytest.mark.parametrize('epsilon', [0.0, 0.01, 0.3])
def test_equals_plain_loop(epsilon):
  check_rule(halting.advance, False, epsilon)
  check_rule(STRAIGHT, True, epsilon)


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
