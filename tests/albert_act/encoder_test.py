"""ALBERT with halting against a plain loop; what padding may not change."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from albert_act import published
from albert_act.model import AlbertClassifier, AlbertPretraining
from halting.token_rules import Fixed, StraightThrough
from tests.albert_act import small


@pytest.mark.parametrize(
  'fields',
  [
    {}, {'rule': Fixed()}, {'rule': StraightThrough()},
    {'num_groups': 2, 'inner_group': 2}, {'num_groups': 3, 'rule': Fixed()},
    {'num_groups': 4},  # two, one, two and one iterations
    {'rule': small.PONDER},
  ],
)  # fmt: skip
def test_equals_plain_loop(fields):
  model, variables = small.build(**fields)
  inputs = small.batch()
  logits, out = jax.jit(model.apply)(variables, *inputs)
  dynamic = dataclasses.replace(model, dynamic=True)
  got, looped = jax.jit(dynamic.apply)(variables, *inputs)
  np.testing.assert_array_equal(got, logits)
  jax.tree.map(np.testing.assert_array_equal, looped['ponder'], out['ponder'])
  traced = functools.partial(
    model.apply, method='encode', trace=lambda visit: visit.after
  )
  trace = jax.jit(traced)(variables, *inputs).trace
  tokens, types, lengths = map(np.asarray, inputs)
  spent = []
  for row, length in enumerate(lengths):
    state, steps, rest, history = small.encode_by_loop(
      variables['params'], tokens[row, :length], types[row, :length], model
    )
    states = trace[:, row, :length]
    np.testing.assert_allclose(states, history[1:], atol=1e-5)
    want = small.classify_by_loop(variables['params'], state)
    np.testing.assert_allclose(logits[row], want, atol=1e-5)
    ponder = jax.tree.map(lambda x, row=row: np.asarray(x[row]), out['ponder'])
    np.testing.assert_array_equal(ponder['steps'][:length], steps)
    np.testing.assert_allclose(ponder['cost'][:length], steps + rest, atol=1e-5)
    assert not ponder['steps'][length:].any()
    assert not ponder['cost'][length:].any()
    spent += steps.tolist()
  if model.rule.SCORED and model.inner_group == 1:
    assert len(set(spent)) > 2  # tokens that halt at different times


def test_padding_never_prolongs_the_loop():
  model, variables = small.build(dynamic=True)
  inputs = small.batch()
  _, out = jax.jit(model.apply)(variables, *inputs)
  longest = np.asarray(out['ponder']['steps']).max(1)
  encode = jax.jit(functools.partial(model.apply, method='encode'))
  for row in range(len(longest)):
    one = [array[row : row + 1] for array in inputs]
    assert int(encode(variables, *one).depth) == longest[row]
  with pytest.raises(ValueError, match='trace: expected None'):
    model.apply(variables, *inputs, method='encode', trace=lambda *_: None)


def test_gradient_of_the_score_equals_finite_differences():
  # The cost and the weights reach the score; N is constant under it.
  model, variables = small.build()
  inputs = small.batch((6,), 6)
  apply = jax.jit(model.apply)
  bias = variables['params']['score']['bias']

  def loss(shift):
    score = variables['params']['score'] | {'bias': bias + shift}
    params = variables['params'] | {'score': score}
    logits, out = apply({'params': params}, *inputs)
    value = (logits**2).sum() + out['ponder']['cost'].sum()
    return value, out['ponder']['steps']

  slope, steps = jax.grad(loss, has_aux=True)(0.0)
  (above, after), (below, before) = loss(0.01), loss(-0.01)
  np.testing.assert_array_equal(after, before)  # or the loss would jump
  np.testing.assert_array_equal(after, steps)
  np.testing.assert_allclose(slope, (above - below) / 0.02, rtol=0.02)


def test_pretraining_heads_equal_a_plain_loop():
  model, variables = small.build(AlbertPretraining)
  assert 'kernel' not in variables['params']['predictions']
  tokens, types, lengths = small.batch()
  places = jnp.array([[1, 8], [4, 0], [0, 0], [2, 3]])
  logits, out = jax.jit(model.apply)(variables, tokens, types, lengths, places)
  params = jax.tree.map(
    lambda x: np.asarray(x, np.float64), variables['params']
  )
  head = params['predictions']
  for row, length in enumerate(np.asarray(lengths)):
    state, *_ = small.encode_by_loop(
      params, np.asarray(tokens[row, :length]), np.asarray(types[row, :length]),
      model,
    )  # fmt: skip
    hidden = small.gelu_new(
      small.dense(head['hidden'], state[np.asarray(places[row])])
    )
    hidden = small.layer_norm(head['norm'], hidden, 1e-12)
    words = hidden @ params['embeddings']['word']['embedding'].T + head['bias']
    np.testing.assert_allclose(logits['words'][row], words, atol=1e-5)
    pooled = np.tanh(small.dense(params['pooler'], state[0]))
    np.testing.assert_allclose(out['features'][row], pooled, atol=1e-5)
    order = small.dense(params['sop'], pooled)
    np.testing.assert_allclose(logits['order'][row], order, atol=1e-5)


def test_sizes_of_the_paper():
  for name in published.SIZES.variants:
    AlbertClassifier(variant=name)
  for variant, iterations in (('tiny', 6), ('small', 12), ('base', 24)):
    model = AlbertClassifier(variant=variant)
    assert model.max_iterations == iterations
    shapes = jax.eval_shape(
      model.init, jax.random.key(0), *small.batch((5,), 5)
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(shapes)))
    # 11.7 M of ALBERT-base, a score of 769 and a head of 1,538.
    assert count == 11_683_584 + 769 + 1_538
