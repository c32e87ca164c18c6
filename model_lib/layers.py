"""Layers of a Transformer encoder: norm, MLP, pre-LN block, head."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Num

from model_lib import row_random
from model_lib.attention import MultiHeadAttention
from model_lib.errors import FieldError, check_option
from model_lib.logical import constrain, partitioned

TAPE_MLPS = ('', 'mlp', 'glu')


def gelu(x: Float[Array, '*S']) -> Float[Array, '*S']:
  """Computes the exact GELU; erf is twice as fast on a CPU as JAX's erfc."""
  return 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5))


def gelu_tanh(x: Float[Array, '*S']) -> Float[Array, '*S']:
  """Computes GELU by tanh (Hendrycks and Gimpel 2016, section 2)."""
  return jax.nn.gelu(x, approximate=True)


# Hugging Face's names; some functions have several.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
  'gelu': gelu,
  'gelu_python': gelu,
  'gelu_new': gelu_tanh,
  'gelu_pytorch_tanh': gelu_tanh,
  'gelu_fast': gelu_tanh,
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
  'swish': jax.nn.silu,
  'tanh': jnp.tanh,
}


def activation_function(
  name: str, field: str = 'activation'
) -> Callable[[Any], Any]:
  """Returns the element-wise function of a name in `ACTIVATIONS`.

  Args:
    name: name of the activation.
    field: field in an error message.

  Raises:
    FieldError: if the name is unknown.
  """
  check_option(field, name, tuple(ACTIVATIONS))
  return ACTIVATIONS[name]


class LayerNorm(nn.Module):
  """Layer normalisation over the last axis, computed in float32.

  Attributes:
    dtype: dtype of the result.
    epsilon: added to the variance.
  """

  dtype: Any = jnp.float32
  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x: Float[Array, '*S D']) -> Float[Array, '*S D']:
    """Normalises `x`, then scales and shifts every feature."""
    shape = (1,) * (x.ndim - 1) + (x.shape[-1],)
    scale = self.param(
      'scale', partitioned(nn.initializers.ones, 'embed'), shape[-1:]
    )
    bias = self.param(
      'bias', partitioned(nn.initializers.zeros, 'embed'), shape[-1:]
    )
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(variance + self.epsilon)
    return (x * scale.reshape(shape) + bias.reshape(shape)).astype(self.dtype)


class Mlp(nn.Module):
  """The feed-forward network of a block: two layers and an activation.

  Attributes:
    mlp_dim: width of the hidden layer.
    dropout: rate on the hidden layer and on the result.
    gated: multiply the activated hidden layer by a second one of the same width
      (GLU variants, Shazeer 2020).
    activation: a name in `ACTIVATIONS`.
    kernel_init: initialiser of the kernels.
    dtype: compute dtype.
  """

  mlp_dim: int
  dropout: float = 0.0
  gated: bool = False
  activation: str = 'gelu'
  kernel_init: Callable[..., Any] = nn.initializers.xavier_uniform()
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, '*B L D'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> Float[Array, '*B L D']:
    """Applies the network to every token; `row_keys` turn dropout on.

    Raises:
      FieldError: if `activation` is unknown, or with keys for flattened tokens
        `[L, D]`.
    """
    activate = activation_function(self.activation)
    if row_keys is not None and x.ndim < 3:
      raise FieldError('row_keys', 'keys', f'None for tokens {x.shape}')
    axes = ('batch', 'length')[-(x.ndim - 1) :]
    hidden = activate(self._hidden('hidden')(x))
    if self.gated:
      hidden = hidden * self._hidden('gated')(x)
    hidden = constrain(hidden, *axes, 'mlp')
    hidden = row_random.drop(hidden, self.dropout, row_keys, 'hidden')
    out = nn.Dense(
      x.shape[-1],
      name='out',
      dtype=self.dtype,
      kernel_init=partitioned(self.kernel_init, 'mlp', 'embed'),
      bias_init=partitioned(nn.initializers.zeros, 'embed'),
    )(hidden)
    out = constrain(out, *axes, 'embed')
    return row_random.drop(out, self.dropout, row_keys, 'out')

  def _hidden(self, name: str) -> nn.Dense:
    return nn.Dense(
      self.mlp_dim,
      name=name,
      dtype=self.dtype,
      kernel_init=partitioned(self.kernel_init, 'embed', 'mlp'),
      bias_init=partitioned(nn.initializers.zeros, 'mlp'),
    )


class EncoderBlock(nn.Module):
  """A pre-LN Transformer block with a second network for tape tokens.

  Attributes:
    num_heads: attention heads.
    mlp_dim: hidden width of the feed-forward networks.
    dropout: rate after attention and in the feed-forward networks.
    tape_mlp: feed-forward network of the tokens after `num_input_tokens`: ''
      for that of the input tokens, 'mlp' for another of the same form, 'glu'
      for a gated one (AdaTape, section 2).
    dtype: compute dtype.
  """

  num_heads: int
  mlp_dim: int
  dropout: float = 0.0
  tape_mlp: str = ''
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    mask: Bool[Array, 'B L'] | Num[Array, 'B L'] | None = None,
    row_keys: Key[Array, ' B'] | None = None,
    num_input_tokens: int | None = None,
  ) -> Float[Array, 'B L D']:
    """Applies attention, then the feed-forward networks, both residual.

    Args:
      x: tokens, input tokens first.
      mask: non-zero for a valid key; None if all are.
      row_keys: one key per row turns dropout on.
      num_input_tokens: number of input tokens, before the tape; None for all.

    Raises:
      FieldError: if `tape_mlp` is unknown.
    """
    check_option('tape_mlp', self.tape_mlp, TAPE_MLPS)
    normed = LayerNorm(name='attention_norm', dtype=self.dtype)(x)
    attended: Any = MultiHeadAttention(
      num_heads=self.num_heads, name='attention', dtype=self.dtype
    )(normed, mask).x
    attended = row_random.drop(attended, self.dropout, row_keys, 'attention')
    x = x.astype(self.dtype) + attended
    normed = LayerNorm(name='mlp_norm', dtype=self.dtype)(x)
    out = x + self._feed_forward(normed, row_keys, num_input_tokens)
    return constrain(out, 'batch', 'length', 'embed')

  def _feed_forward(self, x, row_keys, num_input_tokens):
    sizes = {
      'mlp_dim': self.mlp_dim,
      'dropout': self.dropout,
      'dtype': self.dtype,
    }
    mlp = Mlp(name='mlp', **sizes)
    if not self.tape_mlp:
      return mlp(x, row_keys)
    count = x.shape[1] if num_input_tokens is None else num_input_tokens
    tape_keys = row_keys
    if tape_keys is not None:
      tape_keys = row_random.fold_rows(tape_keys, 'tape')
    # Also runs on zero tape tokens, so that its parameters always exist.
    tape_mlp = Mlp(name='tape_mlp', gated=self.tape_mlp == 'glu', **sizes)
    parts = [mlp(x[:, :count], row_keys), tape_mlp(x[:, count:], tape_keys)]
    return jnp.concatenate(parts, axis=1)


def classifier(num_classes: int, name: str = 'head') -> nn.Dense:
  """Returns the linear layer from features to logits, in float32.

  Its kernel starts small and not at zero: the first gradient reaches the
  encoder.
  """
  return nn.Dense(
    num_classes,
    name=name,
    dtype=jnp.float32,
    kernel_init=partitioned(
      nn.initializers.truncated_normal(0.02), 'embed', 'classes'
    ),
    bias_init=partitioned(nn.initializers.zeros, 'classes'),
  )


def masked_mean(
  x: Float[Array, 'B L D'],
  mask: Bool[Array, 'B L'] | Num[Array, 'B L'] | None = None,
) -> Float[Array, 'B D']:
  """Averages the valid tokens in float32; zero for a row without any.

  Args:
    x: tokens; those with mask 0 are never read.
    mask: non-zero for a valid token; None if all are.
  """
  x = x.astype(jnp.float32)
  if mask is None:
    return x.mean(axis=1)
  valid = mask.astype(bool)
  total = jnp.where(valid[:, :, None], x, 0.0).sum(axis=1)
  count = valid.astype(jnp.float32).sum(axis=1)
  return total / jnp.maximum(count, 1.0)[:, None]
