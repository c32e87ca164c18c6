"""Layers of a Transformer encoder: norm, MLP, pre-LN block, head."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from model_lib import row_random
from model_lib.attention import Attended, MultiHeadAttention, attend, wide
from model_lib.logical import constrain, partitioned, partitioned_dense
from model_lib.row_random import RowKeys

Layer = TypeVar('Layer')
Mask = Bool[Array, 'B L'] | Num[Array, 'B L'] | None  # non-zero: valid


def build(layer: type[Layer], model: Any, **others: Any) -> Layer:
  """Constructs a layer from the fields of `model` and from `others`."""
  names = {field.name for field in dataclasses.fields(layer)}  # type: ignore
  names &= {field.name for field in dataclasses.fields(model)}
  same = names - {'parent', 'name', *others}
  return layer(**{name: getattr(model, name) for name in same}, **others)


def gelu(x: Float[Array, '*S']) -> Float[Array, '*S']:
  """Computes the exact GELU; erf is twice as fast on a CPU as JAX's erfc."""
  return 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5))


# GELU by tanh (Hendrycks and Gimpel 2016, section 2).
gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
# Hugging Face's names; some functions have several.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
  'gelu': gelu, 'gelu_python': gelu, 'gelu_new': gelu_tanh,
  'gelu_pytorch_tanh': gelu_tanh, 'gelu_fast': gelu_tanh,
  'relu': jax.nn.relu, 'silu': jax.nn.silu, 'swish': jax.nn.silu,
  'tanh': jnp.tanh,
}  # fmt: skip


class LayerNorm(nn.Module):
  """Layer normalisation over the last axis, computed in float32 at least."""

  dtype: Any = jnp.float32  # of the result
  epsilon: float = 1e-6  # added to the variance
  use_bias: bool = True

  @nn.compact
  def __call__(self, x: Float[Array, '*S D']) -> Float[Array, '*S D']:
    """Normalises `x`, then scales and shifts every feature."""
    shape = (1,) * (x.ndim - 1) + (x.shape[-1],)
    ones = partitioned(nn.initializers.ones, 'embed')
    zeros = partitioned(nn.initializers.zeros, 'embed')
    scale = self.param('scale', ones, shape[-1:])
    bias = jnp.zeros(shape[-1:])  # ONNX Runtime fuses a norm with a bias only
    if self.use_bias:
      bias = self.param('bias', zeros, shape[-1:])
    x = x.astype(wide(self.dtype))
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(variance + self.epsilon)
    return (x * scale.reshape(shape) + bias.reshape(shape)).astype(self.dtype)


class Mlp(nn.Module):
  """The feed-forward network of a block: two layers and an activation."""

  mlp_dim: int  # width of the hidden layer
  dropout: float = 0.0  # of the hidden layer and of the result
  # Multiply the activated hidden layer by a second one (GLU, Shazeer 2020).
  gated: bool = False
  use_bias: bool = True
  activation: str = 'gelu'
  kernel_init: Callable[..., Any] = nn.initializers.xavier_uniform()
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, '*B L D'], row_keys: RowKeys = None
  ) -> Float[Array, '*B L D']:
    """Applies the network; `row_keys` turn dropout on, for `[B, L, D]` only."""
    dense = functools.partial(
      partitioned_dense, kernel_init=self.kernel_init, dtype=self.dtype,
      use_bias=self.use_bias,
    )  # fmt: skip
    axes = ('batch', 'length')[-(x.ndim - 1) :]
    hidden = dense(self.mlp_dim, 'embed', 'mlp', 'hidden')(x)
    hidden = ACTIVATIONS[self.activation](hidden)
    if self.gated:
      hidden = hidden * dense(self.mlp_dim, 'embed', 'mlp', 'gated')(x)
    hidden = constrain(hidden, *axes, 'mlp')
    hidden = row_random.drop(hidden, self.dropout, row_keys, 'hidden')
    out = dense(x.shape[-1], 'mlp', 'embed', 'out')(hidden)
    out = constrain(out, *axes, 'embed')
    return row_random.drop(out, self.dropout, row_keys, 'out')


class EncoderBlock(nn.Module):
  """A pre-LN Transformer block; a subclass may have other networks."""

  num_heads: int
  mlp_dim: int
  dropout: float = 0.0
  activation: str = 'gelu'
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    mask: Mask = None,
    row_keys: RowKeys = None,
    **options: Any,
  ) -> Float[Array, 'B L D']:
    """Applies attention, then `feed_forward` with `options`, both residual.

    Keys with mask 0 are not read; `row_keys` turn dropout on.
    """
    x = self.attended(x, mask, row_keys)[0]
    return self.fed(x, row_keys, **options)

  def attended(
    self,
    x: Any,
    mask: Any,
    row_keys: RowKeys,
    attend: Any = attend,
    **options: Any,
  ) -> tuple[Float[Array, 'B L D'], Attended]:
    """Returns tokens after the attention, and what it returned for them."""
    normed = LayerNorm(name='attention_norm', dtype=self.dtype)(x)
    kept: Any = dict(attend=attend, dropout=0.0, name='attention')
    layer = build(MultiHeadAttention, self, **kept)
    attended: Any = layer(normed, mask, **options)
    added = row_random.drop(attended.x, self.dropout, row_keys, 'attention')
    return x.astype(self.dtype) + added, attended

  def fed(
    self, x: Float[Array, 'B L D'], row_keys: RowKeys, **options: Any
  ) -> Float[Array, 'B L D']:
    """Returns tokens after the norm and the feed-forward network."""
    normed = LayerNorm(name='mlp_norm', dtype=self.dtype)(x)
    out = x + self.feed_forward(normed, row_keys, **options)
    return constrain(out, 'batch', 'length', 'embed')

  def feed_forward(
    self, x: Float[Array, 'B L D'], row_keys: RowKeys
  ) -> Float[Array, 'B L D']:
    """Applies the feed-forward network to every token."""
    return build(Mlp, self, name='mlp')(x, row_keys)


def classifier(num_classes: int, name: str = 'head') -> nn.Dense:
  """Returns the linear layer from features to logits, in float32."""
  # Small and not zero: the first gradient reaches the encoder.
  init = nn.initializers.truncated_normal(0.02)
  return partitioned_dense(
    num_classes, 'embed', 'classes', name, kernel_init=init
  )


def pool_and_classify(
  x: Float[Array, 'B L D'], pool: str, num_classes: int
) -> tuple[Float[Array, 'B O'], Float[Array, 'B D']]:
  """Returns (logits, features) of [CLS] ('cls') or of the mean ('gap')."""
  features = masked_mean(x if pool == 'gap' else x[:, :1])
  logits = classifier(num_classes)(features)
  return constrain(logits, 'batch', 'classes'), features


def masked_mean(
  x: Float[Array, 'B L D'], mask: Mask = None
) -> Float[Array, 'B D']:
  """Averages tokens with mask > 0, in float32 at least; reads no others.

  Zero for a row without a valid token. Without a mask all tokens are valid.
  """
  x = x.astype(wide(x.dtype))
  if mask is None:
    return x.mean(axis=1)
  valid = mask.astype(bool)
  total = jnp.where(valid[:, :, None], x, 0.0).sum(axis=1)
  count = valid.astype(x.dtype).sum(axis=1)
  return total / jnp.maximum(count, 1.0)[:, None]


def valid_tokens(
  x: Float[Array, 'B L D'] | Int[Array, 'B L'], length: Int[Array, ' B']
) -> Bool[Array, 'B L']:
  """Returns True for the first `length` tokens of each row."""
  return jnp.arange(x.shape[1])[None] < length[:, None]
