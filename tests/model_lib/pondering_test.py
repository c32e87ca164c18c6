"""The loops of adaptive depth: against a plain loop, and each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import halting, pondering


def contraction(state, n):
  """A step whose score depends on the item and on the step."""
  new = 0.7 * state + jnp.sin(state[..., ::-1]) + 0.1 * n.astype(jnp.float32)
  return new, jax.nn.sigmoid(new.sum(-1) - 1.0)


@pytest.mark.parametrize('rule', halting.RULES)
@pytest.mark.parametrize('combination', halting.COMBINATIONS)
@pytest.mark.parametrize('max_steps', [1, 2, 7])
def test_scan_and_while_loop_agree(combination, max_steps, rule):
  state = jax.random.normal(jax.random.key(0), (3, 4, 2)) - 0.5
  valid = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
  arguments = {
    'max_steps': max_steps,
    'combination': combination,
    'rule': halting.rule(rule),
  }
  masked = pondering.ponder_scan(contraction, state, valid, **arguments)
  looped = pondering.ponder_while(contraction, state, valid, **arguments)
  assert int(masked.depth) == max_steps
  assert int(looped.depth) == int(masked.halting.steps.max())
  for name in ('total', 'remainder', 'steps', 'running'):
    np.testing.assert_array_equal(
      getattr(masked.halting, name), getattr(looped.halting, name)
    )
  np.testing.assert_array_equal(masked.output, looped.output)


@pytest.mark.parametrize('combination', ['accumulated', 'fed_back'])
def test_scan_equals_loop_over_items(combination):
  state = np.asarray(jax.random.normal(jax.random.key(0), (5, 2))) - 0.5
  got = pondering.ponder_scan(
    contraction,
    jnp.asarray(state),
    jnp.ones((5,), bool),
    max_steps=6,
    combination=combination,
  )
  for i, item in enumerate(state):
    s, total, output, steps = item[None], np.float32(0), 0.0, 0
    for n in range(6):
      new, p = contraction(jnp.asarray(s), jnp.asarray(n))
      steps += 1
      halts = total + p[0] >= 0.99 or n == 5
      weight = 1 - total if halts else p[0]
      if combination == 'fed_back':
        output = s = weight * np.asarray(new) + (1 - weight) * s
      else:
        output, s = output + weight * new, new
      total += p[0]
      if halts:
        break
    assert int(got.halting.steps[i]) == steps
    np.testing.assert_allclose(got.output[i], output[0], atol=1e-5)


def test_padding_never_prolongs_the_loop():
  state = jnp.array([[9.0, 9.0], [-9.0, -9.0]])
  valid = jnp.array([True, False])
  result = pondering.ponder_while(contraction, state, valid, max_steps=50)
  assert int(result.depth) == 1
  np.testing.assert_array_equal(result.output[1], 0.0)


def test_states_of_several_arrays():
  # An LSTM's state is a pair: each is combined with the same weights.
  def step(state, n):
    new, score = contraction(state['h'], n)
    return {'c': state['c'] + 1.0, 'h': new}, score

  h = jax.random.normal(jax.random.key(0), (3, 2)) - 0.5
  everybody = jnp.ones((3,), bool)
  both = pondering.ponder_scan(
    step, {'c': jnp.zeros((3,)), 'h': h}, everybody, max_steps=5
  )
  alone = pondering.ponder_scan(contraction, h, everybody, max_steps=5)
  np.testing.assert_array_equal(both.output['h'], alone.output)
  # The first step's c is 1, the second's 2, ...: their mean by ACT's weights.
  steps = alone.halting.steps.astype(jnp.float32)
  assert (both.output['c'] <= steps).all()
  assert (both.output['c'] >= 1).all()


def loss_of(remat_chunk, combination):
  def loss(state):
    result = pondering.ponder_scan(
      contraction,
      state,
      jnp.ones(state.shape[:-1], bool),
      max_steps=12,
      combination=combination,
      remat_chunk=remat_chunk,
    )
    cost = halting.ponder_cost(result.halting).sum()
    return (result.output**2).sum() + 0.1 * cost

  return loss


@pytest.mark.slow
@pytest.mark.parametrize('combination', ['accumulated', 'fed_back'])
def test_rematerialisation_changes_nothing(combination):
  state = jax.random.normal(jax.random.key(1), (4, 3)) - 0.5
  want = jax.value_and_grad(loss_of(0, combination))(state)
  for chunk in (1, 3, 12):
    got = jax.value_and_grad(loss_of(chunk, combination))(state)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)


def temporary_bytes(max_steps, remat_chunk):
  """Of the gradient of a step that makes much more than its state."""

  def step(state, n):
    wide = jnp.sin(state[..., None] * jnp.arange(64.0)[None, None]).sum(-1)
    return state + wide, jax.nn.sigmoid(wide.mean(-1) - 3.0)

  def loss(state):
    result = pondering.ponder_scan(
      step,
      state,
      jnp.ones(state.shape[:-1], bool),
      max_steps=max_steps,
      combination='fed_back',
      remat_chunk=remat_chunk,
    )
    return (result.output**2).sum()

  state = jax.ShapeDtypeStruct((256, 128), jnp.float32)
  compiled = jax.jit(jax.grad(loss)).lower(state).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_the_gradient_does_not_grow_with_the_steps():
  # Nine times as many steps: three times as many kept states, about.
  chunked = [temporary_bytes(n, pondering.balanced_chunk(n)) for n in (4, 36)]
  plain = [temporary_bytes(n, 0) for n in (4, 36)]
  assert plain[1] > 5 * plain[0]
  assert chunked[1] < 2 * chunked[0]
  assert chunked[1] < plain[1] / 5


def test_a_trace_sees_every_step():
  state = jax.random.normal(jax.random.key(0), (3, 2)) - 0.5

  def trace(before, after, spent):
    return {'moved': jnp.abs(after - before).sum(-1), 'steps': spent.steps}

  for chunk in (0, 3):
    result = pondering.ponder_scan(
      contraction,
      state,
      jnp.ones((3,), bool),
      max_steps=6,
      remat_chunk=chunk,
      trace=trace,
    )
    steps = np.asarray(result.halting.steps)
    assert result.trace['moved'].shape == (6, 3)
    np.testing.assert_array_equal(result.trace['steps'][-1], steps)
    moved = np.asarray(result.trace['moved']) > 0
    np.testing.assert_array_equal(moved.sum(0), steps)


def test_one_goes_on_from_a_halting():
  # Skip-ACT: what was carried over counts; who has enough takes no step.
  begun, _ = halting.start_carried(
    jnp.ones((3,), bool), jnp.array([0.0, 0.6, 1.2])
  )
  result = pondering.ponder_scan(
    lambda state, n: (state + 1.0, jnp.full((3,), 0.5)),
    jnp.zeros((3, 1)),
    begun,
    max_steps=4,
    rule=halting.rule('straight_through'),
  )
  np.testing.assert_array_equal(result.halting.steps, [2, 1, 0])
  np.testing.assert_array_equal(result.output[:, 0], [2.0, 1.0, 0.0])


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'max_steps': 0}, 'max_steps: expected at least 1'),
    ({'max_steps': 4, 'remat_chunk': 3},
     r'remat_chunk: expected 0 or a divisor.*as 2'),
  ],
)  # fmt: skip
def test_limits_out_of_range(options, message):
  state, valid = jnp.zeros((1, 2)), jnp.ones((1,), bool)
  with pytest.raises(ValueError, match=message):
    pondering.ponder_scan(contraction, state, valid, **options)


@pytest.mark.parametrize(
  ('steps', 'chunk'), [(1, 1), (6, 2), (12, 3), (24, 4), (36, 6), (7, 1)]
)
def test_chunks_near_the_root(steps, chunk):
  assert pondering.balanced_chunk(steps) == chunk
