"""The masked form of EAT: BERT without its parts, Algorithm 1; its FLOPs."""

import dataclasses
import fractions
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from eat.chain import EatChain
from eat.model import EatClassifier, EatModernBert
from model_lib import flops
from model_lib.bert import BertBlock, BertClassifier
from model_lib.modern_bert import ModernBertBlock
from tests.eat import small
from tests.model_lib import plain

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
def run_bert(params, x, positions):
  block = BertBlock(num_heads=2, mlp_dim=32, norm_epsilon=1e-12)
  return block.apply({'params': params}, x, jnp.ones(x.shape[:2], bool)).x


@functools.partial(jax.jit, static_argnums=3)
def run_modern(params, x, positions, layer):
  kind = dict(base=20.0, reach=3) if layer in (2, 3) else dict(base=90.0)
  block = ModernBertBlock(
    num_heads=2, mlp_dim=32, is_first=layer == 1, **kind
  )  # fmt: skip
  mask = jnp.ones(x.shape[:2], bool)
  return block.apply({'params': params}, x, mask, positions=positions).x


def reference(model, variables, text):
  """One row alone, tokens really removed, one block at a time, in Python."""
  params = variables['params']
  tokens, types, length = small.batch([text], len(text))
  x = model.apply(variables, tokens, types, length, method='embed').x
  positions = list(range(len(text)))
  full = np.zeros((len(text), model.width), np.float32)
  logits, kept = [], []
  heads, is_modern = model.heads(), isinstance(model, EatModernBert)

  def states(x):
    x = np.asarray(x)
    if not is_modern:
      return x
    norm = {'scale': np.asarray(params['norm']['scale']), 'bias': 0.0}
    return plain.layer_norm(norm, x, model.norm_epsilon)

  for layer in range(1, model.depth + 1):
    mean = states(x).mean(1) if model.exit_mean and layer < model.depth else 0.0
    places = jnp.array(positions)[None]
    given = params[f'block_{layer - 1}'], x, places
    x = run_modern(*given, layer) if is_modern else run_bert(*given)
    for place, position in enumerate(positions):
      full[position] = x[0, place]
    if layer in heads:
      read = jnp.asarray(states(x)[:, 0] + mean, jnp.float32)
      logits.append(
        model.apply(variables, read, layer, method='head_logits')[0]
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


@pytest.mark.parametrize('encoder', ['bert', 'modern'])
@pytest.mark.parametrize('exit_mean', [False, True])
def test_masked_form_equals_removing_tokens_row_by_row(exit_mean, encoder):
  changes = dict(restore=True, exit_mean=exit_mean)
  if encoder == 'bert':
    model, variables = small.build(window=0, **changes)
  else:
    model, variables = small.build_modern(**changes)
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


def test_stage_flops_add_up():
  model, _ = small.build(window=0)
  sizes = model.static_sizes(24)
  whole = model.stage_flops(24, sizes, count_cls=False)
  assert np.isclose(sum(whole), model.flops((24,)))
  short = model.stage_flops(24, sizes, count_cls=True)
  # All that is done twice is [CLS] at two heads; at the last, others are not.
  last = flops.block(sizes[1], 16, 32) - flops.cls_block(sizes[1], 16, 32)
  twice = [flops.cls_block(n, 16, 32) - 4 * n * 16 * 16 for n in (24, 18)]
  assert np.isclose(sum(short), sum(whole) - last + sum(twice))


@pytest.mark.parametrize(
  ('tokens', 'changes'),
  [
    (24, dict(window=0)),
    *(
      pytest.param(tokens, changes, marks=pytest.mark.nightly)
      for tokens, changes in (
        (256, dict(window=0)),
        (256, dict(window=32)),
        (200, dict(window=32, prune_layers=(), prune_ratios=())),
        (256, dict(window=128, window_implementation='block')),
        (256, dict(window=32, window_implementation='dense')),
      )
    ),
  ],
)
def test_stages_cost_what_the_formula_says(tokens, changes):
  """By the compiler's count: no keys and values are computed twice."""
  wide = dict(width=384, mlp_dim=1536, num_heads=12, max_positions=256)
  model = EatClassifier(**(small.FIELDS | wide | changes))
  row, length = jnp.zeros((1, tokens), jnp.int32), jnp.full(1, tokens)
  variables = nn.unbox(
    jax.eval_shape(model.init, jax.random.key(0), row, row, length)
  )
  chain = EatChain(model, variables)
  carry = chain.pad([], tokens, 1)
  sizes = chain.sizes('pruned', tokens)
  expected = model.stage_flops(tokens, sizes, True)
  for index in range(chain.num_stages):
    stage = jax.jit(chain.stage(index, 'pruned', tokens))
    lowered = stage.lower(variables, carry)
    got = lowered.cost_analysis()['flops']
    assert expected[index] == pytest.approx(got, rel=0.02), index
    carry = lowered.out_info[0]
