"""Mixture of Depths (Raposo et al. 2024): tokens that skip blocks."""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
from annotated_types import Interval

from model_lib import flops, tokens
from model_lib.layers import EncoderBlock, build
from model_lib.logical import partitioned_dense
from model_lib.vit import Encoder, ViT


class RoutedBlock(EncoderBlock):
  """A block of [CLS] and the tokens of largest score; the others skip it."""

  capacity: float = 0.5
  masked: bool = False

  @nn.compact
  def __call__(self, x, mask=None, row_keys=None):
    scores = partitioned_dense(1, 'embed', None, 'router')(x)[..., 0]
    length = jnp.full(x.shape[:1], x.shape[1])
    size = tokens.static_size(x.shape[1], 1 - self.capacity)
    keep = tokens.best(scores, length, jnp.full(x.shape[:1], size))
    if self.masked:
      return jnp.where(keep[..., None], self.read(x, scores, keep, row_keys), x)
    places = tokens.kept_first(keep, size)
    x_kept, scores = tokens.take(x, places), tokens.take(scores, places)
    return tokens.put(x, places, self.read(x_kept, scores, None, row_keys))

  def read(self, x, scores, mask, row_keys):
    new = self.fed(self.attended(x, mask, row_keys)[0], row_keys)
    return x + jax.nn.sigmoid(scores)[..., None] * (new - x)


class RoutedEncoder(Encoder):
  """Every other block is routed (section 4)."""

  capacity: float = 0.5
  masked: bool = False

  def block(self, index):
    if index % 2 == 0:
      return super().block(index)
    return build(RoutedBlock, self, name=f'block_{index}')


class Depths(ViT):
  """A ViT whose tokens choose their blocks."""

  SHRINKS = False
  capacity: Annotated[float, Interval(gt=0.0, le=1.0)] = 0.5
  masked: bool = False  # compute all tokens: equal results, not faster

  def _encode(self, x, row_keys):
    return build(RoutedEncoder, self, name='encoder')(x, None, row_keys), {}

  def flops(self, input_shape):
    count = self.image_tokens(input_shape)
    size = tokens.static_size(count, 1 - self.capacity)
    whole, routed = (
      flops.block(number, self.width, self.mlp_dim) for number in (count, size)
    )
    return super().flops(input_shape) - self.depth // 2 * (whole - routed)
