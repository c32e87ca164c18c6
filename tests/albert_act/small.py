"""A small ALBERT with random parameters, and the same once more as a loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from scipy.special import expit

from albert_act.model import AlbertClassifier, AlbertPretraining
from halting.token_rules import Fixed, PonderNet
from tests.eat import small
from tests.halting.plain import act
from tests.model_lib.plain import (
  block_by_loop,
  dense,
  float64,
  gelu_new,
  layer_norm,
)

# Rows leave in different steps.
PONDER = PonderNet(epsilon=0.75)
FIELDS = dict(
  width=16, embedding_width=8, max_iterations=6, mlp_dim=24, num_heads=4,
  vocab_size=40, max_positions=24,
)  # fmt: skip


@functools.cache
def build(kind=AlbertClassifier, **changes):
  """(model, variables); every array is random, so that tokens differ."""
  model = kind(**(FIELDS | {'num_classes': 3} | changes))
  rows = jnp.zeros((1, 5), jnp.int32)
  inputs = [rows, rows, jnp.full((1,), 5, jnp.int32)]
  if kind is AlbertPretraining:
    inputs.append(rows[:, :2])
  shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
  variables = randomised(nn.unbox(shapes))
  if model.rule.SCORED:
    variables['params']['score'] = spread_score(model, variables)
  return model, variables


def spread_score(model, variables, inputs=None, center=-1.5):
  """A score that tokens of `inputs` differ in: at first `center`, +- 2."""
  params = {k: v for k, v in variables['params'].items() if k != 'score'}
  first = dataclasses.replace(
    model, rule=Fixed(), max_iterations=model.num_groups, remat_chunk=0
  )

  @jax.jit
  def states_after_one(params, inputs):
    return first.apply(
      {'params': params}, *inputs, method='encode',
      trace=lambda visit: visit.after,
    ).trace[0]  # fmt: skip

  states = states_after_one(params, inputs or batch())
  states = states.reshape(-1, model.width)
  kernel = variables['params']['score']['kernel']
  logits = states @ kernel
  kernel = 2.0 * kernel / logits.std()
  return {'kernel': kernel, 'bias': center - (states @ kernel).mean(0)}


randomised = functools.partial(small.randomised, seed=3, scale=0.4)


def batch(lengths=(9, 5, 1, 7), length=9, seed=0, vocab_size=40):
  """(tokens, token types, lengths) of random rows, padded with other ids."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(1, vocab_size, (len(lengths), length))
  types = np.arange(length)[None] >= np.array(lengths)[:, None] // 2
  return (
    jnp.asarray(tokens, jnp.int32),
    jnp.asarray(types, jnp.int32),
    jnp.asarray(lengths, jnp.int32),
  )


def embed_by_loop(params, tokens, types):
  tables = params['embeddings']
  x = tables['word']['embedding'][tokens]
  x = x + tables['token_type']['embedding'][types]
  x = x + tables['position']['embedding'][: len(tokens)]
  return dense(params['projection'], layer_norm(tables['norm'], x, 1e-12))


def encode_by_loop(params, tokens, types, model):
  """One row without padding in float64: states, N, R, states by iteration."""
  if isinstance(model.rule, PonderNet):
    state, steps, _, history = ponder_net_by_loop(params, tokens, types, model)
    return state, np.full(len(tokens), steps), np.zeros(len(tokens)), history
  params, limit = float64(params), model.max_iterations

  def step(state, n, running):
    group = int(n / (limit / model.num_groups))
    for inner in range(model.inner_group):
      block = params[f'block_{group * model.inner_group + inner}']
      state, _ = block_by_loop(block, state, 4, 1e-12, gelu_new)
    if not model.rule.SCORED:
      return state, np.zeros(len(state))
    return state, expit(dense(params['score'], state)[:, 0])

  first, weighs = embed_by_loop(params, tokens, types), model.rule.MIXES
  _, steps, rest, history = act(step, first, limit, 'fed_back', weighs)
  return history[-1], steps, rest, [first, *history]


def ponder_net_by_loop(params, tokens, types, model):
  """One row: states at the quantile, its number, p, states by iteration."""
  fixed = dataclasses.replace(model, rule=Fixed())
  *_, history = encode_by_loop(params, tokens, types, fixed)
  logits = dense(float64(params)['score'], np.stack(history[1:])[:, 0])[:, 0]
  left, p = 1.0, []
  for chance in [*expit(logits[:-1]), 1.0]:
    p.append(left * chance)
    left *= 1.0 - chance
  halted = np.cumsum(p)
  assert np.abs(halted - (1.0 - model.rule.epsilon)).min() > 1e-4
  steps = int((halted >= 1.0 - model.rule.epsilon).argmax()) + 1
  return history[steps], steps, np.array(p), history


def classify_by_loop(params, state):
  params = float64(params)
  return dense(params['head'], np.tanh(dense(params['pooler'], state[0])))
