"""ACT instead of the reading's halting: the argument of AdaTape's A.4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.model import AdaTapeViT
from core.errors import ConfigError
from launch import command_line
from model_lib.layers import LayerNorm

FIELDS = dict(
  num_classes=3, variant='', depth=2, width=16, mlp_dim=16, num_heads=2,
  patch_size=4, bank='input', bank_patch_size=2, max_steps=4, query_dim=8,
  query_noise=0.0, bank_drop=0.0, read_mlp='', pool='gap',
)  # fmt: skip


def test_layer_norm_undoes_the_score():
  """Equation (5), and so a gradient by the score of almost nothing."""
  tokens = jax.random.normal(jax.random.key(0), (5, 16))
  norm = LayerNorm()
  variables = norm.init(jax.random.key(1), tokens)
  weights = jax.random.normal(jax.random.key(2), tokens.shape)

  def loss(score, norm):
    return (norm(score[:, None] * tokens) * weights).sum()

  given = jnp.linspace(0.3, 0.9, 5)
  normed = jax.grad(loss)(given, lambda x: norm.apply(variables, x))
  plain = jax.grad(loss)(given, lambda x: x)
  assert np.abs(normed).max() < 1e-3 * np.abs(plain).max()


@pytest.mark.parametrize('bias', [-4.0, -0.5, 0.0, 6.0])
def test_tokens_have_the_weights_of_act(bias):
  model = AdaTapeViT(**FIELDS, act=True, fixed_length=True)
  images = jax.random.normal(jax.random.key(0), (3, 8, 8, 3))
  variables = model.init(jax.random.key(1), images)
  halt = variables['params']['encoder']['halt']
  halt['bias'] = jnp.full_like(getattr(halt['bias'], 'value', 0.0), bias)
  _, tape, _ = model.apply(variables, images, method='read')
  plain = AdaTapeViT(**FIELDS, fixed_length=True)
  _, whole, _ = plain.apply(variables, images, method='read')
  kernel = np.asarray(getattr(halt['kernel'], 'value', halt['kernel']))
  for row in range(3):
    scores = 1 / (1 + np.exp(-(whole.tokens[row] @ kernel)[:, 0] - bias))
    total, weights = 0.0, []
    for step, score in enumerate(scores):
      if total + score >= 0.99 or step == 3:
        weights.append(1 - total)
        break
      weights.append(score)
      total += score
    assert tape.length[row] == len(weights) == tape.mask[row].sum()
    weights += [0.0] * (4 - len(weights))
    expected = np.array(weights)[:, None] * whole.tokens[row]
    np.testing.assert_allclose(tape.tokens[row], expected, atol=1e-5)


def test_the_ablation_of_a_configuration():
  file = 'configs/adatape/photographs.py:root=/x,model=input,ablation=act'
  config = command_line.load_config(file, ())
  assert (config.model.act, config.model.read_mlp) == (True, '')
  assert (config.model.fixed_length, config.loss.tape_weight) == (True, 0.0)
  with pytest.raises(ConfigError, match='act: expected fixed_length=True'):
    AdaTapeViT(**FIELDS, act=True)
