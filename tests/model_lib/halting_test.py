"""ACT, straight-through and Skip-ACT against known answers and plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import halting

STRAIGHT = halting.advance_straight_through


def take(scores, rule=halting.advance, carried=None, valid=True, epsilon=0.01):
  """Steps of one item by a rule; returns (halting, weights, skip)."""
  state, skip = halting.start(jnp.full((1,), valid)), jnp.zeros((1,))
  if carried is not None:
    state, skip = halting.start_carried(
      jnp.ones((1,), bool), jnp.reshape(carried, (1,))
    )
  weights = []
  for n, score in enumerate(scores):
    score = jnp.reshape(score, (1,))
    state, weight = rule(state, score, n == len(scores) - 1, epsilon)
    weights.append(weight[0])
  return state, jnp.stack(weights), skip[0]


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


@pytest.mark.parametrize(
  ('scores', 'steps', 'remainder', 'weights'),
  [
    ((0.3, 0.4, 0.5), 3, 0.3, (0.3, 0.4, 0.3)),
    ((0.995, 0.5), 1, 1.0, (1.0, 0.0)),
    ((0.1, 0.1, 0.1, 0.1), 4, 0.7, (0.1, 0.1, 0.1, 0.7)),
    ((0.995,), 1, 1.0, (1.0,)),
    ((0.5, 0.6, 0.9), 2, 0.5, (0.5, 0.5, 0.0)),
  ],
)
def test_known_answers(scores, steps, remainder, weights):
  state, got, _ = take(scores)
  assert int(state.steps[0]) == steps
  assert not bool(state.running[0])
  np.testing.assert_allclose(state.remainder[0], remainder, atol=1e-6)
  np.testing.assert_allclose(got, weights, atol=1e-6)
  cost = halting.ponder_cost(state)[0]
  np.testing.assert_allclose(cost, steps + remainder, atol=1e-6)


def test_reaching_the_threshold_exactly_halts():
  # Dyadic numbers, so that the tie is exact: 0.25 + 0.5 = 1 - 0.25.
  state, *_ = take((0.25, 0.5, 0.9), epsilon=0.25)
  assert int(state.steps[0]) == 2


def test_padding_spends_nothing():
  state, weights, _ = take((0.3, 0.4, 0.5), valid=False)
  assert int(state.steps[0]) == 0
  assert float(halting.ponder_cost(state)[0]) == 0.0
  np.testing.assert_array_equal(weights, 0.0)


@pytest.mark.parametrize('epsilon', [0.0, 0.01, 0.3])
def test_equals_plain_loop_and_weights_sum_to_one(epsilon):
  # Small, even and extreme scores: (items, steps).
  generator = np.random.default_rng(0)
  scores = generator.uniform(size=(300, 6)) ** generator.choice(
    [0.3, 1.0, 4.0], size=(300, 1)
  )
  scores[:3] = [[0.0] * 6, [1.0] * 6, [0.0, 1.0] * 3]
  scores = scores.astype(np.float32)
  state = halting.start(jnp.ones((300,), bool))
  weights = []
  for n in range(6):
    state, weight = halting.advance(
      state, jnp.asarray(scores[:, n]), n == 5, epsilon
    )
    weights.append(weight)
  weights = np.stack(weights, axis=1)
  np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-6)
  cost = np.asarray(halting.ponder_cost(state))
  assert (cost >= np.asarray(state.steps)).all()
  state = jax.tree.map(np.asarray, state)
  for item, row in enumerate(scores):
    steps, rest, want = plain(row, epsilon)
    assert int(state.steps[item]) == steps
    np.testing.assert_allclose(state.remainder[item], rest, atol=1e-6)
    np.testing.assert_allclose(weights[item], want, atol=1e-6)


def test_gradients_of_the_cost_and_of_the_weights():
  def both(scores):
    state, weights, _ = take(scores)
    return halting.ponder_cost(state)[0], weights

  cost, _ = jax.jacobian(both)(jnp.array([0.3, 0.4, 0.5, 0.2]))
  np.testing.assert_array_equal(cost, [-1.0, -1.0, 0.0, 0.0])
  _, weights = jax.jacobian(both)(jnp.array([0.3, 0.4, 0.5]))
  np.testing.assert_array_equal(weights, [[1, 0, 0], [0, 1, 0], [-1, -1, 0]])


def test_score_of_bfloat16_is_summed_in_float32():
  # 0.0078125 + 1 is 1 in bfloat16.
  scores = [jnp.asarray(0.0078125, jnp.bfloat16)] * 20
  state, weights, _ = take(scores)
  assert state.total.dtype == weights.dtype == jnp.float32
  np.testing.assert_allclose(state.remainder[0], 1 - 19 * 0.0078125, atol=1e-6)


def test_combinations_against_hand_values():
  # Weights .3, .4, .3 on states 1, 2, 4.
  results = {}
  for name in halting.COMBINATIONS:
    output = jnp.zeros((1, 1))
    for state, weight in ((1.0, 0.3), (2.0, 0.4), (4.0, 0.3)):
      output = halting.combine(
        name, output, jnp.full((1, 1), state), jnp.full((1,), weight)
      )
    results[name] = float(output[0, 0])
  assert results['accumulated'] == pytest.approx(2.3, abs=1e-6)
  # ((1 * .3) * .6 + 2 * .4) * .7 + 4 * .3; `prev * 1 - w` gives 1.6.
  assert results['basic'] == pytest.approx(1.886, abs=1e-6)
  assert results['fed_back'] == results['basic']


@pytest.mark.parametrize('combination', halting.COMBINATIONS)
def test_halted_items_keep_their_output(combination):
  previous = jnp.array([[1.5, -2.0]])
  state, zero = jnp.full((1, 2), 9.0), jnp.zeros((1,))
  got = halting.combine(combination, previous, state, zero)
  np.testing.assert_array_equal(got, previous)
  with pytest.raises(ValueError, match=r"combination: expected.*'sum'"):
    halting.combine('sum', previous, state, zero)


@pytest.mark.parametrize(
  ('scores', 'steps'),
  [
    ((0.3, 0.4, 0.5, 0.9), 3),
    ((0.995, 0.5), 1),
    ((0.1, 0.1, 0.1, 0.1), 4),
    ((0.5, 0.6, 0.9), 2),
  ],
)
def test_straight_through_takes_one_state(scores, steps):
  state, weights, _ = take(scores, STRAIGHT)
  assert int(state.steps[0]) == steps
  np.testing.assert_array_equal(weights, np.arange(1, len(scores) + 1) == steps)
  assert float(halting.ponder_cost(state)[0]) == steps
  np.testing.assert_allclose(state.total[0], sum(scores[:steps]), atol=1e-6)


def test_gradients_of_straight_through():
  # h^n is the sum of p^1 .. p^n and N is 3: the weight of each step taken, and
  # each term of the cost, has derivative 1 and -1 by every p before it.
  def both(scores):
    state, weights, _ = take(scores, STRAIGHT)
    return weights, halting.ponder_cost(state)[0]

  weights, cost = jax.jacobian(both)(jnp.array([0.3, 0.4, 0.5, 0.9]))
  np.testing.assert_array_equal(
    weights, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
  )
  np.testing.assert_array_equal(cost, [-3, -2, -1, 0])


def test_binary_is_one_from_the_threshold_on():
  values = jnp.array([0.0, 0.9899, 0.9901, 2.0])
  np.testing.assert_array_equal(halting.binary(values), [0, 0, 1, 1])
  slopes = jax.vmap(jax.grad(halting.binary))(values)
  np.testing.assert_array_equal(slopes, 1.0)


def test_skip_act_by_hand():
  # Scores up to mu = 3. The first input takes one step to 2.5, which is 1.5
  # too much: the second input is skipped, the third begins at 0.5.
  step = STRAIGHT
  first, weights, skip = take((2.5, 0.1), step, carried=0.0)
  assert (int(first.steps[0]), float(skip)) == (1, 0.0)
  np.testing.assert_array_equal(weights, [1.0, 0.0])
  carried = halting.carry_over(first)
  np.testing.assert_allclose(carried, [1.5])
  second, weights, skip = take((0.7, 0.9), step, carried=carried)
  assert (int(second.steps[0]), float(skip)) == (0, 1.0)
  np.testing.assert_array_equal(weights, 0.0)
  assert float(halting.ponder_cost(second)[0]) == 0.0
  carried = halting.carry_over(second)
  np.testing.assert_allclose(carried, [0.5])
  third, weights, skip = take((0.2, 0.4, 0.1), step, carried=carried)
  assert (int(third.steps[0]), float(skip)) == (2, 0.0)
  np.testing.assert_array_equal(weights, [0.0, 1.0, 0.0])
  np.testing.assert_allclose(halting.carry_over(third), [0.1], atol=1e-6)


def test_a_forced_halt_leaves_no_debt():
  state, weights, _ = take((0.1, 0.2), STRAIGHT, carried=0.0)
  np.testing.assert_array_equal(weights, [0.0, 1.0])
  np.testing.assert_array_equal(halting.carry_over(state), 0.0)


@pytest.mark.parametrize(
  ('carried', 'scores', 'steps', 'cost', 'rest'),
  [
    # rho = (1 - f(h^0)) alone, whose derivative is -1; h^0 - 1 is left over.
    (1.5, (0.5, 0.5), 0, -1.0, 1.0),
    # N = 2: 1 - f(h^0), 1 - f(h^1) and 1 - f(h^2) each have derivative -1.
    (0.5, (0.2, 0.4), 2, -3.0, 1.0),
  ],
)
def test_gradients_by_the_score_carried_over(
  carried, scores, steps, cost, rest
):
  def all_of(carried):
    state, _, skip = take(scores, STRAIGHT, carried=carried)
    return halting.ponder_cost(state)[0], halting.carry_over(state)[0], skip

  assert float(all_of(carried)[0]) == steps
  assert [float(x) for x in jax.jacobian(all_of)(carried)] == [cost, rest, 1.0]


@pytest.mark.parametrize(
  ('field', 'arguments'),
  [
    ('rule', ('ponder',)),
    ('epsilon', ('act', 1.0)),
    ('epsilon', ('act', -1.0)),
  ],
)
def test_illegal_rules_are_named(field, arguments):
  with pytest.raises(ValueError, match=f'^{field}: expected'):
    halting.rule(*arguments)
