"""ModernBERT against a plain loop in float64, and on rows with gaps."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import ConfigError
from model_lib.modern_bert import ModernBertBlock, ModernBertClassifier
from tests.model_lib import plain

FIELDS = dict(
  num_classes=3, width=24, depth=5, mlp_dim=20, num_heads=3, vocab_size=11,
  local_window=5, global_base=50.0, local_base=7.0,
)  # fmt: skip
BIASES = dict(
  norm_bias=True, attention_bias=True, mlp_bias=True, pooler_bias=True
)


def turned(x, base):
  """Rows `[N, L, H]`: pairs of features as complex numbers, turned."""
  first, second = np.split(x, 2, axis=-1)
  half = first.shape[-1]
  angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
  pairs = (first + 1j * second) * np.exp(1j * angles)
  return np.concatenate([pairs.real, pairs.imag], -1)


def logits_by_loop(model, params, tokens):
  """Logits of one row without padding."""

  def norm(params, name, x):
    return plain.layer_norm(params[name], x, model.norm_epsilon)

  params = plain.float64(params)
  x = params['embeddings']['word']['embedding'][tokens]
  x = norm(params['embeddings'], 'norm', x)
  place = np.arange(len(tokens))
  within = abs(place[:, None] - place) <= model.local_window // 2
  for layer in range(model.depth):
    block = params[f'block_{layer}']
    normed = norm(block, 'attention_norm', x) if layer else x
    is_local = layer % model.global_every
    base = model.local_base if is_local else model.global_base
    x = x + plain.attention_by_loop(
      block['attention'], normed, model.num_heads,
      near=within if is_local else None,
      turned=functools.partial(turned, base=base),
    )[0]  # fmt: skip
    x = x + plain.mlp(block['mlp'], norm(block, 'mlp_norm', x))
  states = norm(params, 'norm', x)
  pooled = states[0] if model.pooling == 'cls' else states.mean(0)
  hidden = plain.gelu(plain.dense(params['pooler']['dense'], pooled))
  return plain.dense(params['head'], norm(params['pooler'], 'norm', hidden))


@pytest.mark.parametrize(
  'changes',
  [
    {}, BIASES | dict(pooling='mean', global_every=2),
    dict(local_implementation='dense'), dict(local_window=1),
    dict(local_implementation='block', local_window=30),
  ],
  ids=str,
)  # fmt: skip
def test_logits_are_those_of_a_plain_loop(changes):
  model = ModernBertClassifier(**FIELDS | changes)
  length = np.array([9, 4, 1])
  tokens = np.random.default_rng(0).integers(1, 11, (3, 9))
  inputs = jnp.asarray(tokens), jnp.ones((3, 9), jnp.int32), jnp.asarray(length)
  params = plain.noise(model, *inputs)
  got, out = jax.jit(model.apply)({'params': params}, *inputs)
  assert out['features'].shape == (3, 24)
  for row, count in enumerate(length):
    want = logits_by_loop(model, params, tokens[row, :count])
    np.testing.assert_allclose(got[row], want, atol=1e-4)


@pytest.mark.parametrize(
  ('reach', 'form'), [(None, 'auto'), (3, 'dense'), (3, 'block'), (1, 'block')]
)
def test_a_row_with_gaps_keeps_its_distances(reach, form):
  """Tokens that are removed, and tokens that only are not read."""
  block = ModernBertBlock(
    num_heads=4, mlp_dim=24, base=9.0, reach=reach, local_implementation=form
  )
  x, kept = plain.normal(1, 12, 16), np.array([0, 2, 3, 7, 8, 11])
  every = jnp.arange(12)[None]
  params = plain.noise(block, x, positions=every)
  run = jax.jit(
    lambda x, mask, positions, **options: block.apply(
      {'params': params}, x, mask, positions=positions, **options
    ),
    static_argnames='num_queries',
  )
  mask = jnp.isin(every, kept)
  want = run(x, mask, every).x[:, kept]
  got = run(x[:, kept], mask[:, kept], every[:, kept])
  np.testing.assert_allclose(got.x, want, atol=1e-5)
  # The first query alone, and later the others with its keys and values.
  first = run(x[:, kept], mask[:, kept], every[:, kept], num_queries=1)
  np.testing.assert_allclose(first.x, want[:, :1], atol=1e-5)
  later = run(
    x[:, kept], mask[:, kept], every[:, kept], keys_values=first.keys_values
  )
  np.testing.assert_allclose(later.x, want, atol=1e-5)
  shifted = run(x[:, kept], mask[:, kept], jnp.arange(6)[None])
  assert np.abs(shifted.x - want).max() > 1e-3


def blocks_in_both_forms(form, reach=2, **fields):
  """A block, and arguments with gaps, padding, and garbage in the padding."""
  block = ModernBertBlock(
    num_heads=2, mlp_dim=24, base=9.0, reach=reach, local_implementation=form,
    **fields,
  )  # fmt: skip
  x, length = plain.normal(3, 13, 16), np.array([13, 6, 1])
  positions = jnp.cumsum(
    jnp.asarray([[1, 1, 2, 1, 3, 1, 1, 2, 1, 1, 4, 1, 1]]), 1
  )
  valid = jnp.arange(13)[None] < length[:, None]
  return block, x, valid, jnp.where(valid, positions, 7 * positions % 5)


@pytest.mark.parametrize('fields', [{}, dict(attention_dropout=0.4)], ids=str)
def test_both_forms_give_the_same_values_and_gradients(fields):
  results = []
  for form in ('dense', 'block'):
    block, x, valid, positions = blocks_in_both_forms(form, **fields)
    params = plain.noise(block, x, positions=positions)
    keys = jax.random.split(jax.random.key(0), 3) if fields else None

    def loss(params, x, keys, block=block, valid=valid, positions=positions):
      options = dict(positions=positions, received=True)
      out = block.apply({'params': params}, x, valid, keys, **options)
      plainly = block.apply({'params': params}, x, valid, positions=positions)
      states = jnp.where(valid[..., None], out.x * plainly.x, 0.0)
      return jnp.sin(states).sum() + jnp.square(out.received).sum()

    results.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x, keys))
  for one, other in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_blocks_need_no_square_array():
  block, *_ = blocks_in_both_forms('block', reach=8)
  x, positions = plain.normal(1, 512, 16), jnp.arange(512)[None]
  params = plain.noise(block, x, positions=positions)

  def total(params, x):
    out = block.apply({'params': params}, x, positions=positions)
    return jnp.square(out.x).sum()

  text = str(jax.make_jaxpr(jax.grad(total))(params, x))
  shapes = re.findall(r':[a-z]+\d*\[([\d,]+)\]', text)
  largest = max(math.prod(map(int, shape.split(','))) for shape in shapes)
  assert largest < 0.25 * 512**2


def test_flops_count_the_scores_of_blocks():
  fields = FIELDS | dict(local_window=8)
  block, dense = (
    ModernBertClassifier(**fields, local_implementation=form).flops((30,))
    for form in ('block', 'dense')
  )
  # Blocks 2, 3 and 5 of 5: 8 blocks of 4 queries and 12 keys, instead of 30^2.
  assert dense - block == 3 * 4 * 24 * (30**2 - 8 * 4 * 12)


def test_a_head_has_pairs_of_features():
  with pytest.raises(ConfigError, match='num_heads: expected heads of an even'):
    ModernBertClassifier(**FIELDS | dict(num_heads=8))
