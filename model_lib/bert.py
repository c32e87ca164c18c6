"""BERT and DistilBERT as classifiers, and the fields of all text encoders.

Devlin et al. 2019; Sanh et al. 2019. Parameters are named as those that
`model_lib.convert` loads from a published checkpoint. The first `length` tokens
of a row are valid; the others are never read.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Interval, Predicate
from jaxtyping import Array, Bool, Float, Int, Key

from model_lib import flops, row_random, sizes
from model_lib.attention import attend
from model_lib.bert_layers import BertBlock, BertEmbeddings, Pooler
from model_lib.layers import ACTIVATIONS, classifier
from model_lib.logical import constrain
from model_lib.sizes import Rate, Size

Activation = Annotated[
  str,
  Predicate(ACTIVATIONS.__contains__),
  f'one of {", ".join(ACTIVATIONS)}',
]


class TextEncoder(nn.Module, kw_only=True):
  """Fields and modules that BERT, EAT and ALBERT share.

  Attributes:
    num_classes: width of the logits; 1 for regression.
    variant: name in `SIZES` of the sizes that are not given; '' if all are.
    width: width of the tokens.
    mlp_dim: hidden width of the feed-forward networks.
    num_heads: attention heads.
    vocab_size: number of token ids.
    max_positions: longest sequence.
    type_vocab_size: number of token types, 0 for none (DistilBERT).
    activation: of the feed-forward networks.
    norm_epsilon: epsilon of every LayerNorm.
    dropout: rate on embeddings and after both halves of a block.
    attention_dropout: rate on the attention weights.
    classifier_dropout: rate before every classifier.
    dtype: compute dtype; parameters and logits are float32.

  Raises:
    FieldError: at construction, for fields that contradict each other.
  """

  SIZES: ClassVar[sizes.Sizes] = sizes.BERT

  num_classes: int
  variant: str = ''
  width: Size = None
  mlp_dim: Size = None
  num_heads: Size = None
  vocab_size: Annotated[int, Interval(ge=1, le=2**24)] = 30522
  max_positions: Annotated[int, Interval(ge=1, le=2**20)] = 512
  type_vocab_size: Annotated[int, Interval(ge=0, le=2**20)] = 2
  activation: Activation = 'gelu'
  norm_epsilon: Annotated[float, Interval(ge=1e-30, le=0.1)] = 1e-12
  dropout: Rate = 0.1
  attention_dropout: Rate = 0.1
  classifier_dropout: Rate = 0.1
  dtype: Any = jnp.float32

  def __post_init__(self):
    self.SIZES.complete(self)
    super().__post_init__()

  @nn.nowrap
  def make_embeddings(self, width: int) -> BertEmbeddings:
    """Returns the embeddings that the fields describe."""
    return BertEmbeddings(
      vocab_size=self.vocab_size,
      width=width,
      max_positions=self.max_positions,
      type_vocab_size=self.type_vocab_size,
      norm_epsilon=self.norm_epsilon,
      dropout=self.dropout,
      dtype=self.dtype,
    )

  @nn.nowrap
  def make_blocks(
    self, count: int, attend: Callable[..., Any] = attend
  ) -> list[BertBlock]:
    """Returns `count` blocks that the fields describe."""
    return [
      BertBlock(
        num_heads=self.num_heads,
        mlp_dim=self.mlp_dim,
        activation=self.activation,
        norm_epsilon=self.norm_epsilon,
        dropout=self.dropout,
        attention_dropout=self.attention_dropout,
        attend=attend,
        dtype=self.dtype,
      )
      for _ in range(count)
    ]

  def classify(
    self, cls: Float[Array, 'B D'], row_keys: Key[Array, ' B'] | None = None
  ) -> tuple[Float[Array, 'B O'], Float[Array, 'B D']]:
    """Returns (logits, features) of [CLS], by `pooler` and `head`."""
    features = self.pooler(cls).astype(jnp.float32)
    logits = self.head(
      row_random.drop(features, self.classifier_dropout, row_keys, 'classifier')
    )
    return constrain(logits, 'batch', 'classes'), features


class BertClassifier(TextEncoder, kw_only=True):
  """BERT with a pooler and a classifier on [CLS]; see `TextEncoder`.

  Attributes:
    depth: number of blocks.
    pooler_activation: 'tanh' (BERT) or 'relu' (DistilBERT).
    cls_only: compute only [CLS] in the last block: the same logits.
  """

  depth: Size = None
  pooler_activation: Activation = 'tanh'
  cls_only: bool = False

  def setup(self):
    """Declares embeddings, blocks, pooler and head."""
    self.embeddings = self.make_embeddings(self.width)
    self.block = self.make_blocks(self.depth)
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
      tokens: token ids, padded after `length`.
      token_types: segment of each token.
      length: valid tokens of each row, at least 1.
      row_keys: one key per row turns dropout on.

    Returns:
      (logits, out) with the pooled [CLS] `out['features']` `[B, D]`, both
      float32.
    """
    states = self.encode(tokens, token_types, length, row_keys, self.cls_only)
    logits, features = self.classify(states[:, 0], row_keys)
    return logits, {'features': features}

  def encode(
    self,
    tokens: Int[Array, 'B L'],
    token_types: Int[Array, 'B L'],
    length: Int[Array, ' B'],
    row_keys: Key[Array, ' B'] | None = None,
    cls_only: bool = False,
  ) -> Float[Array, 'B Q D']:
    """Returns the states after the last block, of [CLS] alone with `cls_only`.

    Arguments are those of the call.
    """
    x = self.embeddings(tokens, token_types, row_keys)
    mask = valid_tokens(tokens, length)
    for index, block in enumerate(self.block):
      last = index == len(self.block) - 1
      keys = row_keys
      if keys is not None:
        keys = row_random.fold_rows(keys, f'block_{index}')
      x = block(x, mask, keys, num_queries=1 if last and cls_only else None).x
    return x

  @nn.nowrap
  def flops(self, input_shape: tuple[int, ...]) -> float:
    """Returns the FLOPs of one row of tokens `[L]` forward; see `flops`."""
    tokens = input_shape[0]
    block = flops.block(tokens, self.width, self.mlp_dim)
    last = flops.cls_block(tokens, self.width, self.mlp_dim)
    blocks = self.depth * block + self.cls_only * (last - block)
    return blocks + flops.dense(1, self.width, self.width + self.num_classes)


def valid_tokens(
  x: Float[Array, 'B L D'] | Int[Array, 'B L'], length: Int[Array, ' B']
) -> Bool[Array, 'B L']:
  """Returns True for the first `length` tokens of each row."""
  return jnp.arange(x.shape[1])[None] < length[:, None]
