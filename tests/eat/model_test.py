"""The masked form of EAT: BERT without its parts, Algorithm 1 with them."""

import dataclasses
import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib import fields
from dataset_lib.errors import ConfigError
from eat.model import EatClassifier
from model_lib.bert import BertClassifier
from model_lib.bert_layers import BertBlock
from tests.eat import small

OFF = dict(prune_layers=(), prune_ratios=(), window=0, exit_layers=())


@pytest.mark.slow
def test_without_its_parts_it_is_bert_bit_for_bit():
  model, variables = small.build(**OFF)
  given = {
    name: value
    for name, value in small.FIELDS.items()
    if name in {field.name for field in dataclasses.fields(BertClassifier)}
  }
  bert = BertClassifier(**given)
  inputs = small.batch(small.rows(3), 20)
  expected = jax.eval_shape(bert.init, jax.random.key(0), *inputs)
  assert jax.tree.structure(expected['params']) == jax.tree.structure(
    jax.eval_shape(model.init, jax.random.key(0), *inputs)['params']
  )
  programs = [
    jax.jit(lambda v, *i, m=m: m.apply(v, *i)[0])
    .lower(variables, *inputs)
    .compile()
    for m in (bert, model)
  ]
  ours, theirs = (program.cost_analysis() for program in programs)
  for name in ('flops', 'transcendentals', 'bytes accessed'):
    assert ours[name] == theirs[name]
  ours, theirs = (program(variables, *inputs) for program in programs)
  np.testing.assert_array_equal(ours, theirs)


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


@pytest.mark.parametrize(
  ('scores', 'merge'),
  [
    ('norm', True),
    ('attention', False),
    pytest.param('norm', False, marks=pytest.mark.nightly),
    pytest.param('attention', True, marks=pytest.mark.nightly),
    pytest.param('learned', False, marks=pytest.mark.nightly),
    pytest.param('learned', True, marks=pytest.mark.slow),
  ],
)
def test_a_row_does_not_depend_on_batch_or_padding(scores, merge):
  model, variables = small.build(prune_scores=scores, merge=merge)
  texts = small.rows(6, high=16)
  apply = jax.jit(model.apply)
  together, _ = apply(variables, *small.batch(texts, 24))
  for index, text in enumerate(texts):
    alone, _ = apply(variables, *small.batch([text], 16))
    np.testing.assert_allclose(together[index], alone[0], atol=1e-5)


@pytest.mark.slow
def test_prune_scale_is_traced_and_zero_keeps_everything():
  model, variables = small.build()
  inputs = small.batch(small.rows(4), 20)
  traces = []

  @jax.jit
  def apply(scale):
    traces.append(1)
    return model.apply(variables, *inputs, prune_scale=scale)

  _, none = apply(jnp.float32(0.0))
  _, half = apply(jnp.float32(0.5))
  _, full = apply(jnp.float32(1.0))
  assert len(traces) == 1
  np.testing.assert_array_equal(none['kept'][-1], inputs[2])
  assert (half['kept'] >= full['kept']).all()
  assert (half['kept'][-1] > full['kept'][-1]).any()
  plain = EatClassifier(
    **(small.FIELDS | dict(prune_layers=(), prune_ratios=()))
  )
  expected, _ = jax.jit(plain.apply)(variables, *inputs)
  np.testing.assert_allclose(none['exits'][-1], expected, atol=1e-6)


CONTRADICTING = [
  ('prune_layers', (4, 2)), ('prune_layers', (2, 4)), ('prune_ratios', (0.3,)),
  ('exit_layers', (0,)), ('exit_layers', (5,)), ('num_heads', 3),
]  # fmt: skip
ILLEGAL = [
  ('prune_ratios', (0.3, 1.0)), ('prune_scores', 'size'), ('window', 7),
  ('window', -2), ('window_implementation', 'blok'), ('min_tokens', 0),
  ('pooler_activation', 'foo'),
]  # fmt: skip


@pytest.mark.parametrize(('field', 'value'), CONTRADICTING)
def test_contradicting_fields_are_named_at_construction(field, value):
  with pytest.raises(ValueError, match=f'^{field}: expected'):
    EatClassifier(**(small.FIELDS | {field: value}))


@pytest.mark.parametrize(('field', 'value'), ILLEGAL)
def test_annotations_declare_the_legal_values(field, value):
  given = small.FIELDS | {field: value}
  with pytest.raises(ConfigError, match=f'^model.{field}: expected'):
    fields.check(EatClassifier, given, 'model', without=('dtype',))


def test_flops_count_the_tokens_that_are_left():
  model, _ = small.build(window=0)
  dense = EatClassifier(**(small.FIELDS | OFF))
  ratio = dense.flops((20,)) / model.flops((20,))
  # 20, 15, 15, 11 tokens (1 + ceil(.7 * 19) = 15, 1 + ceil(.7 * 14) = 11).
  assert 80 / 61 < ratio < 1.4
