"""A ViT once more in plain NumPy, one image at a time, for its variants."""

import jax
import jax.numpy as jnp
import numpy as np

from dataset_lib.source import DatasetInfo
from tests.model_lib import plain

SIZES = dict(
  num_classes=3, width=16, depth=4, mlp_dim=24, num_heads=2, patch_size=4
)
IMAGES = jax.random.normal(jax.random.key(1), (4, 16, 16, 3))
INFO = DatasetInfo('image', (16, 16, 3), 'uint8', 3, (), 4)
MASK = np.array([1, 1, 1, 0], np.float32)  # the last row is padding
BATCH = {
  'image': jax.random.randint(
    jax.random.key(2), (4, 16, 16, 3), 0, 256, 'uint8'
  ),
  'label': jnp.array([0, 2, 1, 1]),
  'mask': jnp.array(MASK),
}
PIXELS = np.asarray(BATCH['image']) / 127.5 - 1.0  # of a model


def tokens(params, image, *before):
  """Tokens `[L, D]`: [CLS], the vectors `before`, patches with positions."""
  size = SIZES['patch_size']
  cut = [
    np.asarray(image)[i : i + size, j : j + size].reshape(-1)
    for i in range(0, 16, size)
    for j in range(0, 16, size)
  ]
  x = plain.dense(params['patch_embed']['projection'], np.stack(cut))
  x = x + params['positions']['embedding'][0]
  return np.concatenate([params['cls'][0], *before, x])


def block(params, x, feed=None):
  """A pre-LN block on the tokens of one image; `feed` is its network."""
  normed = plain.layer_norm(params['attention_norm'], x)
  x = x + plain.attention_by_loop(params['attention'], normed, 2)[0]
  normed = plain.layer_norm(params['mlp_norm'], x)
  return x + (feed(normed) if feed else plain.mlp(params['mlp'], normed))


def log_softmax(logits):
  """In float64."""
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
