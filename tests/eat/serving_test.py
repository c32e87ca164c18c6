"""The gathered form and the engine give what the masked form gives."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eat import exits, serving, window_attention
from eat.exits import Rule
from serve_lib.engine import Engine
from tests.eat import small
from tests.eat.rule_policy import RulePolicy, types_of

LENGTHS = (16, 24)


def chain_logits(chain, variant, texts, length):
  """All heads' logits `[E, B, O]` of rows that never leave, and kept."""
  padded = [{'tokens': row, 'token_types': types_of(row)} for row in texts]
  carry = chain.pad(padded, length, len(texts) + 1)
  logits = []
  for index in range(chain.num_stages):
    stage = jax.jit(chain.stage(index, variant, length))
    carry, outputs = stage(chain.variables, carry)
    logits.append(outputs['logits'][: len(texts)])
  return np.stack(logits), np.asarray(outputs['kept'][: len(texts)])


@pytest.mark.parametrize(
  ('changes', 'variant'),
  [
    ({}, 'pruned'),
    pytest.param({}, 'full', marks=pytest.mark.slow),
    *(
      pytest.param(changes, 'pruned', marks=pytest.mark.nightly)
      for changes in (
        dict(prune_scores='learned', merge=True),
        dict(prune_scores='attention', window=0),
        dict(prune_layers=(2, 3), exit_layers=(1, 2, 3, 4), min_tokens=4),
        dict(exit_layers=()),
      )
    ),
  ],
)
def test_gathered_form_equals_masked_form(changes, variant):
  model, variables = small.build(**changes)
  chain = serving.EatChain(model, variables)
  texts = small.rows(8, high=16)
  scale = jnp.float32(variant == 'pruned')
  _, out = jax.jit(model.apply)(
    variables, *small.batch(texts, 40), prune_scale=scale
  )
  full = [len(text) for text in texts]
  for length in LENGTHS:
    logits, kept = chain_logits(chain, variant, texts, length)
    np.testing.assert_allclose(logits, out['exits'], atol=1e-5)
    want = out['kept'][-1] if variant == 'pruned' else full
    np.testing.assert_array_equal(kept, want)


def test_shapes_really_shrink():
  model, variables = small.build(window=0)
  chain = serving.EatChain(model, variables)
  assert chain.sizes('pruned', 24) == (18, 13)
  tokens = serving.Tokens(
    np.zeros((2, 18, 16), np.float32),
    np.ones(2, np.int32),
    np.zeros((2, 18), np.int32),
  )
  keys = values = np.zeros((2, 2, 18, 8), np.float32)
  stage = jax.jit(chain.stage(2, 'pruned', 24))
  text = stage.lower(chain.variables, (tokens, (keys, values))).as_text()
  assert 'tensor<2x13x16xf32>' in text


@pytest.mark.nightly
def test_a_row_is_the_same_where_its_bucket_changes_the_computation():
  """Window attention is in blocks at 256, and masked densely at 128."""
  model, variables = small.build(
    window=32, max_positions=256, depth=3, prune_layers=(1, 2), exit_layers=(2,)
  )
  assert 128 < window_attention.BLOCK_FROM <= 256
  chain = serving.EatChain(model, variables)
  chain.variants = ('pruned',)
  assert chain.sizes('pruned', 256)[0] >= window_attention.BLOCK_FROM
  texts = small.rows(4, low=90, high=110)
  apply = jax.jit(model.apply)
  alone = np.concatenate(
    [apply(variables, *small.batch([text], 128))[1]['exits'] for text in texts],
    axis=1,
  )
  assert np.ptp(alone, axis=1).min() > 0.01  # rows differ
  for length in (128, 256):
    _, out = apply(variables, *small.batch(texts, length))
    np.testing.assert_allclose(out['exits'], alone, atol=1e-4)
    gathered, kept = chain_logits(chain, 'pruned', texts, length)
    np.testing.assert_allclose(gathered, alone, atol=1e-5)
    np.testing.assert_array_equal(kept, out['kept'][-1])
    assert (kept < [len(text) for text in texts]).all()  # pruned
  first = exits.probabilities(alone, [1.0] * 2)[0].max(-1)
  rule = Rule('confidence', tau=float(np.median(first)))
  heads = exits.first_exit(rule, alone)
  assert set(heads.tolist()) == {0, 1}
  with Engine(chain, RulePolicy(rule), (256,), (4,)) as engine:
    answers = engine.predict(texts) + engine.predict(texts[:1])
  for index, (head, logits) in enumerate(answers):
    assert head == heads[index % 4]
    np.testing.assert_allclose(logits, alone[head, index % 4], atol=1e-4)


REAL_SIZE = """
from tests.eat import serving_test
serving_test.compare_at_real_size()
"""


def compare_at_real_size():
  """Compares masked, gathered and engine, alone and in batches."""
  assert '--xla_backend_optimization_level=3' in os.environ['XLA_FLAGS']
  model, variables = small.build(
    width=384, depth=6, mlp_dim=1536, num_heads=12, max_positions=128,
    prune_layers=(2, 4), exit_layers=(4,), window=32,
  )  # fmt: skip
  variables = scaled(variables, 0.2)
  chain = serving.EatChain(model, variables)
  texts = small.rows(8, low=20, high=128)
  texts[0], texts[1] = texts[0][:32], texts[1][:20]
  apply = jax.jit(model.apply)
  _, out = apply(variables, *small.batch(texts, 128))
  masked = np.asarray(out['exits'])
  assert np.abs(masked).max() > 0.5
  assert np.ptp(masked, axis=1).min() > 0.01  # rows differ
  gathered, _ = chain_logits(chain, 'pruned', texts, 128)
  np.testing.assert_allclose(gathered, masked, atol=1e-4)
  for index, text in enumerate(texts):
    length = 32 if len(text) <= 32 else 128
    _, alone = apply(variables, *small.batch([text], length))
    np.testing.assert_allclose(
      alone['exits'][:, 0], masked[:, index], atol=1e-4
    )
  for index in (0, 1, 2):  # each compiles
    length = 128 if index == 2 else 32
    alone, _ = chain_logits(chain, 'pruned', [texts[index]], length)
    np.testing.assert_allclose(alone[:, 0], masked[:, index], atol=1e-4)
  tau = float(np.median(exits.probabilities(masked, [1.0] * 2)[0].max(-1)))
  rule = Rule('confidence', tau=tau)
  heads = exits.first_exit(rule, masked)
  chain.variants = ('pruned',)
  with Engine(chain, RulePolicy(rule), (32, 128), (1, 8)) as engine:
    for answers in (
      engine.predict(texts),
      [engine.predict([text])[0] for text in texts],
    ):
      for index, (head, logits) in enumerate(answers):
        assert head == heads[index]
        expected = masked[head, index]
        np.testing.assert_allclose(logits, expected, atol=1e-4)


def scaled(variables, factor):
  """Smaller weights: those of `small` would saturate a model of this width."""

  def leaf(path, value):
    is_kernel = 'kernel' in jax.tree_util.keystr(path)
    return value * factor if is_kernel else value

  return jax.tree_util.tree_map_with_path(leaf, variables)


@pytest.mark.nightly
def test_the_forms_agree_at_a_real_size_and_optimised(repository):
  """The suite compiles at level 0, and its model is 16 wide."""
  flags = '--xla_backend_optimization_level=3'
  done = subprocess.run(
    [sys.executable, '-c', REAL_SIZE],
    cwd=repository,
    env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
