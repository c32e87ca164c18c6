"""The Universal Transformer against a plain loop, and its invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape import universal
from tests.adatape import plain_vit
from tests.model_lib import plain

SIZES = {'num_classes': 2, 'width': 16, 'mlp_dim': 32, 'num_heads': 4}
TOKENS = np.random.default_rng(0).integers(0, 3, size=(4, 6)).astype(np.int32)
ON_DEVICE = jnp.asarray(TOKENS)
LENGTHS = np.array([6, 3, 5, 1])
MASK = np.arange(6)[None] < LENGTHS[:, None]


def token_model(**fields):
  fields = {'max_steps': 5, **SIZES, **fields}
  return universal.UniversalTransformer(**fields)


VARIABLES = plain_vit.spread(token_model(), ON_DEVICE)


def run(model, tokens, row_keys=None, mask=None):
  return jax.jit(model.apply)(VARIABLES, jnp.asarray(tokens), row_keys, mask)


def loop(tokens, length, model):
  """One row, its padding cut off, in NumPy."""
  params = plain.float64(VARIABLES['params'])
  step = params['encoder']['step']
  embedding = params['tokens']['embedding'][tokens[:length]]
  state = np.concatenate([params['tokens']['cls'][0], embedding])
  blocks = [step['block']] * model.max_steps
  output, steps, remainder = plain_vit.act(state, blocks, step['score'], model)
  normed = plain.layer_norm(params['encoder']['norm'], output[0])
  logits = plain.dense(params['head'], normed)
  return logits, steps.mean(), (steps + remainder).mean(), steps.max()


@pytest.mark.parametrize('halting', ['token', 'example'])
@pytest.mark.parametrize('combination', ['accumulated', 'basic'])
def test_equals_plain_loop(halting, combination):
  model = token_model(halting=halting, combination=combination)
  logits, out = run(model, TOKENS, None, jnp.asarray(MASK))
  looped = run(model.clone(dynamic=True), TOKENS, None, jnp.asarray(MASK))
  np.testing.assert_allclose(logits, looped[0], atol=1e-6)
  jax.tree.map(
    np.testing.assert_array_equal, out['ponder'], looped[1]['ponder']
  )
  for row, length in enumerate(LENGTHS):
    want, steps, cost, depth = loop(TOKENS[row], length, model)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)
    np.testing.assert_allclose(out['ponder']['steps'][row], steps, atol=1e-5)
    np.testing.assert_allclose(out['ponder']['cost'][row], cost, atol=1e-4)
    assert int(out['ponder']['depth'][row]) == depth
  # The case has early and late tokens, or it would prove little.
  if halting == 'token':
    assert out['ponder']['steps'].min() < 4.5
    assert out['ponder']['depth'].max() == 5
