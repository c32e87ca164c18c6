"""ViT-3FFN: tokens split by position, in NumPy; counts of Table 7."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adatape.vit_3ffn import ViT3FFN
from tests.adatape import plain_vit
from tests.adatape.plain_vit import IMAGES, SIZES
from tests.model_lib import plain


def loop(params, image, networks):
  """Logits of one image; `networks` of each block: 1, 2 or 3."""
  params = plain.float64(params)
  x = plain_vit.tokens(params['tokens'], image)
  for index, count in enumerate(networks):
    block = params['encoder'][f'block_{index}']
    # [CLS], patches 1-8 and 9-16 of a 4 x 4 grid: its upper and lower half.
    group = np.minimum(np.repeat([0, 1, 2], [1, 8, 8]), count - 1)
    names = [f'mlp_{n}' for n in range(count)] if count > 1 else ['mlp']
    assert {n for n in block if n.startswith('mlp')} == {'mlp_norm', *names}

    def feed(x, block=block, group=group, names=names):
      rows = [plain.mlp(block[names[g]], x[i]) for i, g in enumerate(group)]
      return np.stack(rows)

    x = plain_vit.block(block, x, feed)
  features = plain.layer_norm(params['encoder']['norm'], x)[0]
  return plain.dense(params['head'], features)


@pytest.mark.parametrize(
  ('extra', 'networks'), [(None, (3, 3, 3, 3)), (5, (1, 2, 3, 3))]
)
def test_equals_a_loop_over_tokens(extra, networks):
  model = ViT3FFN(**SIZES, extra_networks=extra)
  params = plain.noise(model, IMAGES)
  logits, _ = jax.jit(model.apply)({'params': params}, IMAGES)
  for row, image in enumerate(IMAGES):
    want = loop(params, image, networks)
    np.testing.assert_allclose(logits[row], want, atol=1e-4)


def test_an_odd_patch_belongs_to_the_first_half():
  model = ViT3FFN(**(SIZES | dict(depth=1)), extra_networks=2)
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
  ('variant', 'extra', 'millions', 'giga_mac'),
  [
    ('B/28', 21, 200.1, 5.744),
    pytest.param('B/14', 21, 198.9, 23.239, marks=pytest.mark.nightly),
    pytest.param('B/28', 0, 100.9, 5.730, marks=pytest.mark.nightly),
    pytest.param('B/14', 0, 99.7, 23.254, marks=pytest.mark.nightly),
    # The text's two per block.
    pytest.param('B/28', None, 214.3, 5.744, marks=pytest.mark.nightly),
  ],
)
def test_counts_of_table_7(variant, extra, millions, giga_mac):
  model = ViT3FFN(18_291, variant, extra_networks=extra)
  image = jnp.zeros((1, 224, 224, 3))
  shapes = jax.eval_shape(model.init, jax.random.key(0), image)
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6
  assert int(count * 10) / 10 == millions  # cut off, as in `model_test`
  got = model.flops((224, 224, 3)) / 2e9
  np.testing.assert_allclose(got, giga_mac, rtol=0.004)


def test_more_than_two_extra_networks_per_block_are_refused():
  with pytest.raises(ValueError, match='extra_networks: expected at most 2'):
    ViT3FFN(**SIZES, extra_networks=9)
