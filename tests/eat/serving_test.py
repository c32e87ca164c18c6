"""The gathered form gives what the masked form gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eat import serving, window_attention
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


@pytest.mark.parametrize(
  ('changes', 'variant'),
  [
    ({}, 'pruned'),
    pytest.param(dict(merge=True), 'pruned', marks=pytest.mark.slow),
    pytest.param({}, 'unpruned', marks=pytest.mark.slow),
    *(
      pytest.param(changes, 'pruned', marks=pytest.mark.nightly)
      for changes in (
        dict(prune_scores='learned', merge=True),
        dict(prune_scores='attention', merge=True),
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


@pytest.mark.nightly
def test_the_forms_agree_at_a_real_size():
  # Window attention is in blocks at 256, and masked densely at 64.
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
  chain = serving.EatChain(model, variables, with_unpruned=False)
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
    want = masked[:, index : index + 1]
    _, alone = apply(variables, *small.batch([text], length))
    np.testing.assert_allclose(alone['exits'], want, atol=1e-4)
    alone, _ = chain_logits(chain, 'pruned', [text], length)
    np.testing.assert_allclose(alone, want, atol=1e-4)
