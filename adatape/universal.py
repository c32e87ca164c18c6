"""Transformers that halt in depth by ACT: AdaTape's baselines (section 3.1).

The Universal Transformer (Dehghani et al. 2019) on symbols and on images, U2T
(a block per step), and UViT (a ViT on top of a Universal Transformer).
`out['ponder']` has the steps and cost of each row.
"""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Ge, Interval
from jaxtyping import Array, Bool, Float, Int, Num

from adatape.universal_layers import (
  Pondering,
  Steps,
  UniversalEncoder,
  UnsharedEncoder,
)
from model_lib import flops
from model_lib.layers import build, pool_and_classify
from model_lib.row_random import RowKeys
from model_lib.sizes import Size, check_heads
from model_lib.vit import Encoder, ImageModel, SymbolTokens


class UniversalTransformer(Pondering):
  """A Universal Transformer on symbol sequences, for parity."""

  num_classes: int
  width: Annotated[int, Interval(ge=1, le=2**17)]  # even
  max_steps: Steps
  vocab_size: Annotated[int, Ge(1)] = 3

  def __post_init__(self):
    super().__post_init__()
    check_heads(self)

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B N'],
    row_keys: RowKeys = None,
    mask: Bool[Array, 'B N'] | Num[Array, 'B N'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies sequences, 0 in `mask` for padding, by their [CLS] token.

    Returns (logits, out) with `out['features']` `[B, D]` and `out['ponder']`,
    see `UniversalEncoder`; [CLS] counts as a token.
    """
    # Embeddings are initialised with the scale of the sines added to them.
    x = build(SymbolTokens, self, stddev=1.0, name='tokens')(tokens)
    if mask is not None:
      mask = jnp.pad(mask.astype(bool), ((0, 0), (1, 0)), constant_values=True)
    encoder = build(UniversalEncoder, self, name='encoder')
    x, ponder = encoder(x, mask, row_keys)
    logits, features = pool_and_classify(x, 'cls', self.num_classes)
    return logits, {'features': features, 'ponder': ponder}

  def flops(
    self, input_shape: tuple[int, ...], steps: int | float | None = None
  ) -> float:
    """Returns the FLOPs of one sequence `[N]`; see `UniversalViT.flops`."""
    steps = self.max_steps if steps is None else steps
    tokens = input_shape[0] + 1
    block = flops.block(tokens, self.width, self.mlp_dim)
    block += flops.dense(tokens, self.width, 1)
    return steps * block + flops.dense(1, self.width, self.num_classes)


class UniversalViT(ImageModel, Pondering, kw_only=True):
  """A Universal Transformer on image patches; see `UniversalTransformer`."""

  max_steps: Steps
  ENCODER: ClassVar[type[UniversalEncoder]] = UniversalEncoder

  def _encode(self, x: Any, row_keys: Any) -> tuple[Any, dict[str, Any]]:
    encoder = build(self.ENCODER, self, name='encoder')
    x, ponder = encoder(x, None, row_keys)
    return x, {'ponder': ponder}

  def flops(
    self, input_shape: tuple[int, ...], steps: int | float | None = None
  ) -> float:
    """Returns the FLOPs of one image `[H, W, E]` forward; see `flops`.

    `steps` may be a measured mean of `depth`; None is the most, `max_steps`.
    """
    steps = self.max_steps if steps is None else steps
    scores = flops.dense(self.image_tokens(input_shape), self.width, 1)
    return self.image_flops(input_shape, steps) + steps * scores


class UnsharedViT(UniversalViT, kw_only=True):
  """U2T: `UniversalViT` with `max_steps` blocks of their own parameters.

  The blocks have the names of the ViT's, so that its parameters load. The
  paper's sizes are 13 (Ti, S) and 15 (B) blocks.
  """

  # The blocks differ, and those of a ViT were trained without coordinates.
  coordinates: bool = False
  ENCODER: ClassVar[type[UniversalEncoder]] = UnsharedEncoder


class UViT(ImageModel, Pondering, kw_only=True):
  """A ViT on the output of a Universal Transformer of `ut_steps` steps.

  The Universal Transformer has no norm after its last step; `out['ponder']`
  counts its steps.
  """

  depth: Size = None  # blocks of the ViT
  ut_steps: Steps = 3  # AdaTape: 3, with L 6

  def _encode(self, x: Any, row_keys: Any) -> tuple[Any, dict[str, Any]]:
    settings = {'max_steps': self.ut_steps, 'final_norm': False}
    universal = build(UniversalEncoder, self, name='universal', **settings)
    x, ponder = universal(x, None, row_keys)
    x = build(Encoder, self, name='encoder')(x, None, row_keys)
    return x, {'ponder': ponder}

  def flops(
    self, input_shape: tuple[int, ...], steps: int | float | None = None
  ) -> float:
    """Returns the FLOPs of one image; see `UniversalViT.flops`."""
    steps = self.ut_steps if steps is None else steps
    scores = flops.dense(self.image_tokens(input_shape), self.width, 1)
    return self.image_flops(input_shape, steps + self.depth) + steps * scores
