"""ViT and the plain Transformer: fields, features, tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from model_lib import vit

TINY = {'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 4}
IMAGES = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))


def image_model(**fields):
  return vit.ViT(num_classes=3, patch_size=4, **(TINY | fields))


@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_logits_are_the_head_of_the_features(pool):
  model = image_model(pool=pool)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(1), IMAGES))
  logits, out = jax.jit(model.apply)(variables, IMAGES)
  head = jax.tree.map(np.asarray, variables['params']['head'])
  want = np.asarray(out['features']) @ head['kernel'] + head['bias']
  np.testing.assert_allclose(logits, want, atol=1e-5)
  assert float(jnp.abs(logits).max()) > 0


def test_tokens_have_positions_and_a_class_token():
  tokens = jnp.array([[0, 1, 2, 0], [0, 2, 1, 0], [0, 1, 3, 2]])
  model = vit.TokenTransformer(num_classes=2, **TINY)
  variables = jax.jit(model.init)(jax.random.key(0), tokens)
  logits, out = jax.jit(model.apply)(variables, tokens)
  assert out['features'].shape == (3, 16)
  assert float(jnp.abs(logits[0] - logits[1]).max()) > 1e-6
  # A symbol outside the vocabulary is NaN.
  assert np.isnan(logits).all(1).tolist() == [False, False, True]
  cls = nn.unbox(variables)['params']['tokens']['cls']
  assert cls.shape == (1, 1, 16)
  assert 0.005 < float(cls.std()) < 0.05
