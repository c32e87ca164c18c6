"""Pondering over one input with scores and states known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurrent_act.model import RecurrentModel, ponder_input


def once(score, carried=0.0, state=0.0, **options):
  """One input of a cell that adds 1 to its state: s^n = s_{t-1} + n."""

  def step(state, inputs):
    return state + 1.0, jnp.broadcast_to(score, state.shape[:1])

  carried = jnp.broadcast_to(jnp.asarray(carried, jnp.float32), (1,))
  options = RecurrentModel(num_classes=2, **{'max_steps': 10} | options)
  state, inputs = jnp.full((1, 1), state), jnp.zeros((1, 1))
  return ponder_input(step, state, carried, inputs, jnp.array([True]), options)


def state_of(*args, **options):
  return once(*args, **options)[0][0, 0]


def carried_of(*args, **options):
  return once(*args, **options)[1][0]


def cost_of(*args, **options):
  return once(*args, **options)[2]['cost'][0]


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
  (dict(rule='fixed', max_steps=4), 0.0, 0.0, 0.0, (4.0, 4, 4.0, 0.0)),
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
  assert int(spent['steps'][0]) == want[1]
  np.testing.assert_allclose(spent['cost'][0], want[2], atol=1e-6)
  assert bool(spent['skipped'][0]) == (want[1] == 0)
  np.testing.assert_allclose(rest[0], want[3], atol=1e-6)


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
  assert float(slope) == pytest.approx(want, abs=1e-6)
