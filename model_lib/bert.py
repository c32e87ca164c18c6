"""BERT and DistilBERT as classifiers, and what all text encoders share.

Devlin et al. 2019; Sanh et al. 2019. Another encoder, such as ModernBERT,
overrides methods of `BertClassifier`; `eat.model` prunes any. Parameters are
named as those that `model_lib.convert` loads from a published checkpoint. The
first `length` tokens of a row are valid; the others are never read.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Interval, Predicate
from jaxtyping import Array, Bool, Float, Int, Num

from core.errors import ConfigError
from model_lib import blocks, flops, layers, row_random, sizes
from model_lib.attention import Attended, MultiHeadAttention, attend
from model_lib.layers import ACTIVATIONS, LayerNorm, Mlp, build
from model_lib.logical import constrain, partitioned, partitioned_dense
from model_lib.row_random import RowKeys
from model_lib.sizes import Rate, Size
from model_lib.tokens import Tokens

INIT = nn.initializers.truncated_normal(0.02)

Activation = Annotated[
  str, Predicate(ACTIVATIONS.__contains__), f'one of {", ".join(ACTIVATIONS)}'
]


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
  """Words, types and positions, summed, normed; fields as in `TextEncoder`.

  There may be no table of types or positions, of size 0.
  """

  vocab_size: int
  width: int
  max_positions: int = 512
  type_vocab_size: int = 2
  norm_epsilon: float = 1e-12
  norm_bias: bool = True
  dropout: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    row_keys: RowKeys = None,
  ) -> Float[Array, 'B L D']:
    """Embeds token ids; an unknown id or type gives NaN."""
    length = tokens.shape[1]
    if length > self.max_positions > 0:
      expected = f'at least the length {length} of the sequence'
      raise ConfigError('max_positions', self.max_positions, expected)
    x = Embedding(self.vocab_size, self.width, name='word')(tokens)
    if self.type_vocab_size:
      types = Embedding(self.type_vocab_size, self.width, name='token_type')
      x = x + types(token_types)
    if self.max_positions:
      positions = Embedding(self.max_positions, self.width, name='position')
      x = x + positions(jnp.arange(length)[None])
    norm = LayerNorm(self.dtype, self.norm_epsilon, self.norm_bias, name='norm')
    x = norm(x)
    x = constrain(x, 'batch', 'length', 'embed')
    return row_random.drop(x, self.dropout, row_keys, 'embeddings')


class BertBlock(nn.Module):
  """A post-LN Transformer block; fields as in `TextEncoder`, plus `attend`."""

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
    row_keys: RowKeys = None,
    *,
    num_queries: int | None = None,
    **options: Any,
  ) -> Attended:
    """Applies attention, then the feed-forward network.

    Arguments as in `MultiHeadAttention`; with `num_queries` the field `attend`
    is ignored. 1 query ([CLS]) costs a sixth of the block; 0 queries compute
    only keys and values.
    """
    kind = self.attend if num_queries is None else attend
    options['num_queries'] = num_queries
    attended = self.attention(attend=kind)(x, mask, row_keys, **options)
    x = x[:, :num_queries].astype(self.dtype)
    x = x + row_random.drop(attended.x, self.dropout, row_keys, 'attention')
    x = LayerNorm(self.dtype, self.norm_epsilon, name='attention_norm')(x)
    # No dropout in the hidden layer; that of the result follows.
    mlp = build(Mlp, self, dropout=0.0, kernel_init=INIT, name='mlp')
    x = x + row_random.drop(mlp(x), self.dropout, row_keys, 'mlp')
    x = LayerNorm(self.dtype, self.norm_epsilon, name='mlp_norm')(x)
    x = constrain(x, 'batch', 'length', 'embed')
    return attended._replace(x=x)

  def attention(self, **fields: Any) -> nn.Module:
    """Returns the attention of the block, with some other fields."""
    fields |= dict(dropout=self.attention_dropout, kernel_init=INIT)
    return build(MultiHeadAttention, self, name='attention', **fields)


class Pooler(nn.Module):
  """BERT's pooler: a dense layer with an activation on [CLS]."""

  activation: str = 'tanh'
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, cls: Float[Array, 'B D']) -> Float[Array, 'B D']:
    """Pools the state of [CLS]."""
    dense = partitioned_dense(
      cls.shape[-1], 'embed', 'mlp', kernel_init=INIT, dtype=self.dtype
    )
    nn.share_scope(self, dense)
    return ACTIVATIONS[self.activation](dense(cls))


class TextEncoder(nn.Module, kw_only=True):
  """Fields and modules that BERT, EAT and ALBERT share."""

  SIZES: ClassVar[sizes.Sizes] = sizes.BERT
  MODEL_TYPE: ClassVar[str] = 'bert'  # of Hugging Face

  num_classes: int  # 1 for regression
  variant: str = ''  # name in `SIZES` of the sizes that are None
  width: Size = None
  mlp_dim: Size = None  # hidden width of the feed-forward networks
  num_heads: Size = None
  vocab_size: Annotated[int, Interval(ge=1, le=2**24)] = 30522
  max_positions: Annotated[int, Interval(ge=1, le=2**20)] = 512
  # Number of token types, 0 for none (DistilBERT).
  type_vocab_size: Annotated[int, Interval(ge=0, le=2**20)] = 2
  activation: Activation = 'gelu'
  norm_epsilon: Annotated[float, Interval(ge=1e-30, le=0.1)] = 1e-12
  dropout: Rate = 0.1  # of embeddings and after both halves of a block
  attention_dropout: Rate = 0.1
  classifier_dropout: Rate = 0.1  # before every classifier
  dtype: Any = jnp.float32  # of the computation; logits are float32

  def __post_init__(self):
    self.SIZES.complete(self)
    super().__post_init__()

  @nn.nowrap
  def make_embeddings(self, width: int) -> nn.Module:
    """Returns the embeddings that the fields describe."""
    return build(BertEmbeddings, self, width=width)

  @nn.nowrap
  def make_blocks(
    self, count: int, attend: Callable[..., Any] = attend
  ) -> Sequence[nn.Module]:
    """Returns `count` blocks that the fields describe."""
    return [build(BertBlock, self, attend=attend) for _ in range(count)]

  def classify(
    self, cls: Float[Array, 'B D'], row_keys: RowKeys = None
  ) -> tuple[Float[Array, 'B O'], Float[Array, 'B D']]:
    """Returns (logits, features) of [CLS], by `pooler` and `head`."""
    features = self.pooler(cls).astype(jnp.float32)
    logits = self.head(
      row_random.drop(features, self.classifier_dropout, row_keys, 'classifier')
    )
    return constrain(logits, 'batch', 'classes'), features


class BertClassifier(TextEncoder, kw_only=True):
  """BERT with a pooler and a classifier on [CLS]; see `TextEncoder`."""

  depth: Size = None  # number of blocks
  pooler_activation: Activation = 'tanh'  # 'relu' in DistilBERT
  # No field: a subclass may have one.
  pooling = 'cls'  # the state that is classified, or the 'mean' of all tokens

  @nn.nowrap
  def heads(self) -> tuple[int, ...]:
    """Returns the layers with a head, here the last one."""
    return (self.depth,)

  @nn.nowrap
  def pooler_kind(self) -> Callable[..., nn.Module]:
    """Returns a function that makes the layer before a classifier."""
    return functools.partial(Pooler, self.pooler_activation, dtype=self.dtype)

  def setup(self):
    """Declares embeddings, blocks, pooler and head."""
    self.embeddings = self.make_embeddings(self.width)
    self.block = self.make_blocks(self.depth)
    self.pooler = self.pooler_kind()()
    self.head = layers.classifier(self.num_classes)

  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: RowKeys = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies rows of token ids, padded after `length`.

    `row_keys`, one per row, turn dropout on. Returns (logits, out) with the
    pooled [CLS] `out['features']` `[B, D]`, both float32.
    """
    states = self.encode(tokens, token_types, length, row_keys)
    logits, features = self.classify(self.pool(states, length), row_keys)
    return logits, {'features': features}

  def encode(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: RowKeys = None,
  ) -> Float[Array, 'B L D']:
    """Returns `states` of all tokens after the last block."""
    x = self.embeddings(tokens, token_types, row_keys)
    mask = layers.valid_tokens(tokens, length)
    names = [f'block_{index}' for index in range(self.depth)]
    keys = [row_random.fold_rows(row_keys, name) for name in names]
    return blocks.apply(self.block, x, mask, keys, lambda out: out.x)

  def run_block(
    self, layer: int, tokens: Tokens, row_keys: RowKeys = None, **options: Any
  ) -> Attended:
    """Runs the block of a layer, from 1, with options of `BertBlock`."""
    mask = layers.valid_tokens(tokens.x, tokens.length)
    block = self.block[layer - 1]
    return blocks.call(block, tokens.x, mask, row_keys, **options)

  def states(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    """Returns what heads read of the output of a block."""
    return x

  def pool(
    self, states: Float[Array, 'B L D'], length: Int[Array, ' B']
  ) -> Float[Array, 'B D']:
    """Returns the state that a row is classified by; see `pooling`."""
    if self.pooling == 'cls':
      return states[:, 0]
    return layers.masked_mean(states, layers.valid_tokens(states, length))

  @nn.nowrap
  def block_flops(
    self, tokens: int, only_cls: bool = False, layer: int = 1
  ) -> float:
    """Returns the FLOPs of a layer's block, for the output of [CLS] or all."""
    count = flops.cls_block if only_cls else flops.block
    return count(tokens, self.width, self.mlp_dim)

  @nn.nowrap
  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one row of tokens `[L]` forward; see `flops`."""
    head = flops.dense(1, self.width, self.width + self.num_classes)
    count: Any = range(1, self.depth + 1)
    return head + sum(self.block_flops(input_shape[0], layer=n) for n in count)
