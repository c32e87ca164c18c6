"""The loops of adaptive depth against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_lib import halting, pondering


def contraction(state, n):
  """A step whose score depends on the item and on the step."""
  time = jnp.asarray(n, jnp.float32)
  new = 0.7 * state + jnp.sin(state[..., ::-1]) + 0.1 * time
  return new, jax.nn.sigmoid(new.sum(-1) - 1.0)


@pytest.mark.parametrize('rule', halting.RULES)
@pytest.mark.parametrize('combination', halting.COMBINATIONS)
@pytest.mark.parametrize('max_steps', [1, 2, 7])
def test_scan_and_while_loop_agree(combination, max_steps, rule):
  state = jax.random.normal(jax.random.key(0), (3, 4, 2)) - 0.5
  valid = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
  arguments = dict(
    max_steps=max_steps, combination=combination, rule=halting.rule(rule)
  )
  masked, looped, unrolled, stopped = (
    pondering.ponder(
      contraction, state, valid, dynamic=dynamic, unroll=unroll, **arguments
    )
    for unroll in (False, True)
    for dynamic in (False, True)
  )
  assert int(masked.depth) == int(unrolled.depth) == max_steps
  depth = int(masked.halting.steps.max())
  assert int(looped.depth) == int(stopped.depth) == depth
  for other in (looped, unrolled, stopped):
    jax.tree.map(np.testing.assert_array_equal, masked.halting, other.halting)
    np.testing.assert_array_equal(masked.output, other.output)


def test_states_that_are_not_frozen_go_on_after_halting():
  state = jnp.zeros((2, 1))
  arguments = dict(
    max_steps=4, trace=lambda before, after, halting: after,
    rule=halting.rule('straight_through'),
  )  # fmt: skip

  def count(state, n):
    return state + 1.0, jnp.array([0.5, 0.25])

  for freeze, last in ((True, [2.0, 4.0]), (False, [4.0, 4.0])):
    result = pondering.ponder(
      count, state, jnp.ones(2, bool), freeze=freeze, **arguments
    )
    np.testing.assert_array_equal(result.trace[-1, :, 0], last)
    np.testing.assert_array_equal(result.output[:, 0], [2.0, 4.0])


def temporary_bytes(max_steps, remat_chunk):
  """Of the gradient of a step that makes much more than its state."""

  def step(state, n):
    wide = jnp.sin(state[..., None] * jnp.arange(64.0)[None, None]).sum(-1)
    return state + wide, jax.nn.sigmoid(wide.mean(-1) - 3.0)

  def loss(state):
    result = pondering.ponder(
      step, state, jnp.ones(256, bool), max_steps=max_steps,
      combination='fed_back', remat_chunk=remat_chunk,
    )  # fmt: skip
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


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'max_steps': 0}, 'max_steps: expected at least 1'),
    ({'max_steps': 4, 'remat_chunk': 3},
     r'remat_chunk: expected 0 or a divisor.*as 2'),
    ({'max_steps': 2, 'unroll': True, 'trace': max}, 'trace: expected None'),
  ],
)  # fmt: skip
def test_limits_out_of_range(options, message):
  state, valid = jnp.zeros((1, 2)), jnp.ones((1,), bool)
  with pytest.raises(ValueError, match=message):
    pondering.ponder(contraction, state, valid, **options)


@pytest.mark.parametrize(
  ('steps', 'chunk'), [(1, 1), (6, 2), (12, 3), (24, 4), (36, 6), (7, 1)]
)
def test_chunks_near_the_root(steps, chunk):
  assert pondering.balanced_chunk(steps) == chunk
