"""ViT with three feed-forward networks per block (AdaTape, A.11, Table 7).

The baseline with as many parameters as AdaTape and the FLOPs of a ViT: one
network for [CLS], one for each half of the patch tokens.

The counts of Table 7 (200.1 M for B/28, with a head of 18,291 classes) follow
from a gated network for [CLS] whose hidden layer is half as wide, 3.54 M
(`flax.linen.glu` halves it). The GFLOPs of the two B/28 rows are exchanged.
"""

from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from model_lib import flops, row_random
from model_lib.layers import EncoderBlock, Mlp, build
from model_lib.vit import Encoder, ViT


class SplitBlock(EncoderBlock):
  """A block with networks for [CLS] and for each half of the patches."""

  def feed_forward(self, x: Any, row_keys: Any) -> Any:
    """Applies the three networks to their tokens."""
    half = 1 + x.shape[1] // 2  # the first half has the odd patch
    gated = {'gated': True, 'mlp_dim': self.mlp_dim // 2}
    outputs = []
    for index, part in enumerate(jnp.split(x, [1, half], axis=1)):
      fields = {} if index else gated
      mlp = build(Mlp, self, name=f'mlp_{index}', **fields)
      outputs.append(mlp(part, row_random.fold_rows(row_keys, index)))
    return jnp.concatenate(outputs, axis=1)


class SplitEncoder(Encoder):
  """An encoder of `SplitBlock`s."""

  def block(self, index: int) -> EncoderBlock:
    """Returns block `index`."""
    return build(SplitBlock, self, name=f'block_{index}')


class ViT3FFN(ViT):
  """A ViT with three feed-forward networks in its blocks."""

  ENCODER: ClassVar[type[Encoder]] = SplitEncoder
  SHRINKS: ClassVar[bool] = False

  pool: Literal['cls'] = 'cls'  # [CLS] has a network of its own

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one image `[H, W, E]` forward; see `flops`."""
    # The network of [CLS] has 1.5 matrices instead of 2.
    saved = self.depth * flops.dense(1, self.width, self.mlp_dim) / 2
    return super().flops(input_shape) - saved
