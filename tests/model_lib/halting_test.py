"""ACT against known answers, a plain loop, and its two forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import halting


def spend(scores, max_steps=None, epsilon=0.01, valid=True):
  """Advances one item over a list of scores; returns (state, weights)."""
  scores = list(scores)
  limit = max_steps or len(scores)
  state = halting.start(jnp.full((1,), valid))
  weights = []
  for n, score in enumerate(scores[:limit]):
    score = jnp.asarray(score, jnp.float32).reshape(1)
    state, weight = halting.advance(state, score, n == limit - 1, epsilon)
    weights.append(weight[0])
  return state, jnp.stack(weights)


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
  state, got = spend(scores)
  assert int(state.steps[0]) == steps
  assert not bool(state.running[0])
  np.testing.assert_allclose(state.remainder[0], remainder, atol=1e-6)
  np.testing.assert_allclose(got, weights, atol=1e-6)
  cost = halting.ponder_cost(state)[0]
  np.testing.assert_allclose(cost, steps + remainder, atol=1e-6)


def test_reaching_the_threshold_exactly_halts():
  # Dyadic numbers, so that the tie is exact: 0.25 + 0.5 = 1 - 0.25.
  state, _ = spend((0.25, 0.5, 0.9), epsilon=0.25)
  assert int(state.steps[0]) == 2


def test_padding_spends_nothing():
  state, weights = spend((0.3, 0.4, 0.5), valid=False)
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


def test_gradient_of_the_cost():
  def cost(scores):
    return halting.ponder_cost(spend(scores)[0])[0]

  gradient = jax.grad(cost)(jnp.array([0.3, 0.4, 0.5, 0.2]))
  np.testing.assert_array_equal(gradient, [-1.0, -1.0, 0.0, 0.0])


def test_gradient_of_the_weights():
  jacobian = jax.jacobian(lambda p: spend(p)[1])(jnp.array([0.3, 0.4, 0.5]))
  np.testing.assert_array_equal(jacobian, [[1, 0, 0], [0, 1, 0], [-1, -1, 0]])


def test_score_of_bfloat16_is_summed_in_float32():
  # 0.0078125 + 1 is 1 in bfloat16.
  scores = [jnp.asarray(0.0078125, jnp.bfloat16)] * 20
  state, weights = spend(scores)
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


@pytest.mark.parametrize('combination', halting.COMBINATIONS)
def test_halted_items_keep_their_output(combination):
  previous = jnp.array([[1.5, -2.0]])
  got = halting.combine(
    combination, previous, jnp.full((1, 2), 9.0), jnp.zeros((1,))
  )
  np.testing.assert_array_equal(got, previous)


def test_unknown_combination():
  with pytest.raises(ValueError, match=r"combination: expected.*'sum'"):
    halting.combine('sum', jnp.zeros((1,)), jnp.zeros((1,)), jnp.zeros((1,)))


def contraction(state, n):
  """A step whose score depends on the item and on the step."""
  new = 0.7 * state + jnp.sin(state[..., ::-1]) + 0.1 * n.astype(jnp.float32)
  return new, jax.nn.sigmoid(new.sum(-1) - 1.0)


@pytest.mark.parametrize('combination', halting.COMBINATIONS)
@pytest.mark.parametrize('max_steps', [1, 2, 7])
def test_scan_and_while_loop_agree(combination, max_steps):
  state = jax.random.normal(jax.random.key(0), (3, 4, 2)) - 0.5
  valid = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
  arguments = {'max_steps': max_steps, 'combination': combination}
  masked = halting.ponder_scan(contraction, state, valid, **arguments)
  looped = halting.ponder_while(contraction, state, valid, **arguments)
  assert int(masked.depth) == max_steps
  assert int(looped.depth) == int(masked.halting.steps.max())
  for name in ('total', 'remainder', 'steps', 'running'):
    np.testing.assert_array_equal(
      getattr(masked.halting, name), getattr(looped.halting, name)
    )
  np.testing.assert_array_equal(masked.output, looped.output)


def test_scan_equals_loop_over_items():
  state = np.asarray(jax.random.normal(jax.random.key(0), (5, 2))) - 0.5
  got = halting.ponder_scan(
    contraction, jnp.asarray(state), jnp.ones((5,), bool), max_steps=6
  )
  for i, item in enumerate(state):
    s, total, output, steps = item[None], np.float32(0), 0.0, 0
    for n in range(6):
      s, p = contraction(jnp.asarray(s), jnp.asarray(n))
      steps += 1
      halts = total + p[0] >= 0.99 or n == 5
      output = output + (1 - total if halts else p[0]) * s[0]
      total += p[0]
      if halts:
        break
    assert int(got.halting.steps[i]) == steps
    np.testing.assert_allclose(got.output[i], output, atol=1e-5)


def test_padding_never_prolongs_the_loop():
  state = jnp.array([[9.0, 9.0], [-9.0, -9.0]])
  valid = jnp.array([True, False])
  result = halting.ponder_while(contraction, state, valid, max_steps=50)
  assert int(result.depth) == 1
  np.testing.assert_array_equal(result.output[1], 0.0)


@pytest.mark.parametrize(
  ('field', 'fields'),
  [
    ('max_steps', {'max_steps': 0}),
    ('epsilon', {'max_steps': 1, 'epsilon': 1.0}),
  ],
)
def test_limits_out_of_range(field, fields):
  with pytest.raises(ValueError, match=field):
    halting.ponder_scan(
      contraction, jnp.zeros((1, 2)), jnp.ones((1,), bool), **fields
    )
