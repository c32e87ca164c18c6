"""The gathered form gives what the masked form gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eat.chain import EatChain
from tests.eat import small

LENGTHS = (16, 24)


def chain_logits(chain, variant, texts, length):
  """All heads' logits `[E, B, O]` of rows that never leave, and kept."""
  carry = chain.pad([small.item(row) for row in texts], length, len(texts) + 1)
  logits = []
  for index in range(chain.num_stages):
    stage = jax.jit(chain.stage(index, variant, length))
    carry, outputs = stage(chain.variables, carry)
    logits.append(outputs['logits'][: len(texts)])
  return np.stack(logits), np.asarray(outputs['kept'][: len(texts)])


NIGHTLY = [
  ({}, 'unpruned'),
  *((changes, 'pruned') for changes in (
    dict(window_implementation='block'),
    dict(prune_scores='learned', merge=True),
    dict(prune_scores='attention', merge=True),
    dict(prune_scores='attention', window=0),
    dict(prune_layers=(2, 3), exit_layers=(1, 2, 3, 4), min_tokens=4),
    dict(exit_layers=()),
  )),
]  # fmt: skip


@pytest.mark.parametrize(
  ('changes', 'variant'),
  [
    (dict(exit_mean=True), 'pruned'),
    (dict(build='build_modern'), 'pruned'),
    pytest.param(
      dict(build='build_modern', pooling='mean', exit_mean=True),
      'pruned',
      marks=pytest.mark.slow,
    ),
    pytest.param(dict(merge=True), 'pruned', marks=pytest.mark.slow),
    *(pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY),
  ],
)
def test_gathered_form_equals_masked_form(changes, variant):
  changes = dict(changes)
  build = getattr(small, changes.pop('build', 'build'))
  model, variables = build(**changes)
  chain = EatChain(model, variables)
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
