"""ViT-3FFN: tokens split by position, in NumPy; counts of Table 7."""

import jax
import jax.numpy as jnp
import numpy as np

from adatape.vit_3ffn import ViT3FFN
from tests.adatape import plain_vit
from tests.adatape.plain_vit import IMAGES, SIZES
from tests.model_lib import plain


def loop(params, image):
  """Logits of one image."""
  params = plain.float64(params)
  x = plain_vit.tokens(params['tokens'], image, 4)
  # [CLS], patches 1-8 and 9-16 of a 4 x 4 grid: its upper and lower half.
  ends = enumerate(((0, 1), (1, 9), (9, 17)))
  networks = {f'mlp_{group}': slice(*end) for group, end in ends}
  for index in range(SIZES['depth']):
    block = params['encoder'][f'block_{index}']
    assert 'mlp' not in block
    x = plain_vit.block(block, x, SIZES['num_heads'], networks)
  features = plain.layer_norm(params['encoder']['norm'], x)[0]
  return plain.dense(params['head'], features)


def test_equals_a_loop_over_tokens():
  model = ViT3FFN(**SIZES)
  params = plain.noise(model, IMAGES)
  own = params['encoder']['block_3']['mlp_0']
  assert own['gated']['kernel'].shape == (16, 12)
  logits, _ = jax.jit(model.apply)({'params': params}, IMAGES)
  for row, image in enumerate(IMAGES):
    want = loop(params, image)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)


def test_an_odd_patch_belongs_to_the_first_half():
  model = ViT3FFN(**(SIZES | dict(depth=1)))
  images = IMAGES[:, :12, :12]  # 9 patches
  variables = {'params': plain.noise(model, images)}

  def states(bias):
    block = variables['params']['encoder']['block_0']
    block = block | {'mlp_2': jax.tree.map(jnp.copy, block['mlp_2'])}
    block['mlp_2']['out']['bias'] += bias
    encoder = variables['params']['encoder'] | {'block_0': block}
    params = variables['params'] | {'encoder': encoder}
    return model.apply({'params': params}, images, capture_intermediates=True)[
      1
    ]['intermediates']['encoder']['block_0']['__call__'][0]

  changed = np.abs(states(0.0) - states(1.0)).max((0, 2)) > 0
  np.testing.assert_array_equal(np.flatnonzero(changed), [6, 7, 8, 9])
