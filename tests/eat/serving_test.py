"""The gathered form gives what the masked form gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eat.chain import EatChain
from tests.eat import small
from train_lib.sharding import unbox

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
    (dict(exit_mean=True), 'pruned'),
    pytest.param(dict(merge=True), 'pruned', marks=pytest.mark.slow),
    pytest.param({}, 'unpruned', marks=pytest.mark.nightly),
    pytest.param(
      dict(window_implementation='block'), 'pruned', marks=pytest.mark.nightly
    ),
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


@pytest.mark.parametrize('runtime', ['xla', 'onnxruntime'])
def test_a_fresh_model_keeps_the_earlier_tokens_in_all_forms(runtime):
  # Its norms have no scale: the norms of all tokens are equal but for rounding.
  model, _ = small.build()
  texts = [row for row in small.rows(12, high=16) if len(row) > 5]
  inputs = small.batch(texts, 16)
  variables = unbox(model.init(jax.random.key(0), *inputs))
  _, out = jax.jit(model.apply)(variables, *inputs)
  kept = out['kept'][-1]
  for row, count in enumerate(kept):
    assert list(out['positions'][row, :count]) == list(range(count))
  chain = EatChain(model, variables)
  carry = chain.pad([small.item(row) for row in texts], 16, len(texts))
  for index in range(chain.num_stages):
    stage = jax.jit(chain.stage(index, 'pruned', 16))
    if runtime == 'onnxruntime':
      program = pytest.importorskip('serve_lib.onnx.program')
      given = jax.tree.map(np.asarray, [variables, carry])
      carry, found = program.build(stage, given)(given)
    else:
      carry, found = stage(variables, carry)
    np.testing.assert_allclose(found['logits'], out['exits'][index], atol=1e-5)
  np.testing.assert_array_equal(found['kept'], kept)
