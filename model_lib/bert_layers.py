"""Layers of BERT: embeddings, post-LN block, pooler (Devlin et al. 2019)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from model_lib import row_random
from model_lib.attention import (
  Attended,
  KeysValues,
  MultiHeadAttention,
  attend,
)
from model_lib.errors import FieldError
from model_lib.layers import LayerNorm, Mlp, activation_function, build
from model_lib.logical import constrain, partitioned

INIT = nn.initializers.truncated_normal(0.02)


class Embedding(nn.Module):
  """A table of `size` vectors, standard deviation 0.02."""

  size: int
  width: int

  @nn.compact
  def __call__(self, indices: Int[Array, 'B L']) -> Float[Array, 'B L D']:
    """Looks up float32 vectors; an index outside [0, size) gives NaN."""
    init = partitioned(INIT, None, 'embed')
    table = self.param('embedding', init, (self.size, self.width))
    # Otherwise -1 would be the last vector, as in NumPy.
    indices = jnp.where(indices < 0, self.size, indices)
    return jnp.take(table, indices, axis=0, mode='fill')


class BertEmbeddings(nn.Module):
  """Words, token types and positions, summed and normalised.

  The fields are those of `bert.TextEncoder`.
  """

  vocab_size: int
  width: int
  max_positions: int = 512
  type_vocab_size: int = 2
  norm_epsilon: float = 1e-12
  dropout: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> Float[Array, 'B L D']:
    """Embeds token ids; an unknown id or type gives NaN.

    `row_keys` turn dropout on. Raises FieldError if the sequence is longer than
    `max_positions`.
    """
    length = tokens.shape[1]
    if length > self.max_positions:
      expected = f'at least the length {length} of the sequence'
      raise FieldError('max_positions', self.max_positions, expected)
    x = Embedding(self.vocab_size, self.width, name='word')(tokens)
    if self.type_vocab_size:
      types = Embedding(self.type_vocab_size, self.width, name='token_type')
      x = x + types(token_types)
    positions = Embedding(self.max_positions, self.width, name='position')
    x = x + positions(jnp.arange(length)[None])
    x = LayerNorm(self.dtype, self.norm_epsilon, name='norm')(x)
    x = constrain(x, 'batch', 'length', 'embed')
    return row_random.drop(x, self.dropout, row_keys, 'embeddings')


class BertBlock(nn.Module):
  """A Transformer block with LayerNorm after each residual (post-LN).

  The fields are those of `bert.TextEncoder`, and the function that attends.
  """

  num_heads: int
  mlp_dim: int
  activation: str = 'gelu'
  norm_epsilon: float = 1e-12
  dropout: float = 0.0
  attention_dropout: float = 0.0
  attend: Callable[..., Any] = attend
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    mask: Bool[Array, 'B S'] | Num[Array, 'B S'] | None = None,
    row_keys: Key[Array, ' B'] | None = None,
    *,
    received: bool = False,
    num_queries: int | None = None,
    keys_values: KeysValues | None = None,
  ) -> Attended:
    """Applies attention, then the feed-forward network.

    The arguments are those of `MultiHeadAttention`. The leading `num_queries`
    tokens attend to all tokens whatever `attend` is: one ([CLS]) costs a sixth
    of the block, 0 computes keys and values alone. Their dropout noise differs
    from that of a full block.
    """
    attended = MultiHeadAttention(
      num_heads=self.num_heads,
      attend=self.attend if num_queries is None else attend,
      dropout=self.attention_dropout,
      kernel_init=INIT,
      dtype=self.dtype,
      name='attention',
    )(x, mask, row_keys, received, num_queries, keys_values)
    x = x[:, :num_queries].astype(self.dtype)
    x = x + row_random.drop(attended.x, self.dropout, row_keys, 'attention')
    x = LayerNorm(self.dtype, self.norm_epsilon, name='attention_norm')(x)
    # Dropout is applied to the result alone.
    mlp = build(Mlp, self, dropout=0.0, kernel_init=INIT, name='mlp')
    out = mlp(x)
    x = x + row_random.drop(out, self.dropout, row_keys, 'mlp')
    x = LayerNorm(self.dtype, self.norm_epsilon, name='mlp_norm')(x)
    x = constrain(x, 'batch', 'length', 'embed')
    return attended._replace(x=x)


class Pooler(nn.Module):
  """BERT's pooler: a dense layer with an activation on [CLS]."""

  activation: str = 'tanh'
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, cls: Float[Array, 'B D']) -> Float[Array, 'B D']:
    """Pools the state of [CLS]."""
    activate = activation_function(self.activation, 'pooler_activation')
    width = cls.shape[-1]
    init = partitioned(INIT, 'embed', 'mlp')
    zeros = partitioned(nn.initializers.zeros, 'mlp')
    kernel = self.param('kernel', init, (width, width))
    bias = self.param('bias', zeros, (width,))
    pooled = cls.astype(self.dtype) @ kernel.astype(self.dtype)
    return activate(pooled + bias.astype(self.dtype)[None])
