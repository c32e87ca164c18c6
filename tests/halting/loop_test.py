"""ACT and straight-through against a plain loop, and the loops of depth.

By hand, with gradients and Skip-ACT: recurrent_act/model_test.py.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import registry
from halting import loop
from halting.rule import TokenRule, weigh
from halting.token_rules import ACT, PonderNet, StraightThrough

PONDER = PonderNet(epsilon=0.01)
RULES = ACT(), StraightThrough(), PONDER


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


def check_rule(rule, is_straight, epsilon, xp):
  # Small, even and extreme scores: (items, steps).
  generator = np.random.default_rng(0)
  scores = generator.uniform(size=(300, 6)) ** generator.choice(
    [0.3, 1.0, 4.0], size=(300, 1)
  )
  scores[:3] = [[0.0] * 6, [1.0] * 6, [0.0, 1.0] * 3]
  scores = scores.astype(np.float32)
  state, weights = weigh(rule, xp.asarray(scores.T), xp.ones((300,), bool))
  assert all(
    isinstance(leaf, type(xp.ones(()))) for leaf in vars(state).values()
  )
  weights, cost = np.asarray(weights).T, rule.cost(state)
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


@pytest.mark.parametrize('xp', [np, jnp])
@pytest.mark.parametrize('epsilon', [0.0, 0.01, 0.3])
def test_equals_plain_loop(epsilon, xp):
  check_rule(ACT(epsilon), False, epsilon, xp)
  check_rule(StraightThrough(epsilon), True, epsilon, xp)


def test_illegal_rules_are_named():
  for epsilon in (1.0, -1.0):
    with pytest.raises(
      ValueError, match=r'^epsilon: expected .* in \[0.0, 1.0'
    ):
      ACT(epsilon)
  for name in ('ponder', 'halting.loop:Result', 'halting.rule:TokenRule'):
    with pytest.raises(ValueError, match=r'^rule\.name: expected'):
      registry.named({'name': name}, 'rule', TokenRule)


def contraction(state, n, running):
  """A step whose score depends on the item and on the step."""
  time = jnp.asarray(n, jnp.float32)
  new = 0.7 * state + jnp.sin(state[..., ::-1]) + 0.1 * time
  return new, jax.nn.sigmoid(new.sum(-1) - 1.0)


PAIRS = [*itertools.product(RULES, loop.COMBINATIONS)]
# The state after the last step is that of a halted item only if it is kept.
PAIRS.remove((PONDER, 'last'))


@pytest.mark.parametrize(('rule', 'combination'), PAIRS)
@pytest.mark.parametrize(
  # Slow, not nightly: XLA's optimizations, which nightly tests have, round the
  # bodies of a loop and of its unrolled form differently, in the last bit.
  'max_steps',
  [1, pytest.param(2, marks=pytest.mark.slow), 7],
)
def test_all_forms_agree(combination, max_steps, rule):
  state = jax.random.normal(jax.random.key(0), (3, 4, 2)) - 0.5
  valid = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
  arguments = dict(max_steps=max_steps, combination=combination, rule=rule)
  masked, looped, unrolled, stopped = (
    loop.run(
      contraction, state, valid, dynamic=dynamic, unroll=unroll, **arguments
    )
    for unroll in (False, True)
    for dynamic in (False, True)
  )
  assert int(masked.depth) == int(unrolled.depth) == max_steps
  depth = int(masked.halting.steps.max())
  assert int(looped.depth) == int(stopped.depth) == depth
  ended = loop.run(
    contraction, state, valid, dynamic=True, differentiable=False,
    trace=lambda visit: visit.running, **arguments,
  )  # fmt: skip
  assert int(ended.depth) == depth
  np.testing.assert_array_equal(ended.trace.sum(0), ended.halting.steps)
  for other in (looped, unrolled, stopped, ended):
    jax.tree.map(np.testing.assert_array_equal, masked.halting, other.halting)
    np.testing.assert_array_equal(masked.output, other.output)


@pytest.mark.parametrize('remat_chunk', [0, 1, 3])
@pytest.mark.parametrize('combination', loop.COMBINATIONS)
@pytest.mark.parametrize('rule', [ACT(), StraightThrough()])
def test_skipped_steps_do_not_change_the_gradient(
  rule, combination, remat_chunk
):
  state = jax.random.normal(jax.random.key(0), (3, 4, 2)) + 0.5
  valid = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)

  def loss(state, dynamic):
    result = loop.run(
      contraction, state, valid, max_steps=9, combination=combination,
      dynamic=dynamic, remat_chunk=remat_chunk, rule=rule,
    )  # fmt: skip
    cost = rule.cost(result.halting).sum()
    return jnp.square(result.output).sum() + 0.1 * cost, result.depth

  run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
  (want, limit), (got, depth) = run(state, False), run(state, True)
  assert depth < limit == 9
  assert jnp.abs(want).min(-1)[valid].min() > 1e-3
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_states_that_are_not_frozen_go_on_after_halting():
  state = jnp.zeros((2, 1))
  arguments = dict(max_steps=4, trace=lambda visit: visit.after)

  @dataclasses.dataclass(frozen=True)
  class GoesOn(StraightThrough):
    KEEPS_STATE = False

  def count(state, n, running):
    return state + 1.0, jnp.array([0.5, 0.25])

  rules = (StraightThrough(), [2.0, 4.0]), (GoesOn(), [4.0, 4.0])
  for rule, last in rules:
    result = loop.run(count, state, jnp.ones(2, bool), rule, **arguments)
    np.testing.assert_array_equal(result.trace[-1, :, 0], last)
    np.testing.assert_array_equal(result.output[:, 0], [2.0, 4.0])


def temporary_bytes(max_steps, remat_chunk):
  """Of the gradient of a step that makes much more than its state."""

  def step(state, n, running):
    wide = jnp.sin(state[..., None] * jnp.arange(64.0)[None, None]).sum(-1)
    return state + wide, jax.nn.sigmoid(wide.mean(-1) - 3.0)

  def loss(state):
    result = loop.run(
      step, state, jnp.ones(256, bool), ACT(), max_steps=max_steps,
      combination='fed_back', remat_chunk=remat_chunk,
    )  # fmt: skip
    return (result.output**2).sum()

  state = jax.ShapeDtypeStruct((256, 128), jnp.float32)
  compiled = jax.jit(jax.grad(loss)).lower(state).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_the_gradient_of_skipped_steps_keeps_no_copies_of_the_weights():
  def step(weights, state, n, running):
    return jnp.sin(state @ weights), jax.nn.sigmoid(state.mean(-1) - 3.0)

  def loss(weights, state):
    result = loop.run(
      functools.partial(step, weights), state, jnp.ones(2, bool), ACT(),
      max_steps=20, dynamic=True,
    )  # fmt: skip
    return (result.output**2).sum()

  weights = jax.ShapeDtypeStruct((256, 256), jnp.float32)
  state = jax.ShapeDtypeStruct((2, 256), jnp.float32)
  compiled = jax.jit(jax.grad(loss)).lower(weights, state).compile()
  temporary = compiled.memory_analysis().temp_size_in_bytes
  # A copy for each of the 20 steps would be five times as much.
  assert temporary < 4 * weights.size * weights.dtype.itemsize


def test_memory_of_the_gradient_does_not_grow_with_the_steps():
  # Nine times as many steps: three times as many kept states, about.
  chunked = [temporary_bytes(n, chunk) for n, chunk in ((4, 2), (36, 6))]
  plain = [temporary_bytes(n, 0) for n in (4, 36)]
  assert plain[1] > 5 * plain[0]
  assert chunked[1] < 2 * chunked[0]
  assert chunked[1] < plain[1] / 5


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'max_steps': 0}, 'max_steps: expected at least 1'),
    ({'max_steps': 4, 'remat_chunk': 3},
     'remat_chunk: expected 0 or a divisor of 4, best near its root'),
    ({'max_steps': 2, 'dynamic': True, 'trace': max}, 'trace: expected None'),
    ({'max_steps': 1, 'combination': 'sum'}, "combination: expected.*'sum'"),
  ],
)  # fmt: skip
def test_limits_out_of_range(options, message):
  state, valid = jnp.zeros((1, 2)), jnp.ones((1,), bool)
  with pytest.raises(ValueError, match=message):
    loop.run(contraction, state, valid, ACT(), **options)
