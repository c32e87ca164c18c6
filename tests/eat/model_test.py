"""The masked form of EAT: BERT without its parts, Algorithm 1 with them."""

import dataclasses
import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eat.model import EatClassifier
from model_lib.bert import BertBlock, BertClassifier
from tests.eat import small

OFF = dict(prune_layers=(), prune_ratios=(), window=0, exit_layers=())


@pytest.mark.slow
def test_without_its_parts_it_is_bert_bit_for_bit():
  model, variables = small.build(**OFF)
  names = {field.name for field in dataclasses.fields(BertClassifier)}
  given = {k: v for k, v in small.FIELDS.items() if k in names}
  inputs = small.batch(small.rows(3), 20)
  trees, costs, logits = [], [], []
  for one in (BertClassifier(**given), model):
    shapes = jax.eval_shape(one.init, jax.random.key(0), *inputs)
    trees.append(jax.tree.structure(shapes['params']))
    apply = jax.jit(lambda *args, one=one: one.apply(*args)[0])
    program = apply.lower(variables, *inputs).compile()
    cost = program.cost_analysis()
    names = ('flops', 'transcendentals', 'bytes accessed')
    costs.append([cost[name] for name in names])
    logits.append(program(variables, *inputs))
  assert trees[0] == trees[1]
  assert costs[0] == costs[1]
  np.testing.assert_array_equal(*logits)


@jax.jit
def run_block(params, x):
  block = BertBlock(num_heads=2, mlp_dim=32, norm_epsilon=1e-12)
  return block.apply({'params': params}, x, jnp.ones(x.shape[:2], bool)).x


def reference(model, variables, text):
  """One row alone, tokens really removed, one block at a time, in Python."""
  params = variables['params']
  tokens, types, length = small.batch([text], len(text))
  x = model.apply(variables, tokens, types, length, method='embed').x
  positions = list(range(len(text)))
  full = np.zeros((len(text), model.width), np.float32)
  logits, kept = [], []
  heads = model.heads()
  for layer in range(1, model.depth + 1):
    x = run_block(params[f'block_{layer - 1}'], x)
    for place, position in enumerate(positions):
      full[position] = x[0, place]
    if layer in heads:
      logits.append(
        model.apply(variables, x[:, 0], layer, method='head_logits')[0]
      )
    if layer in model.prune_layers:
      ratio = model.prune_ratios[model.prune_layers.index(layer)]
      share = 1 - fractions.Fraction(ratio).limit_denominator(1000)
      count = math.ceil(share * (len(positions) - 1))
      norms = np.linalg.norm(np.asarray(x[0], np.float64), axis=-1)
      others = sorted(range(1, len(positions)), key=lambda i: -norms[i])
      chosen = [0, *sorted(others[:count])]
      x = x[:, np.array(chosen)]
      positions = [positions[place] for place in chosen]
      kept.append(len(positions))
  return np.array(logits), kept, positions, full


def test_masked_form_equals_removing_tokens_row_by_row():
  model, variables = small.build(window=0, restore=True)
  texts = small.rows(3)
  _, out = jax.jit(model.apply)(variables, *small.batch(texts, 24))
  assert out['tokens'].shape == (3, 24, 16)
  for index, text in enumerate(texts):
    logits, kept, positions, full = reference(model, variables, text)
    np.testing.assert_allclose(out['exits'][:, index], logits, atol=1e-4)
    np.testing.assert_array_equal(out['kept'][:, index], kept)
    left = int(out['length'][index])
    assert left < len(text)
    np.testing.assert_array_equal(out['positions'][index, :left], positions)
    # A removed token has the state of the layer after which it went.
    got = out['tokens'][index, : len(text)]
    np.testing.assert_allclose(got, full, atol=1e-4)


@pytest.mark.slow
def test_prune_scale_is_traced_and_zero_keeps_everything():
  model, variables = small.build()
  inputs = small.batch(small.rows(4), 20)

  @jax.jit
  def apply(scale):
    return model.apply(variables, *inputs, prune_scale=scale)[1]

  none, half, full = (apply(jnp.float32(scale)) for scale in (0.0, 0.5, 1.0))
  assert apply._cache_size() == 1
  np.testing.assert_array_equal(none['kept'][-1], inputs[2])
  assert (half['kept'] >= full['kept']).all()
  assert (half['kept'][-1] > full['kept'][-1]).any()
  off = dict(prune_layers=(), prune_ratios=())
  plain = EatClassifier(**(small.FIELDS | off))
  expected, _ = jax.jit(plain.apply)(variables, *inputs)
  np.testing.assert_allclose(none['exits'][-1], expected, atol=1e-6)
