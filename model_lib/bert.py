"""BERT and DistilBERT: embeddings, post-LN blocks, pooler, classifier.

Devlin et al. 2019; Sanh et al. 2019. Parameters stand where
`model_lib.huggingface` puts those of a published checkpoint. Valid tokens are
the first `length` of a row; what lies behind them is never read.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from model_lib import flops, row_random
from model_lib.attention import KeysValues, MultiHeadAttention, attend
from model_lib.bert_sizes import BertSizes, resolve_sizes
from model_lib.layers import (
  Embedding,
  LayerNorm,
  Mlp,
  Pooler,
  classifier,
)
from model_lib.logical import constrain

INIT = nn.initializers.truncated_normal(0.02)


class BertEmbeddings(nn.Module):
  """Words, token types and positions, summed and normalised.

  Attributes:
    vocab_size: number of token ids.
    width: width of the tokens.
    max_positions: longest sequence.
    type_vocab_size: number of token types, 0 for none (DistilBERT).
    norm_epsilon: of the LayerNorm.
    dropout: rate on the result.
    dtype: dtype of the result.
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
    """Embeds token ids; an id or type that does not exist becomes NaN.

    Args:
      tokens: token ids.
      token_types: segment of each token; not read without token types.
      row_keys: one key per row turns dropout on.

    Raises:
      ValueError: if the sequence is longer than `max_positions`.
    """
    length = tokens.shape[1]
    if length > self.max_positions:
      raise ValueError(
        f'max_positions: expected at least the length {length} of the '
        f'sequence, got {self.max_positions}; shorten the sequences'
      )
    x = Embedding(self.vocab_size, self.width, INIT, name='word')(tokens)
    if self.type_vocab_size:
      types = Embedding(
        self.type_vocab_size, self.width, INIT, name='token_type'
      )
      x = x + types(token_types)
    positions = Embedding(self.max_positions, self.width, INIT, name='position')
    x = x + positions(jnp.arange(length)[None])
    x = LayerNorm(self.dtype, self.norm_epsilon, name='norm')(x)
    x = constrain(x, 'batch', 'length', 'embed')
    return row_random.drop(x, self.dropout, row_keys, 'embeddings')


class BertBlock(nn.Module):
  """A Transformer block that normalises after each residual (post-LN).

  Attributes:
    num_heads: attention heads.
    mlp_dim: hidden width of the feed-forward network.
    activation: of the feed-forward network, a name in `layers.ACTIVATIONS`.
    norm_epsilon: of both LayerNorms.
    dropout: rate after the attention and after the feed-forward network.
    attention_dropout: rate on the attention weights.
    attend: attention of queries to keys; see `attention.attend`.
    dtype: compute dtype; norms and softmax are float32.
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
    return_received: bool = False,
    num_queries: int | None = None,
    keys_values: KeysValues | None = None,
    return_keys_values: bool = False,
  ) -> Any:
    """Applies attention, then the feed-forward network.

    Args:
      x: tokens; with `keys_values`, those that attend.
      mask: non-zero for a valid token; None if all are. The others are never
        read by valid ones. With `keys_values`, of their tokens.
      row_keys: one key per row turns dropout on.
      return_received: whether to return also the attention that each token
        received.
      num_queries: compute so many leading tokens, attending to all whatever
        `attend` is; None for all. One ([CLS]) gets the same numbers for about a
        sixth of the work; none leaves the keys and values. Dropout draws other
        noise for them.
      keys_values: of the tokens to attend to, from an earlier call; computed
        from `x` if None.
      return_keys_values: whether to return them, for a later call.

    Returns:
      The tokens, float `[B, L, D]`, or the first `num_queries` of them; with
      `return_received` also the attention received, float32 `[B, L]`, see
      `attention.mean_received`; with `return_keys_values` also those, at the
      end.

    Raises:
      ValueError: an illegal field, or `num_queries` with `return_received`.
    """
    result: Any = MultiHeadAttention(
      num_heads=self.num_heads,
      attend=self.attend if num_queries is None else attend,
      dropout=self.attention_dropout,
      kernel_init=INIT,
      dtype=self.dtype,
      name='attention',
    )(
      x,
      mask,
      row_keys,
      return_received,
      num_queries,
      keys_values,
      return_keys_values,
    )
    more = return_received or return_keys_values
    attended, *rest = result if more else (result,)
    x = x[:, :num_queries].astype(self.dtype)
    x = x + row_random.drop(attended, self.dropout, row_keys, 'attention')
    x = LayerNorm(self.dtype, self.norm_epsilon, name='attention_norm')(x)
    out = Mlp(
      mlp_dim=self.mlp_dim,
      activation=self.activation,
      kernel_init=INIT,
      dtype=self.dtype,
      name='mlp',
    )(x)
    x = x + row_random.drop(out, self.dropout, row_keys, 'mlp')
    x = LayerNorm(self.dtype, self.norm_epsilon, name='mlp_norm')(x)
    x = constrain(x, 'batch', 'length', 'embed')
    return (x, *rest) if more else x


def embeddings_of(model: Any) -> BertEmbeddings:
  """The embeddings that a model with the fields of `BertClassifier` has."""
  return BertEmbeddings(
    vocab_size=model.vocab_size,
    width=model.sizes().width,
    max_positions=model.max_positions,
    type_vocab_size=model.type_vocab_size,
    norm_epsilon=model.norm_epsilon,
    dropout=model.dropout,
    dtype=model.dtype,
  )


def blocks_of(model: Any, attend: Callable[..., Any] = attend) -> list[Any]:
  """The blocks that a model with the fields of `BertClassifier` has."""
  sizes = model.sizes()
  return [
    BertBlock(
      num_heads=sizes.num_heads,
      mlp_dim=sizes.mlp_dim,
      activation=model.activation,
      norm_epsilon=model.norm_epsilon,
      dropout=model.dropout,
      attention_dropout=model.attention_dropout,
      attend=attend,
      dtype=model.dtype,
    )
    for _ in range(sizes.depth)
  ]


class BertClassifier(nn.Module):
  """BERT with a pooler and a classifier on [CLS].

  Attributes:
    num_classes: width of the logits; 1 for regression.
    variant: sizes by name, see `bert_sizes.VARIANTS`; the next four override
      it unless 0. Its other fields have to be given.
    width: width of the tokens.
    depth: number of blocks.
    mlp_dim: hidden width of the feed-forward networks.
    num_heads: attention heads.
    vocab_size: number of token ids.
    max_positions: longest sequence.
    type_vocab_size: number of token types, 0 for none (DistilBERT).
    activation: of the feed-forward networks.
    norm_epsilon: of every LayerNorm.
    pooler_activation: 'tanh' (BERT) or 'relu' (DistilBERT).
    dropout: rate on embeddings and after both halves of a block.
    attention_dropout: rate on the attention weights.
    classifier_dropout: rate before the classifier.
    cls_only: whether the last block computes [CLS] alone: the same logits.
    dtype: compute dtype; parameters and logits are float32.
  """

  num_classes: int
  variant: str = ''
  width: int = 0
  depth: int = 0
  mlp_dim: int = 0
  num_heads: int = 0
  vocab_size: int = 30522
  max_positions: int = 512
  type_vocab_size: int = 2
  activation: str = 'gelu'
  norm_epsilon: float = 1e-12
  pooler_activation: str = 'tanh'
  dropout: float = 0.1
  attention_dropout: float = 0.1
  classifier_dropout: float = 0.1
  cls_only: bool = False
  dtype: Any = jnp.float32

  def sizes(self) -> BertSizes:
    """The sizes that the fields describe; see `resolve_sizes`."""
    return resolve_sizes(
      self.variant,
      width=self.width,
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
    )

  def setup(self):
    """Declares embeddings, blocks, pooler and head."""
    self.embeddings = embeddings_of(self)
    self.block = blocks_of(self)
    self.pooler = Pooler(self.pooler_activation, dtype=self.dtype)
    self.head = classifier(self.num_classes)

  def __call__(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B O'], dict[str, Any]]:
    """Classifies rows of token ids.

    Args:
      tokens: token ids, padded behind `length`.
      token_types: segment of each token.
      length: valid tokens of each row, at least 1.
      row_keys: one key per row turns dropout on.

    Returns:
      (logits, out) with the pooled [CLS] `out['features']` `[B, D]`, both
      float32.
    """
    states = self.encode(tokens, token_types, length, row_keys, self.cls_only)
    features = self.pooler(states[:, 0]).astype(jnp.float32)
    logits = self.head(
      row_random.drop(features, self.classifier_dropout, row_keys, 'classifier')
    )
    return constrain(logits, 'batch', 'classes'), {'features': features}

  def encode(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: Key[Array, ' B'] | None = None,
    cls_only: bool = False,
  ) -> Float[Array, 'B Q D']:
    """States after the last block, of [CLS] alone with `cls_only`."""
    x: Any = self.embeddings(tokens, token_types, row_keys)
    mask = jnp.arange(tokens.shape[1])[None] < length[:, None]
    for index, block in enumerate(self.block):
      last = index == len(self.block) - 1
      keys = row_keys
      if keys is not None:
        keys = row_random.fold_rows(keys, f'block_{index}')
      x = block(x, mask, keys, num_queries=1 if last and cls_only else None)
    return x

  def flops(self, input_shape: tuple[int, ...]) -> float:
    """FLOPs of one row of tokens `[L]` forward; see `flops`."""
    sizes, tokens = self.sizes(), input_shape[0]
    block = flops.block(tokens, sizes.width, sizes.mlp_dim)
    last = flops.cls_block(tokens, sizes.width, sizes.mlp_dim)
    blocks = sizes.depth * block + self.cls_only * (last - block)
    return blocks + flops.dense(1, sizes.width, sizes.width + self.num_classes)
