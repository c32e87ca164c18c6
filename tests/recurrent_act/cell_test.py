"""Pondering over one input with scores and states known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurrent_act.cell import Pondering, ponder_input, ponder_sequence

ONE = jnp.ones((1,))
NO_INPUT = jnp.zeros((1, 1))
VALID = jnp.array([True])


def once(score, carried=0.0, state=0.0, valid=VALID, **options):
  """One input of a cell that adds 1 to its state: s^n = s_{t-1} + n."""

  def step(state, inputs):
    return state + 1.0, jnp.broadcast_to(score, state.shape[:1])

  carried = jnp.broadcast_to(jnp.asarray(carried, jnp.float32), (1,))
  options = Pondering(**{'max_steps': 10} | options)
  state = jnp.full((1, 1), state)
  return ponder_input(step, state, carried, NO_INPUT, valid, options)


def state_of(*args, **options):
  return once(*args, **options)[0][0, 0]


def carried_of(*args, **options):
  return once(*args, **options)[1][0]


def cost_of(*args, **options):
  return once(*args, **options)[2].cost[0]


# (options, score, h^0, s_{t-1}) -> (s_t, N, rho, h^0 of the next input)
BY_HAND = [
  # Weights .4, .4, .2 of the states 1, 2, 3.
  (dict(rule='act'), 0.4, 0.0, 0.0, (1.8, 3, 3.2, 0.0)),
  # Forced at 2: weights .4, .6.
  (dict(rule='act', max_steps=2), 0.4, 0.0, 0.0, (1.6, 2, 2.6, 0.0)),
  (dict(rule='act'), 0.995, 0.0, 5.0, (6.0, 1, 2.0, 0.0)),
  (dict(rule='straight_through'), 0.4, 0.0, 0.0, (3.0, 3, 3.0, 0.0)),
  (dict(rule='straight_through', max_steps=2), 0.4, 0.0, 0.0,
   (2.0, 2, 2.0, 0.0)),
  (dict(rule='fixed', max_steps=4), 0.9, 0.0, 0.0, (4.0, 4, 4.0, 0.0)),
  # h = .8, 1.4: two repetitions, and .4 is carried over.
  (dict(rule='skip', mu=2), 0.3, 0.2, 5.0, (7.0, 2, 2.0, 0.4)),
  (dict(rule='skip', mu=5), 0.9, 0.0, 5.0, (6.0, 1, 1.0, 3.5)),
  # Skipped: state as it was, 1 less is carried.
  (dict(rule='skip', mu=5), 0.9, 3.5, 5.0, (5.0, 0, 0.0, 2.5)),
  (dict(rule='skip', mu=5), 0.9, 0.995, 5.0, (5.0, 0, 0.0, -0.005)),
  # A forced halt leaves no debt.
  (dict(rule='skip', mu=1, max_steps=2), 0.1, 0.3, 5.0, (7.0, 2, 2.0, 0.0)),
]  # fmt: skip


@pytest.mark.parametrize('dynamic', [False, True])
@pytest.mark.parametrize(
  ('options', 'score', 'carried', 'state', 'want'), BY_HAND
)
def test_by_hand(options, score, carried, state, want, dynamic):
  after, rest, spent = once(score, carried, state, dynamic=dynamic, **options)
  np.testing.assert_allclose(after[0, 0], want[0], atol=1e-6)
  assert int(spent.steps[0]) == want[1]
  np.testing.assert_allclose(spent.cost[0], want[2], atol=1e-6)
  assert bool(spent.skipped[0]) == (want[1] == 0)
  np.testing.assert_allclose(rest[0], want[3], atol=1e-6)


@pytest.mark.parametrize('options', [dict(rule='act'), dict(rule='skip', mu=3)])
def test_nothing_happens_without_an_input(options):
  after, rest, spent = once(0.4, 1.7, 5.0, jnp.array([False]), **options)
  assert (float(after[0, 0]), float(rest[0])) == (5.0, np.float32(1.7))
  assert float(spent.cost[0]) == int(spent.steps[0]) == 0
  assert not spent.skipped[0]


ACT, STRAIGHT = dict(rule='act'), dict(rule='straight_through')
SKIP = dict(rule='skip', mu=2, state=5.0)
TWO = dict(max_steps=2)
# (function, options, (score, h^0), argument) -> derivative
GRADIENTS = [
  # s = p + 2 p + 3 (1 - 2 p); rho = 3 + 1 - 2 p.
  (state_of, ACT, (0.4, 0.0), 0, -3.0),
  (cost_of, ACT, (0.4, 0.0), 0, -2.0),
  # Forced at 2: s = p + 2 (1 - p); rho = 2 + 1 - p.
  (state_of, ACT | TWO, (0.4, 0.0), 0, -1.0),
  (cost_of, ACT | TWO, (0.4, 0.0), 0, -1.0),
  # h^n = n p, s^n = n: sum_n s^n dh^n/dp = 1 + 4 + 9; of the cost -(1 + 2 + 3).
  (state_of, STRAIGHT, (0.4, 0.0), 0, 14.0),
  (cost_of, STRAIGHT, (0.4, 0.0), 0, -6.0),
  (state_of, STRAIGHT | TWO, (0.4, 0.0), 0, 5.0),
  (cost_of, STRAIGHT | TWO, (0.4, 0.0), 0, -3.0),
  # h^n = c + 2 n p: N = 2, s = (1 - f(c)) (f(h^1) 6 + f(h^2) 7) + f(c) 5.
  (state_of, SKIP, (0.3, 0.2), 0, 40.0),
  (state_of, SKIP, (0.3, 0.2), 1, 5.0 - 7.0 + 6.0 + 7.0),
  # rho = 2 + (1 - f(c)) + ... in slope: -1 by each of h^0, h^1, h^2.
  (cost_of, SKIP, (0.3, 0.2), 0, -6.0),
  (cost_of, SKIP, (0.3, 0.2), 1, -3.0),
  # h^2 - 1
  (carried_of, SKIP, (0.3, 0.2), 0, 4.0),
  (carried_of, SKIP, (0.3, 0.2), 1, 1.0),
  # A skipped input: s = f(c) 5 + (1 - f(c)) 0, the sum over no steps.
  (state_of, SKIP, (0.3, 1.3), 1, 5.0),
  (cost_of, SKIP, (0.3, 1.3), 1, -1.0),
  (carried_of, SKIP, (0.3, 1.3), 1, 1.0),
]


@pytest.mark.parametrize(
  ('function', 'options', 'given', 'argument', 'want'), GRADIENTS
)
def test_gradients_by_hand(function, options, given, argument, want):
  slope = jax.grad(lambda *a: function(*a, **options), argument)(*given)
  assert float(slope) == pytest.approx(want, abs=1e-4)


def test_the_flag_is_1_in_the_first_repetition_only():
  def step(state, inputs):
    # The state counts in binary where the flag was 1; the input is 7.
    return 2.0 * state + inputs[:, 1:] + 0.0 * inputs[:, :1], ONE * 0.4

  state, hidden, _ = ponder_sequence(
    step, jnp.zeros((1, 1)), jnp.full((1, 2, 1), 7.0), jnp.ones((1, 2), bool),
    Pondering('straight_through', 10),
  )  # fmt: skip
  # 100, then 100 100.
  np.testing.assert_array_equal(hidden[0, :, 0], [4.0, 36.0])
  np.testing.assert_array_equal(state[0, 0], 36.0)


def test_both_arrays_of_a_state_are_combined():
  def step(state, inputs):
    cell, hidden = state
    return (cell + 1.0, hidden + 10.0), ONE * 0.4

  zeros = jnp.zeros((1, 1))
  state, _, _ = ponder_input(
    step, (zeros, zeros), ONE * 0, NO_INPUT, VALID, Pondering('act', 10)
  )
  np.testing.assert_allclose(state[0], 1.8, atol=1e-6)
  np.testing.assert_allclose(state[1], 18.0, atol=1e-5)


def test_what_is_carried_lasts_for_several_inputs():
  # A score of 3.6: one input read, two skipped; then 3.6 + .6 = 4.2: three.
  def step(state, inputs):
    return state + 1.0, jnp.broadcast_to(0.9, state.shape[:1])

  valid = jnp.array([[1, 1, 0, 1, 1, 1, 1, 1]], bool)
  options = Pondering('skip', 5, mu=4)
  state, hidden, spent = ponder_sequence(
    step, jnp.zeros((1, 1)), jnp.zeros((1, 8, 1)), valid, options
  )
  np.testing.assert_array_equal(spent.steps[0], [1, 0, 0, 0, 1, 0, 0, 0])
  np.testing.assert_array_equal(spent.skipped[0], [0, 1, 0, 1, 0, 1, 1, 1])
  np.testing.assert_array_equal(hidden[0, :, 0], [1, 1, 1, 1, 2, 2, 2, 2])
  np.testing.assert_array_equal(state[0, 0], 2.0)
