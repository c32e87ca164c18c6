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
from model_lib.layers import ACTIVATIONS, build, classifier
from model_lib.logical import constrain
from model_lib.sizes import Rate, Size

Activation = Annotated[
  str,
  Predicate(ACTIVATIONS.__contains__),
  f'one of {", ".join(ACTIVATIONS)}',
]


class TextEncoder(nn.Module, kw_only=True):
  """Fields and modules that BERT, EAT and ALBERT share.

  Fields that contradict each other raise FieldError at construction.
  """

  SIZES: ClassVar[sizes.Sizes] = sizes.BERT

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
  def make_embeddings(self, width: int) -> BertEmbeddings:
    """Returns the embeddings that the fields describe."""
    return build(BertEmbeddings, self, width=width)

  @nn.nowrap
  def make_blocks(
    self, count: int, attend: Callable[..., Any] = attend
  ) -> list[BertBlock]:
    """Returns `count` blocks that the fields describe."""
    return [build(BertBlock, self, attend=attend) for _ in range(count)]

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
  """BERT with a pooler and a classifier on [CLS]; see `TextEncoder`."""

  depth: Size = None  # number of blocks
  pooler_activation: Activation = 'tanh'  # 'relu' in DistilBERT
  cls_only: bool = False  # compute only [CLS] in the last block: same logits

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
    """Classifies rows of token ids, padded after `length`.

    `row_keys`, one per row, turn dropout on. Returns (logits, out) with the
    pooled [CLS] `out['features']` `[B, D]`, both float32.
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
    """Returns the states after the last block, with `cls_only` of [CLS]."""
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
