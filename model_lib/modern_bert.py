"""ModernBERT as a classifier.

Warner et al. 2024. It differs from BERT by its positions, which rotate queries
and keys (RoPE, Su et al. 2021), by norms before both halves of a block, by a
gated network, and by local attention in most blocks. A position is that in the
text, so a pruned row has the distances of the whole one.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jaxtyping import Array, Bool, Float, Int, Num

from core.errors import ConfigError
from model_lib import bert, flops, row_random, sizes
from model_lib.attention import Attended, attend, wide
from model_lib.layers import ACTIVATIONS, LayerNorm, Mlp, build
from model_lib.local_attention import Implementation, Local, local_scores
from model_lib.logical import constrain, partitioned_dense
from model_lib.row_random import RowKeys
from model_lib.sizes import Rate
from model_lib.tokens import whole

Base = Annotated[float, Interval(ge=1.0, le=1e9)]


def rotate(
  x: Float[Array, 'B L D'],
  positions: Int[Array, 'B S'],
  num_heads: int,
  base: float,
) -> Float[Array, 'B L D']:
  """Rotates pairs of features of each head by angles (RoPE, equation 34).

  Pair i of a head of size H, features i and i + H / 2, is turned by `position *
  base^(-2i / H)`. `x` are the first L tokens.
  """
  batch, length, width = x.shape
  size = width // num_heads
  # In float32 as published models were trained.
  powers = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
  rates = np.float32(1.0) / np.float32(base) ** powers
  angles = positions[:, :length, None].astype(jnp.float32) * rates[None, None]
  heads = x.reshape(batch, length, num_heads, size).astype(wide(x.dtype))
  first, second = jnp.split(heads, 2, axis=-1)
  cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
  turned = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate(turned, axis=-1).reshape(x.shape).astype(x.dtype)


class ModernBertBlock(bert.BertBlock):
  """A pre-norm block; fields as in `ModernBertClassifier`, and those below."""

  base: float = 10000.0  # of the angles, see `rotate`
  reach: int | None = None  # tokens read on each side; None: all
  local_implementation: Implementation = 'auto'  # see `Local`
  is_first: bool = False  # its input is normed already
  norm_epsilon: float = 1e-5
  norm_bias: bool = False
  attention_bias: bool = False
  mlp_bias: bool = False

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x: Float[Array, 'B L D'],
    mask: Bool[Array, 'B S'] | Num[Array, 'B S'] | None = None,
    row_keys: RowKeys = None,
    *,
    positions: Int[Array, 'B S'],
    num_queries: int | None = None,
    **options: Any,
  ) -> Attended:
    """Applies attention, then the feed-forward network, both residual.

    `positions` are those in the text; the others as of `MultiHeadAttention`.
    """
    norm = functools.partial(
      LayerNorm, self.dtype, self.norm_epsilon, self.norm_bias
    )
    local = None
    if self.reach is not None:
      local = Local(positions, self.reach, self.local_implementation)
    turn: Any = dict(num_heads=self.num_heads, base=self.base)
    attention = self.attention(
      local=local,
      rotate=functools.partial(rotate, positions=positions, **turn),
      use_bias=self.attention_bias,
    )
    normed = x if self.is_first else norm(name='attention_norm')(x)
    options['num_queries'] = num_queries
    attended = attention(normed, mask, row_keys, **options)
    x = x[:, :num_queries].astype(self.dtype)
    x = x + row_random.drop(attended.x, self.dropout, row_keys, 'attention')
    kind: Any = dict(gated=True, use_bias=self.mlp_bias, kernel_init=bert.INIT)
    mlp = build(Mlp, self, dropout=0.0, name='mlp', **kind)
    out = mlp(norm(name='mlp_norm')(x))
    x = x + row_random.drop(out, self.dropout, row_keys, 'mlp')
    return attended._replace(x=constrain(x, 'batch', 'length', 'embed'))


class ModernBertPooler(nn.Module):
  """A dense layer with an activation and a norm, before a classifier."""

  activation: str = 'gelu'
  use_bias: bool = False
  norm_epsilon: float = 1e-5
  norm_bias: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, state: Float[Array, 'B D']) -> Float[Array, 'B D']:
    """Transforms the pooled state."""
    dense = partitioned_dense(
      state.shape[-1], 'embed', 'mlp', 'dense', kernel_init=bert.INIT,
      use_bias=self.use_bias, dtype=self.dtype,
    )  # fmt: skip
    x = ACTIVATIONS[self.activation](dense(state))
    norm = LayerNorm(self.dtype, self.norm_epsilon, self.norm_bias, name='norm')
    return norm(x)


class ModernBertClassifier(bert.BertClassifier, kw_only=True):
  """ModernBERT with a pooler and a classifier; see `TextEncoder`."""

  SIZES: ClassVar[sizes.Sizes] = sizes.MODERN_BERT
  MODEL_TYPE: ClassVar[str] = 'modernbert'

  vocab_size: Annotated[int, Interval(ge=1, le=2**24)] = 50368
  max_positions: Annotated[int, Interval(ge=1, le=2**20)] = 8192
  type_vocab_size: Literal[0] = 0
  norm_epsilon: Annotated[float, Interval(ge=1e-30, le=0.1)] = 1e-5
  pooler_activation: bert.Activation = 'gelu'
  dropout: Rate = 0.0
  attention_dropout: Rate = 0.0
  classifier_dropout: Rate = 0.0
  # The first block, and then every `global_every`-th, attends to all tokens,
  # the others within `local_window`, half of it on each side.
  global_every: Annotated[int, Interval(ge=1, le=1000)] = 3
  local_window: Annotated[int, Interval(ge=1, le=2**20)] = 128
  local_implementation: Implementation = 'auto'  # see `local_attention.Local`
  # Of the angles of global and of local attention, see `rotate`.
  global_base: Base = 160000.0
  local_base: Base = 10000.0
  norm_bias: bool = False
  attention_bias: bool = False
  mlp_bias: bool = False
  pooler_bias: bool = False
  pooling: Literal['cls', 'mean'] = 'cls'  # 'mean' of all tokens

  def __post_init__(self):
    super().__post_init__()
    if self.width // self.num_heads % 2:
      expected = f'heads of an even size, of width {self.width}'
      raise ConfigError('num_heads', self.num_heads, expected)

  def setup(self):
    """Also declares the norm after the last block."""
    super().setup()
    self.norm = LayerNorm(self.dtype, self.norm_epsilon, self.norm_bias)

  @nn.nowrap
  def pooler_kind(self) -> Callable[..., nn.Module]:
    """See the base."""
    kind = dict(activation=self.pooler_activation, use_bias=self.pooler_bias)
    return functools.partial(build, ModernBertPooler, self, **kind)

  @nn.nowrap
  def make_embeddings(self, width):
    """See the base; blocks read positions, not embeddings."""
    return build(bert.BertEmbeddings, self, width=width, max_positions=0)

  @nn.nowrap
  def make_blocks(self, count, attend=attend):
    """See the base."""
    made = []
    for index in range(count):
      kind: Any = dict(base=self.global_base, is_first=index == 0)
      if index % self.global_every:
        kind = dict(base=self.local_base, reach=self.local_window // 2)
      made.append(build(ModernBertBlock, self, attend=attend, **kind))
    return made

  def encode(self, tokens, token_types, length, row_keys=None):
    """See the base; its blocks differ and are not scanned."""
    left = whole(self.embeddings(tokens, token_types, row_keys), length)
    for layer in range(1, self.depth + 1):
      keys = row_random.fold_rows(row_keys, f'block_{layer - 1}')
      left = left._replace(x=self.run_block(layer, left, keys).x)
    return self.states(left.x)

  def run_block(self, layer, tokens, row_keys=None, **options):
    """See the base."""
    options['positions'] = tokens.positions
    return super().run_block(layer, tokens, row_keys, **options)

  def states(self, x):
    """Norms the states."""
    return self.norm(x)

  @nn.nowrap
  def block_flops(self, tokens, only_cls=False, layer=1):
    """See the base; counts the scores that are computed, also masked ones."""
    if only_cls:
      return flops.cls_block(tokens, self.width, self.mlp_dim, gated=True)
    count = flops.block(tokens, self.width, self.mlp_dim, gated=True)
    if (layer - 1) % self.global_every:
      scores = local_scores(
        tokens, self.local_window // 2, self.local_implementation
      )
      count += 4.0 * self.width * (scores - tokens**2)
    return count
