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
from serve_lib.chain import Encoded
from serve_lib.engine import Engine
from tests.eat import small

LENGTHS = (16, 24)


def inputs_of(row):
  types = (np.arange(len(row)) >= len(row) // 2).astype(np.int32)
  return {'tokens': row, 'token_types': types}


def chain_logits(chain, variant, texts, length):
  """All heads' logits `[E, B, O]` of rows that never leave, and kept."""
  carry = chain.pad([inputs_of(row) for row in texts], length, len(texts) + 1)
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


class RulePolicy:
  """Exits by a rule; the answer is (head, logits)."""

  def __init__(self, rule):
    self.rule = rule

  def encode(self, item):
    return Encoded(inputs_of(item), len(item), 'pruned')

  def decide(self, stage, rows, outputs):
    logits = [
      np.stack([row.outputs[head]['logits'] for row in rows])
      for head in range(stage + 1)
    ]
    return exits.should_exit(self.rule, np.stack(logits))

  def answer(self, row):
    return len(row.outputs) - 1, row.outputs[-1]['logits']


def compare_at_real_size():
  """Compares masked, gathered and engine, alone and in batches.

  Window attention is in blocks at 256, and masked densely at 64.
  """
  assert '--xla_backend_optimization_level=3' in os.environ['XLA_FLAGS']
  model, variables = small.build(
    width=384, depth=4, mlp_dim=768, num_heads=12, max_positions=256,
    prune_layers=(1, 3), exit_layers=(3,), window=32,
  )  # fmt: skip
  assert 64 < window_attention.BLOCK_FROM <= 256
  # The weights of `small` would saturate a model of this width.
  variables = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf * (0.2 if 'kernel' in str(path) else 1.0),
    variables,
  )
  chain = serving.EatChain(model, variables, with_full=False)
  assert chain.sizes('pruned', 256)[0] >= window_attention.BLOCK_FROM
  texts = small.rows(6, low=20, high=256)
  texts[0], texts[1] = texts[0][:64], texts[1][:20]
  apply = jax.jit(model.apply)
  masked = np.asarray(apply(variables, *small.batch(texts, 256))[1]['exits'])
  assert np.abs(masked).max() > 0.5
  assert np.ptp(masked, axis=1).min() > 0.01  # rows differ
  gathered, kept = chain_logits(chain, 'pruned', texts, 256)
  np.testing.assert_allclose(gathered, masked, atol=1e-4)
  assert (kept < [len(text) for text in texts]).all()  # pruned
  for index, text in enumerate(texts):
    length = 64 if len(text) <= 64 else 256
    _, alone = apply(variables, *small.batch([text], length))
    np.testing.assert_allclose(
      alone['exits'][:, 0], masked[:, index], atol=1e-4
    )
  tau = float(np.median(exits.probabilities(masked, [1.0] * 2)[0].max(-1)))
  rule = Rule('confidence', tau=tau)
  heads = exits.first_exit(rule, masked)
  assert set(heads.tolist()) == {0, 1}
  with Engine(chain, RulePolicy(rule), (64, 256), (1, 4)) as engine:
    alone = [engine.predict([text])[0] for text in texts]
    for answers in (engine.predict(texts), alone):
      for index, (head, logits) in enumerate(answers):
        assert head == heads[index]
        np.testing.assert_allclose(logits, masked[head, index], atol=1e-4)


@pytest.mark.nightly
def test_the_forms_agree_at_a_real_size_and_optimised(repository):
  """The suite compiles at level 0, and its model is 16 wide."""
  flags = '--xla_backend_optimization_level=3'
  program = 'from tests.eat import serving_test as t; t.compare_at_real_size()'
  done = subprocess.run(
    [sys.executable, '-c', program],
    cwd=repository,
    env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
