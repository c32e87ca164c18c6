"""ViT-3FFN: tokens split by position, in NumPy; counts of Table 7."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.vit_3ffn import ViT3FFN
from tests.adatape import plain_vit
from tests.adatape.plain_vit import IMAGES, SIZES
from tests.model_lib import plain


def loop(params, image):
  """Logits of one image."""
  params = plain.float64(params)
  x = plain_vit.tokens(params['tokens'], image)
  # [CLS], patches 1-8 and 9-16 of a 4 x 4 grid: its upper and lower half.
  group = np.repeat([0, 1, 2], [1, 8, 8])
  for index in range(SIZES['depth']):
    block = params['encoder'][f'block_{index}']
    assert 'mlp' not in block

    def feed(x, block=block):
      rows = [plain.mlp(block[f'mlp_{g}'], x[i]) for i, g in enumerate(group)]
      return np.stack(rows)

    x = plain_vit.block(block, x, feed)
  features = plain.layer_norm(params['encoder']['norm'], x)[0]
  return plain.dense(params['head'], features)


@pytest.mark.parametrize(('kind', 'hidden'), [('glu', 12), ('mlp', 24)])
def test_equals_a_loop_over_tokens(kind, hidden):
  model = ViT3FFN(**SIZES, cls_mlp=kind)
  params = plain.noise(model, IMAGES)
  own = params['encoder']['block_3']['mlp_0']
  assert ('gated' in own) == (kind == 'glu')
  assert own['hidden']['kernel'].shape == (16, hidden)
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


@pytest.mark.parametrize(
  ('variant', 'kind', 'millions', 'giga_mac'),
  [
    ('B/28', 'glu', 200.1, 5.730),  # printed in the row of ViT-B/28
    pytest.param('B/14', 'glu', 198.9, 23.239, marks=pytest.mark.nightly),
    # Networks of one size, as the text has them.
    pytest.param('B/28', 'mlp', 214.3, 5.744, marks=pytest.mark.nightly),
  ],
)
def test_counts_of_table_7(variant, kind, millions, giga_mac):
  model = ViT3FFN(18_291, variant, cls_mlp=kind)
  image = jnp.zeros((1, 224, 224, 3))
  shapes = jax.eval_shape(model.init, jax.random.key(0), image)
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6
  assert int(count * 10) / 10 == millions  # cut off, as in `model_test`
  got = model.flops((224, 224, 3)) / 2e9
  np.testing.assert_allclose(got, giga_mac, rtol=0.004)
